"""The command that repeats a run: it exists for every compared system, and gives the same bits."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from current_defaults import current_defaults
from sample_runs import write_run

import dure.report.repeat_command
from dure.cli.comparing import COMPARED
from dure.cli.comparison_entries import ComparisonEntries, without_options
from dure.cli.main import main
from dure.contracts.strategy import Strategy
from dure.contracts.world import World
from dure.report.read import read_run
from dure.report.repeat_command import COUNTS_OWN_RANKS, command, defaults_of
from dure.run.registry import encode, strategy_class


def command_of(folder: Path, **config: Any) -> str | None:
    return command(read_run(write_run(folder, "run", config=config)))


def entry_of(system: str) -> tuple[Strategy, World, dict[str, Any]]:
    """Strategy and world of a system of a comparison, and its task in the form of config.json."""
    own, options = without_options(system, "digits")
    entries = ComparisonEntries("digits", {"model": "logistic", "lr": 0.1}, lambda task: task)
    strategy, world, task = entries.entry(own, options, None)
    return strategy, world, dict(task.reference or {})


@pytest.mark.parametrize("system", COMPARED)
def test_every_compared_system_has_a_command_that_asks_for_the_same(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, world, task = entry_of(system)
    stop = {"epochs": 2.0, "bytes": 1000, "target": {"test_accuracy": 0.5}, "min_delta": 0.0}
    written = {"strategy": encode(strategy), "world": encode(world), "task": task}
    line = command_of(tmp_path / "run", **written, stop=stop, seed=3)
    assert line is not None
    asked: list[partial[Any]] = []

    def show_run(run: partial[Any], *more: Any, **how: Any) -> int:
        asked.append(run)
        return 0

    monkeypatch.setattr("dure.cli.main.show_run", show_run)
    monkeypatch.setattr("dure.cli.main.start_fork_server", lambda: None)
    words = [*shlex.split(line)[1:], "--out", str(tmp_path / "again")]
    assert main(words) == 0
    task_again, strategy_again, world_again, stop_again = asked[0].args
    assert (strategy_again, world_again) == (strategy, world)
    assert task_again.reference == task
    assert (stop_again.epochs, stop_again.bytes, stop_again.target) == (2, 1000, stop["target"])
    assert asked[0].keywords["seed"] == 3


@pytest.mark.parametrize(
    "system",
    [
        "single-worker,lr=0.03",
        "zero",
        "parallel,data=2",
        "parameter-server",
        "fed-avg,partition=label-shards:2,clients=3",
        "split,clients=3",
    ],
)
def test_the_command_gives_the_same_bits(
    system: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is a row of a comparison, with a learning rate of its own or initial weights."""
    first = ["train", "digits", "single-worker", "--model", "mlp", "--epochs", "0.1", "--json"]
    assert main([*first, "--out", str(tmp_path / "first")]) == 0
    given = ["compare", "digits", system, "--epochs", "0.2", "--workers", "2", "--json"]
    given += ["--weights", str(tmp_path / "first" / "model.safetensors")]
    assert main([*given, "--out", str(tmp_path / "runs")]) == 0
    folder = Path(json.loads(capsys.readouterr().out.splitlines()[-1])["runs"][0]["folder"])
    line = command(read_run(folder))
    assert line is not None
    assert main([*shlex.split(line)[1:], "--json", "--out", str(tmp_path / "again")]) == 0
    weights = "model.safetensors"
    assert (folder / weights).read_bytes() == (tmp_path / "again" / weights).read_bytes()


def test_the_defaults_in_the_report_are_those_of_the_systems() -> None:
    """python tests/report/current_defaults.py writes the file again."""
    file = Path(dure.report.repeat_command.__file__).with_name("default_settings.json")
    assert json.loads(file.read_text()) == json.loads(json.dumps(current_defaults()))
    counted = [name for name in defaults_of_systems() if strategy_class(name).traits.coordinated]
    assert tuple(counted) == COUNTS_OWN_RANKS


def defaults_of_systems() -> list[str]:
    return list(current_defaults()["systems"])


def test_a_system_without_changes_needs_no_flag(tmp_path: Path) -> None:
    for name in defaults_of_systems():
        strategy = {"name": name, **defaults_of("systems", name)}
        world = {"name": "simulated"}
        line = command_of(tmp_path / name, strategy=strategy, world=world, stop={"epochs": 1})
        here = " --world simulated" if name in COUNTS_OWN_RANKS else ""
        assert line == f"dure train digits {name} --epochs 1{here} --seed 0"


def test_a_bool_is_a_flag_that_negates_its_default(tmp_path: Path) -> None:
    world = {"name": "processes", "ranks": 3}
    told = {
        "on": {"name": "pipeline", "recompute": True},
        "off": {"name": "admm", "duals": False, "adaptive": True},
    }
    lines = [
        command_of(tmp_path / name, strategy=strategy, world=world, stop={"epochs": 1})
        for name, strategy in told.items()
    ]
    assert lines == [
        "dure train digits pipeline --recompute --epochs 1 --workers 3 --seed 0",
        "dure train digits admm --no-duals --epochs 1 --workers 3 --seed 0",
    ]


def test_an_axis_of_a_mesh_has_a_prefix_beside_an_option_of_the_same_name(tmp_path: Path) -> None:
    strategy = {"name": "parallel", "mesh": {"data": 2, "pipeline": 1, "tensor": 2}}
    task = {"name": "mnist", "options": {"data": "mnist"}}
    line = command_of(tmp_path / "run", strategy=strategy, task=task, stop={"epochs": 1})
    assert line == (
        "dure train mnist parallel --mesh.data 2 --mesh.tensor 2 --data mnist --epochs 1 "
        "--workers 2 --seed 0"
    )


def test_a_run_that_no_flags_express_has_no_command(tmp_path: Path) -> None:
    own = {"name": "mine", "from": "mine.py:Mine"}
    told = {
        "in-python": {"task": {"name": None}},
        "elsewhere": {"world": {"name": "network"}},
        "bool-of-a-user": {"strategy": {**own, "careful": True}},
        "nested": {"strategy": {**own, "outer": {"lr": 1}}},
        "lost": {"strategy": {"name": "fed-avg", "partition": "(no message)"}},
        "unnamed": {"strategy": {"name": "mine", "from": None}},
    }
    assert {name: command_of(tmp_path / name, **config) for name, config in told.items()} == (
        dict.fromkeys(told)
    )
    assert command_of(tmp_path / "mine", strategy={**own, "rate": 0.5}, stop={"steps": 1}) == (
        "dure train digits mine.py:Mine --rate 0.5 --steps 1 --workers 2 --seed 0"
    )
