"""Steps and passes of `dure compare`: equal for all systems, unless a batch size is given."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest

import dure
from dure.catalog import SYSTEMS
from dure.cli.comparing import COMPARED
from dure.cli.equal_steps import STEP, with_equal_steps
from dure.cli.main import main
from dure.cli.worlds import entry
from dure.contracts.strategy import Traits
from dure.run.registry import strategy_class
from dure.tasks.builtin import load_task
from small import small_task

EXAMPLES = 160
TASK = f"""
import torch

import dure


def task() -> dure.Task:
    digits = dure.load_task("digits")
    inputs, targets = digits.train.batch(torch.arange({EXAMPLES}))
    return dure.Task(
        model=digits.model,
        loss=digits.loss,
        train=(inputs, targets),
        test=digits.test,
        optimizer=digits.optimizer,
    )
"""


def configs(folder: Path) -> list[tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]]:
    """Return (config, summary, lines of the history) of each run of a comparison."""
    found = []
    for path in sorted(folder.glob("*/config.json")):
        history = (path.parent / "history.jsonl").read_text().splitlines()
        found.append(
            (
                json.loads(path.read_text()),
                json.loads((path.parent / "summary.json").read_text()),
                [json.loads(line) for line in history],
            )
        )
    return found


def batch_of_a_step(config: dict[str, Any], workers: int) -> float:
    """Return the examples of an optimizer step, by what the documentation of a system says."""
    strategy = config["strategy"]
    size = strategy["batch_size"]
    # Workers divide the batch, and each makes steps of its own.
    if strategy["name"] == "local-sgd":
        return size / workers
    # Clients bring a batch each, and the server makes the step.
    if strategy["name"] == "byzantine":
        assert strategy["local_steps"] == 1
        return size * strategy["clients"]
    return size


def test_every_default_system_makes_equal_steps_and_sees_the_data_as_often(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "few.py").write_text(TASK)
    out = tmp_path / "compared"
    assert main(["compare", f"{tmp_path}/few.py:task", "--out", str(out), "--json"]) == 0
    shown = capsys.readouterr()
    found = configs(out)
    assert len(found) == len(COMPARED)
    for config, summary, history in found:
        name = config["strategy"]["name"]
        batch = batch_of_a_step(config, summary["workers"])
        # Ten clients cannot divide 32 examples: each takes 3, which a line says.
        assert batch == (30 if name == "byzantine" else STEP), config["label"]
        assert summary["epochs"] == 20, config["label"]
        held_out = config["strategy"].get("held_out", 0.0)
        # A client of 16 examples holds out three.
        seen = summary["samples"] / 20
        assert seen == EXAMPLES if not held_out else 0.75 * EXAMPLES < seen < 0.9 * EXAMPLES
        if summary["unit"] == "step":
            # Samples are cumulative.
            counts = [0, *(line["samples"] for line in history if line["kind"] == "step")]
            assert {after - before for before, after in pairwise(counts)} == {STEP}, name
    assert "byzantine makes steps of 30 examples, 3 of each of 10 clients" in shown.err
    assert "32 examples, " not in shown.err.replace("30 examples, ", "")


def test_a_batch_size_that_is_given_wins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "compared"
    systems = ["single-worker,batch_size=None", "fed-avg,batch_size=7", "fed-prox", "fed-sgd"]
    asked = ["compare", "digits", *systems, "--rounds", "1", "--steps", "1", "--json"]
    assert main([*asked, "--out", str(out)]) == 0
    sizes = {c["strategy"]["name"]: c["strategy"]["batch_size"] for c, _, _ in configs(out)}
    assert sizes == {"single-worker": None, "fed-avg": 7, "fed-prox": STEP, "fed-sgd": None}
    assert "fed-sgd makes each step on all data" in capsys.readouterr().err
    systems = ["single-worker", "fed-avg,batch_size=7", "fed-prox"]
    out = tmp_path / "flag"
    asked = ["compare", "digits", *systems, "--rounds", "1", "--steps", "1", "--json"]
    assert main([*asked, "--batch-size", "16", "--out", str(out)]) == 0
    sizes = {c["strategy"]["name"]: c["strategy"]["batch_size"] for c, _, _ in configs(out)}
    assert sizes == {"single-worker": 16, "fed-avg": 7, "fed-prox": 16}


def test_training_a_system_has_the_defaults_of_its_paper(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for system, size in (("single-worker", 64), ("fed-avg", 10), ("byzantine", None)):
        out = tmp_path / system
        limit = "--steps" if system == "single-worker" else "--rounds"
        assert main(["train", "digits", system, limit, "1", "--json", "--out", str(out)]) == 0
        assert json.loads((out / "config.json").read_text())["strategy"]["batch_size"] == size
    capsys.readouterr()


def test_workers_that_step_apart_and_clients_that_step_together_have_their_share() -> None:
    task = load_task("digits")
    wanted = {
        "local-sgd": (STEP * 3, None),
        "diloco": (STEP * 3, None),
        "parallel-sgd": (STEP * 3, None),
        "admm": (STEP * 3, None),
        "data-parallel": (STEP, None),
        "parameter-server,staleness=None": (STEP, None),
        "downpour": (STEP, None),
        "parallel-split,clients=8": (4, None),
        "parallel-split,clients=5": (6, "30 examples, 6 of each of 5 clients"),
        "byzantine,clients=16,fraction=0.5": (4, None),
        "byzantine,clients=64": (1, "64 examples, 1 of each of 64 clients"),
        "split-fed": (STEP, None),
    }
    for system, (size, note) in wanted.items():
        strategy, world = entry(system, 3)
        [(equal, _, _)], notes = with_equal_steps([system], [(strategy, world, task)])
        assert equal.batch_size == size, system
        assert len(notes) == (note is not None), system
        assert all(note in text for text in notes), system


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name != "fed-sgd"])
def test_every_system_has_a_batch_size_that_a_comparison_sets(name: str) -> None:
    strategy = strategy_class(name)()
    equal, _ = with_equal_steps([name], [(strategy, dure.Simulated(), load_task("digits"))])
    changed, _, _ = equal[0]
    batches = changed.batches_of_step(load_task("digits"), None)
    assert changed.batch_size is not None
    assert batches is not None
    # As near to the step as a whole number of examples of each client is.
    assert abs(changed.batch_size * batches - STEP) <= math.ceil(batches / 2)


@dataclass(frozen=True)
class WithoutBatches(dure.Strategy):
    """A system of a user without the field `batch_size`."""

    rate: float = 0.1

    name: ClassVar[str] = "without-batches"
    traits: ClassVar[Traits] = Traits(kind="ranks", unit="step")


def test_a_system_without_a_batch_size_stays_as_it_is() -> None:
    strategy = WithoutBatches()
    compared = (strategy, dure.Processes(2), small_task())
    assert with_equal_steps(["my.py:WithoutBatches"], [compared]) == ([compared], [])
