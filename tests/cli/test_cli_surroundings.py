"""The command line where descriptors are closed, readers are gone, folders hold strange files or
are wanted by many."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest

import dure
from dure.cli.main import main
from dure.fleet.conditions import Conditions
from dure.report.read import read_run
from dure.report.repeat_command import command as command_of
from dure.report.repeat_command import defaults_of

RANKS = ["train", "digits", "data-parallel", "--workers", "2", "--deadline", "30"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dure", *arguments]


def test_ranks_train_where_all_streams_are_closed(tmp_path: Path) -> None:
    text = 'exec "$@" 0<&- 1>&- 2>&-'
    given = command(*RANKS, "--steps", "3", "--out", str(tmp_path / "run"))
    done = subprocess.run(["sh", "-c", text, "sh", *given], timeout=90, check=False)
    assert done.returncode == 0
    assert (tmp_path / "run" / "summary.json").is_file()


def test_a_run_goes_on_when_nobody_reads_how_far_it_is(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    given = command(*RANKS, "--epochs", "2", "--out", str(tmp_path / "run"))
    subprocess.run(given, stderr=theirs, stdout=subprocess.DEVNULL, timeout=90, check=False)
    os.close(theirs)
    assert (tmp_path / "run" / "summary.json").is_file()


def test_a_folder_is_not_searched_for_modules_also_where_output_is_closed(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text('raise RuntimeError("mine")')
    arguments = [*RANKS, "--steps", "2", "--out", "run"]
    as_dure_does = (
        f"import sys; sys.path.pop(0); from dure.cli.main import main; sys.exit(main({arguments}))"
    )
    # What is opened first gets the number of standard output, which ranks have for their own.
    text = 'exec "$@" 1>&-'
    done = subprocess.run(
        ["sh", "-c", text, "sh", sys.executable, "-c", as_dure_does],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "summary.json").is_file()


def test_runs_of_one_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "now")
    for _ in range(2):
        assert main(["train", "digits", "single-worker", "--steps", "1"]) == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "digits-single-worker-now",
        "digits-single-worker-now-2",
    ]
    assert main(["train", "digits", "single-worker", "--steps", "1", "--batch-size", "0"]) == 2
    assert len(list((tmp_path / "runs").iterdir())) == 2, "what was refused leaves no folder"


def test_a_task_that_exits_says_its_own_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text('import sys\ndef task():\n    sys.exit("no data here")\n')
    assert main(["train", f"{tmp_path / 'mine.py'}:task", "single-worker", "--steps", "1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "mine.py:task failed in its function: SystemExit: no data here" in line


@pytest.mark.parametrize("part", ["model.safetensors", "state.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_told_and_nothing_is_changed(tmp_path: Path, part: str) -> None:
    folder = tmp_path / "run"
    dure.train(dure.load_task("digits"), dure.SingleWorker(), stop=dure.Stop(steps=3), out=folder)
    (damaged,) = (folder / "checkpoint").glob(f"*/{part}")
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(dure.errors.RunFolderError, match="is damaged"):
        dure.resume(folder, stop=dure.Stop(steps=5))
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_a_run_whose_seconds_are_over_trains_no_more(tmp_path: Path) -> None:
    run = dure.train(
        dure.load_task("digits"),
        dure.SingleWorker(),
        stop=dure.Stop(seconds=0.2),
        out=tmp_path / "run",
    )
    again = dure.resume(tmp_path / "run")
    assert again.summary["steps"] == run.summary["steps"]
    assert again.summary["ended"] == "seconds"


def test_a_task_s_parameter_with_the_name_of_a_flag_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("def task(seed: int = 0):\n    raise AssertionError\n")
    assert main(["train", f"{tmp_path / 'mine.py'}:task", "single-worker", "--steps", "1"]) == 2
    assert "the task has a parameter 'seed'" in capsys.readouterr().err


def test_the_report_knows_every_condition_of_a_simulation() -> None:
    assert set(defaults_of("worlds", "simulated")) == {field.name for field in fields(Conditions)}


def test_the_report_s_command_repeats_the_conditions(tmp_path: Path) -> None:
    world = dure.Simulated(
        devices="stragglers:0.2:10", drop_out=0.3, attack="sign-flip", attackers=1
    )
    for name, asked in {"plain": None, "hard": world}.items():
        strategy = dure.FedAvg(clients=5)
        dure.train(
            dure.load_task("digits"), strategy, asked, dure.Stop(rounds=1), out=tmp_path / name
        )
    plain, hard = (command_of(read_run(tmp_path / name)) for name in ("plain", "hard"))
    assert plain is not None
    assert "--devices" not in plain
    assert hard is not None
    for text in (
        "--devices stragglers:0.2",
        "--drop-out 0.3",
        "--attack sign-flip:1.0",
        "--attackers 1",
    ):
        assert text in hard


def test_a_comparison_without_plotly_is_refused_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *more: None if name == "plotly" else found(name, *more),
    )
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    given = ["compare", "digits", "single-worker", "--steps", "1", "--out", str(tmp_path / "out")]
    assert main(given) == 2
    assert "pip install" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_group_of_processes_that_is_ended_leaves_no_folder_behind(tmp_path: Path) -> None:
    given = command(*RANKS, "--epochs", "100000", "--out", str(tmp_path / "run"))
    surroundings = {**os.environ, "TMPDIR": str(tmp_path)}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(given, env=surroundings, start_new_session=True, **quiet)  # type: ignore[call-overload]
    until = time.monotonic() + 60
    while not (tmp_path / "run" / "history.jsonl").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert list(tmp_path.glob("dure-*"))
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(30)
    until = time.monotonic() + 10
    while (left := list(tmp_path.glob("dure-*"))) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left
