"""A run folder is data: code that it names is run only if the run was begun here, or is named
again."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import dure
from dure.cli.main import main
from dure.errors import RunFolderError
from dure.machine.state import state_folder
from dure.run.trusted_code import ReferenceGuard

TASK = """
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F
import dure
from beside_my_task import EXAMPLES

with open(Path(__file__).with_name("times.txt"), "a") as file:
    file.write("run\\n")

def task(scale: float = 1.0) -> dure.Task:
    inputs = torch.linspace(-1, 1, 2 * EXAMPLES).reshape(EXAMPLES, 2) * scale
    data = inputs, (inputs[:, 0] > 0).long()
    return dure.Task(model=lambda: nn.Linear(2, 2), loss=F.cross_entropy, train=data, test=data)
"""

RULES = """
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
import dure
from dure.data.partition import IID

with open(Path(__file__).with_name("times.txt"), "a") as file:
    file.write("run\\n")

@dataclass(frozen=True)
class Mine(dure.FedAvg):
    name: ClassVar[str] = "mine"

@dataclass(frozen=True)
class Slow(dure.Simulated):
    name: ClassVar[str] = "slow"

@dataclass(frozen=True)
class Halves(IID):
    share: float = 0.5
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a task and rules of a user's own, which note in times.txt that they are run."""
    monkeypatch.setenv("DURE_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "beside_my_task.py").write_text("EXAMPLES = 12\n")
    (folder / "my_task.py").write_text(TASK)
    (folder / "my_rules.py").write_text(RULES)
    yield folder
    forget(tmp_path)


def was_run(folder: Path) -> bool:
    """Whether code in the folder has been run since it was last asked."""
    times = folder / "times.txt"
    there = times.exists()
    times.unlink(missing_ok=True)
    return there


def begin(own: Path, out: Path, *system: str) -> None:
    named = system or ("single-worker", "--steps", "2")
    assert main(["train", f"{own}/my_task.py:task", *named, "--out", str(out)]) == 0
    forget(own)


def forget(own: Path) -> None:
    """As a fresh process would be, which has imported nothing of it."""
    was_run(own)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(own)):
            if name in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.unregister_pickle_by_value(module)
            del sys.modules[name]


def goes_on(out: Path, *flags: str) -> int:
    return main(["train", "--resume", str(out), "--epochs", "50", *flags])


def test_a_run_that_was_begun_here_goes_on_wherever_its_folder_is(own: Path) -> None:
    begin(own, own / "run")
    shutil.copytree(own / "run", own.parent / "copy")
    shutil.move(own / "run", own.parent / "moved")
    for place in ("copy", "moved"):
        assert goes_on(own.parent / place) == 0


