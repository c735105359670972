"""The page on systems of one's own does what it says: its file is trained, compared, resumed and
reported."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dure
from dure.cli.main import main
from dure.errors import RunFolderError
from test_docs import DOCS, FENCE, commands

PAGE = DOCS / "own-systems.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's file."""
    monkeypatch.chdir(tmp_path)
    for _, body in FENCE.findall(PAGE.read_text()):
        named = re.match(r"# (my_\w+\.py)\n", body)
        if named:
            Path(named[1]).write_text(body)
    return tmp_path


@pytest.mark.parametrize("command", list(commands(PAGE)), ids=shlex.join)
def test_the_commands_of_the_page_run(folder: Path, command: list[str]) -> None:
    limits = ["--epochs", "1"] if command[0] == "compare" else []
    assert main([*command, *limits, "--out", "run"]) == 0
    assert main(["report", "run"]) == 0


def test_the_python_of_the_page_runs_and_resumes(folder: Path) -> None:
    (script,) = (body for _, body in FENCE.findall(PAGE.read_text()) if "import FedNova" in body)
    Path("script.py").write_text(script)
    subprocess.run([sys.executable, "script.py"], check=True, capture_output=True)
    assert json.loads(Path("runs/nova/summary.json").read_text())["steps"] == 8


def test_it_is_resumed_in_another_folder_to_the_same_bits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = ["train", "digits", "my_systems.py:FedNova", "--engine", "loop"]
    asked = [*named, "--clients", "4", "--effective-steps", "5"]
    assert main([*asked, "--rounds", "3", "--out", "whole"]) == 0
    assert main([*asked, "--rounds", "1", "--out", "part"]) == 0
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    run = dure.resume(folder / "part", stop=dure.Stop(rounds=3))
    whole = dure.load_run(folder / "whole", dure.load_task("digits").model)
    for mine, other in zip(run.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    written = json.loads((folder / "part" / "config.json").read_text())["strategy"]
    assert written["name"] == "fed-nova"
    assert written["from"] == f"{folder.resolve()}/my_systems.py:FedNova"


def test_with_as_many_steps_as_every_client_makes_it_is_fed_avg(folder: Path) -> None:
    from dure.run.registry import parse_strategy

    task = dure.load_task("digits")
    world = dure.Simulated(engine="loop")
    stop = dure.Stop(rounds=2)
    nova = parse_strategy("my_systems.py:FedNova,local_steps=4,effective_steps=4")
    ours = dure.train(task, nova, world, stop)
    theirs = dure.train(task, dure.FedAvg(local_steps=4), world, stop)
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_report_imports_nothing_that_a_folder_names(folder: Path) -> None:
    assert main(["train", "digits", "my_systems.py:FedNova", "--rounds", "1", "--out", "run"]) == 0
    (folder / "my_systems.py").write_text("raise SystemExit('it was imported')")
    assert main(["report", "run"]) == 0
    page = (folder / "run" / "report.html").read_text()
    assert "FedNova" in page
    assert "my_systems.py:FedNova" in page  # in the command that repeats the run
    with pytest.raises(RunFolderError, match=r"changed code: .*my_systems\.py was edited"):
        dure.resume("run", stop=dure.Stop(rounds=2))
    with pytest.raises(RunFolderError, match="SystemExit: it was imported"):
        dure.resume("run", strategy="my_systems.py:FedNova", stop=dure.Stop(rounds=2))


def test_a_field_with_the_name_of_a_flag_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path("my_systems.py").read_text().replace("effective_steps: float", "steps: float")
    Path("mine.py").write_text(text.replace("FedNova", "Mine"))
    assert main(["train", "digits", "mine.py:Mine"]) == 2
    assert "Mine has a field 'steps', but dure has a flag of that name" in capsys.readouterr().err
