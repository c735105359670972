"""Batch and steps of every family, and the line on differences."""

from __future__ import annotations

from typing import Any

import pytest

from dure.record.training_amount import TrainingAmount, training_amount, unlike

PARTITION = {"counts": [144] * 7 + [143] * 3}


def amount(
    name: str, steps: float, epochs: float = 2.0, unit: str = "round", **given: Any
) -> TrainingAmount:
    """Amount of a run on 1,437 examples, on 2 ranks, or with the parts of `PARTITION`."""
    strategy = {"name": name, "batch_size": 64, "partition": "iid"}
    config = {
        "task": {"options": {"lr": 0.1}},
        "strategy": strategy | given.pop("strategy", {}),
        "world": {"name": "processes", "ranks": 2},
        "train_examples": 1437,
        **given,
    }
    samples = round(1437 * epochs)
    numbers = {"pushes": 92.0}
    summary = {"unit": unit, "steps": steps, "epochs": epochs, "samples": samples}
    return training_amount(config, {**summary, "numbers": numbers})


@pytest.mark.parametrize(
    ("name", "strategy", "rounds", "batch", "local", "steps"),
    [
        ("zero", {}, 2, 64, False, 46),
        ("layers-per-core", {"batch_size": None}, 2, 1437, False, 2),
        ("hogwild", {}, 2, 64, False, 46),
        ("local-sgd", {"period": 16}, 3, 32, True, 46),
        ("parallel-sgd", {}, 2, 32, True, 46),
        ("admm", {"local_epochs": 2}, 1, 32, True, 46),
        ("parameter-server", {"staleness": 0, "workers": 2, "groups": 1}, 2, 64, False, 46),
        ("parameter-server", {"staleness": 0, "workers": 4, "groups": 2}, 2, 64, False, 46),
        ("parameter-server", {"staleness": None, "workers": 2, "groups": 1}, 2, 32, False, 92),
        ("made-of-own", {}, 2, None, False, None),
    ],
)
def test_ranks_count_joint_steps_and_averaged_copies_those_of_a_worker(
    name: str, strategy: dict[str, Any], rounds: int, batch: float, local: bool, steps: float
) -> None:
    found = amount(name, rounds, strategy=strategy)
    assert (found.batch, found.local, found.steps) == (batch, local, steps)
    assert (found.epochs, found.learning_rate) == (2, 0.1)


@pytest.mark.parametrize(
    ("name", "strategy", "rounds", "batch", "local", "steps"),
    [
        ("fed-avg", {"batch_size": 10, "local_epochs": 3}, 2, 10, True, 2 * 3 * 15),
        ("fed-avg", {"batch_size": 10, "local_steps": 4}, 5, 10, True, 20),
        ("ditto", {"batch_size": 10, "held_out": 0.2}, 2, 10, True, 2 * 12),
        ("fed-sgd", {"batch_size": None}, 2, 1437, False, 2),
        ("byzantine", {"batch_size": None}, 2, 1437, False, 2),
        ("downpour", {}, 2, 64, False, 92),
        ("split", {"batch_size": 10, "local_epochs": 1}, 2, 10, False, 2 * 10 * 15),
        ("parallel-split", {"batch_size": 10, "local_epochs": 1}, 2, 100, False, 30),
        ("split-fed", {"batch_size": 10, "local_epochs": 1, "version": 1}, 2, 10, True, 30),
        ("split-fed", {"batch_size": 10, "local_epochs": 1, "version": 2}, 2, 10, True, None),
        ("per-fed-avg", {"batch_size": 10}, 2, 10, True, None),
    ],
)
def test_clients_count_the_steps_of_one_client_unless_they_share_the_weights(
    name: str, strategy: dict[str, Any], rounds: int, batch: float, local: bool, steps: float
) -> None:
    found = amount(name, rounds, partition=PARTITION, strategy=strategy)
    assert (found.batch, found.local, found.steps) == (batch, local, steps)


def test_the_steps_of_a_system_that_counts_steps_are_its_own() -> None:
    assert amount("data-parallel", 17, unit="step").steps == 17
    own = {"name": "mine", "from": "mine.py:Mine"}
    assert amount("mine", 17, unit="step", strategy=own) == TrainingAmount(None, False, 17, 2, 0.1)


def test_clients_whose_steps_cannot_be_known_have_none() -> None:
    network = {"name": "network"}
    assert amount("fed-avg", 2, world=network, strategy={"batch_size": 10}).steps is None
    arriving = {"name": "simulated", "arrival": "arriving:0.1:3600"}
    known = {"partition": PARTITION, "strategy": {"batch_size": 10}}
    assert amount("fed-avg", 2, world=arriving, **known).steps is None
    assert amount("fed-avg", 2, world={"name": "simulated"}, **known).steps == 30


def test_runs_that_are_alike_need_no_line() -> None:
    one = TrainingAmount(64, False, 460, 20.0, 0.1)
    assert unlike([]) is None
    assert unlike([("a", one), ("b", one._replace(epochs=20.1, steps=None))]) is None


def test_a_line_names_what_is_not_alike() -> None:
    one = TrainingAmount(32, False, 460, 20.0, 0.1)
    runs = [("single worker", one), ("data parallel", one), ("zero", one)]
    other = ("local SGD", one._replace(batch=128, local=True))
    assert unlike([*runs, other]) == "Not alike: batch 32, but 128 in local SGD."
    # Seeds of a system count once.
    assert unlike([*runs, other, other]) == "Not alike: batch 32, but 128 in local SGD."
    rates = [(f"run {place}", one._replace(learning_rate=0.1 * place)) for place in (1, 2, 3, 4)]
    assert unlike(rates) == (
        "Not alike: learning rate 0.1 in 1 of 4 runs, 0.2 to 0.4 in the others."
    )
    several = [(f"fed {place}", one._replace(steps=45.0)) for place in range(3)]
    assert unlike([*runs, *several, ("more", one)]) == ("Not alike: steps 460, but 45 in 3 runs.")