def test_code_that_was_not_begun_here_is_not_run_until_it_is_named(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(own, own / "run")
    monkeypatch.setenv("DURE_STATE_HOME", str(own / "another machine"))
    assert goes_on(own / "run") == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert "was not started on this machine" in line
    assert "name it again: --task" in line
    assert main(["report", str(own / "run")]) == 0
    assert not was_run(own)
    assert goes_on(own / "run", "--task", f"{own}/my_task.py:task") == 0
    # What was named once is known from then on.
    assert goes_on(own / "run", "--epochs", "60") == 0


@pytest.mark.parametrize("name", ["os:system", "t.py:task", "json.tool:main", "./run/t:task"])
def test_a_config_from_elsewhere_starts_nothing(
    own: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(own)
    run = own / "run"
    run.mkdir()
    for folder in (own, run):
        (folder / "t.py").write_text(f"open({str(own / 'times.txt')!r}, 'w').close()\n")
    options = {"command": f"touch {own}/times.txt"} if name == "os:system" else {}
    asked = config(task={"name": name, "options": options})
    (run / "config.json").write_text(json.dumps(asked))
    with pytest.raises(RunFolderError, match="name it again: --task"):
        dure.resume(run)
    assert not was_run(own)


def config(**changes: Any) -> dict[str, Any]:
    return {
        "label": "x",
        "task": {"name": "digits", "options": {}},
        "strategy": {"name": "fed-avg"},
        "world": {"name": "simulated"},
        "stop": {"rounds": 1},
        "seed": 0,
        "evaluate_every": None,
        "checkpoint_every": None,
        **changes,
    }


CLASS = "my_rules.py:Halves"


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"strategy": {"name": "mine", "from": "my_rules.py:Mine"}}, "--strategy"),
        ({"strategy": {"name": "my_rules.py:Mine"}}, "--rules"),
        ({"world": {"name": "slow", "from": "my_rules.py:Slow"}}, "--world"),
        ({"strategy": {"name": "fed-avg", "partition": CLASS}}, "--rules"),
        ({"strategy": {"name": "fed-avg", "aggregate": f"clipped:1/{CLASS}"}}, "--rules"),
        ({"world": {"name": "simulated", "attack": CLASS, "attackers": 1}}, "--rules"),
        ({"world": {"name": "simulated", "devices": CLASS}}, "--rules"),
        ({"world": {"name": "simulated", "availability": CLASS}}, "--rules"),
        ({"world": {"name": "simulated", "arrival": CLASS}}, "--rules"),
    ],
)
def test_no_name_in_a_config_from_elsewhere_is_followed(
    own: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], flag: str
) -> None:
    monkeypatch.chdir(own)
    Path("run").mkdir()
    Path("run/config.json").write_text(json.dumps(config(**changes)))
    with pytest.raises(RunFolderError, match=f"name it again: {flag}"):
        dure.resume("run")
    assert not was_run(own)


def test_classes_go_on_and_are_named_again_as_tasks_are(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = [f"{own}/my_rules.py:Mine", "--partition", f"{own}/my_rules.py:Halves:0.5"]
    begin(own, own / "run", *system, "--clients", "2", "--rounds", "1")
    assert goes_on(own / "run", "--rounds", "2") == 0
    forget(own)
    # On another machine, where the files lie elsewhere.
    monkeypatch.setenv("DURE_STATE_HOME", str(own.parent / "another state"))
    there = own.rename(own.parent / "elsewhere")
    named = ["--task", f"{there}/my_task.py:task", "--strategy", f"{there}/my_rules.py:Mine"]
    assert goes_on(there / "run", "--rounds", "3", *named) == 2
    rules = ["--rules", f"{there}/my_rules.py:Halves"]
    assert goes_on(there / "run", "--rounds", "3", *named, *rules) == 0
    written = json.loads((there / "run" / "config.json").read_text())["strategy"]
    assert written["from"] == f"{there}/my_rules.py:Mine"
    assert written["partition"].startswith(f"{there}/my_rules.py:Halves")


@pytest.mark.parametrize("file", ["my_task.py", "beside_my_task.py"])
def test_code_that_has_changed_is_named_again(
    own: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(own, own / "run")
    with open(own / file, "a") as edited:
        edited.write("# other code\n")
    assert goes_on(own / "run") == 2
    assert f"has changed code: {own / file} was edited" in capsys.readouterr().err
    assert not was_run(own)
    assert goes_on(own / "run", "--task", f"{own}/my_task.py:task") == 0


def test_an_edited_config_was_not_begun_here(own: Path) -> None:
    begin(own, own / "run")
    file = own / "run" / "config.json"
    asked = json.loads(file.read_text())
    # Written in another way, it is still the same.
    file.write_text(json.dumps(dict(reversed(asked.items()))))
    assert goes_on(own / "run") == 0
    forget(own)
    asked["task"]["options"] = {"scale": 2.0}
    file.write_text(json.dumps(asked))
    with pytest.raises(RunFolderError, match="or was edited since"):
        dure.resume(own / "run")
    assert not was_run(own)


def test_a_module_of_another_folder_is_not_taken_for_one_that_was_begun(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own)
    arguments = ["train", "my_task:task", "single-worker", "--steps", "2", "--out", "run"]
    assert main(arguments) == 0
    forget(own)
    sent = own.parent / "sent"
    sent.mkdir()
    shutil.copytree(own / "run", sent / "run")
    (sent / "my_task.py").write_text(TASK)
    (sent / "beside_my_task.py").write_text("EXAMPLES = 12\n")
    monkeypatch.chdir(sent)
    assert main(["train", "--resume", "run", "--steps", "4"]) == 0
    assert was_run(own)
    assert not was_run(sent)


def test_an_installed_module_is_not_looked_for_in_the_working_directory(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dure.machine import state
    from dure.run.trusted_code import _name

    asked = config(task={"name": "my_task:task", "options": {}})
    state.write_state_file(_name(asked), b'{"files": {}}')
    monkeypatch.chdir(own)
    with pytest.raises(RunFolderError, match="has changed since the run was started"):
        ReferenceGuard(own, asked)("my_task:task")
    assert ReferenceGuard(own, asked)("json.tool:main") == "json.tool:main"


def test_what_is_kept_is_private_and_not_believed_otherwise(own: Path) -> None:
    begin(own, own / "run")
    (kept,) = state_folder().iterdir()
    for path, mode in ((state_folder(), 0o700), (kept, 0o600)):
        assert stat.S_IMODE(path.stat().st_mode) == mode
        assert path.stat().st_uid == os.geteuid()
    kept.chmod(0o622)
    with pytest.raises(RunFolderError, match="was not started on this machine"):
        dure.resume(own / "run")
    kept.chmod(0o600)
    kept.write_text("{")
    with pytest.raises(RunFolderError, match="cannot be verified"):
        dure.resume(own / "run")
    assert not was_run(own)


def test_a_machine_that_cannot_remember_says_so_and_trains(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own / "file").write_text("")
    monkeypatch.setenv("DURE_STATE_HOME", str(own / "file"))
    task = dure.load_task(f"{own}/my_task.py:task")
    stop = dure.Stop(steps=2)
    with pytest.warns(
        UserWarning, match="cannot record on this machine that the run was started here"
    ):
        run = dure.train(task, dure.SingleWorker(), stop=stop, out=own / "run")
    assert run.summary["steps"] == 2


def test_a_run_of_what_dure_brings_along_leaves_no_trace_and_needs_no_permission(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["train", "digits", "single-worker", "--steps", "2", "--out", str(own / "run")]
    assert main(arguments) == 0
    assert not state_folder().exists()
    monkeypatch.setenv("DURE_STATE_HOME", str(own / "another machine"))
    assert goes_on(own / "run", "--epochs", "1") == 0


PACKAGE = {
    "__init__.py": "",
    "base.py": """
from dataclasses import dataclass
from typing import ClassVar
import dure

@dataclass(frozen=True)
class Base(dure.FedAvg):
    name: ClassVar[str] = "base"
""",
    "systems.py": """
from dataclasses import dataclass
from typing import ClassVar
from . import base
from rules_of_mine.base import Base

assert Base is base.Base

@dataclass(frozen=True)
class Derived(Base):
    name: ClassVar[str] = "derived"
""",
}


def test_a_class_of_a_package_with_relative_imports_is_found_from_elsewhere(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = own / "rules_of_mine"
    package.mkdir()
    for name, text in PACKAGE.items():
        (package / name).write_text(text)
    monkeypatch.chdir(own)
    system = ["rules_of_mine.systems:Derived", "--clients", "2", "--rounds", "1"]
    assert main(["train", "digits", *system, "--out", "run"]) == 0
    written = json.loads(Path("run/config.json").read_text())["strategy"]["from"]
    assert written == f"{own}/rules_of_mine.systems:Derived"
    # In a process that has not imported the package, in another folder.
    code = f"import dure; print(dure.resume({str(own / 'run')!r}, stop=dure.Stop(rounds=2)).label)"
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with open(package / "base.py", "a") as edited:
        edited.write("# other code\n")
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True)
    assert "base.py was edited" in done.stderr
