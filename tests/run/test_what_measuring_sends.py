"""What an evaluation exchanges is no part of what a system sends: however often it is made."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import dure
from dure import catalog
from dure.parallel.mesh.mesh import Mesh
from small import small_task

OWN: dict[str, dict[str, Any]] = {
    "zero": {"stage": 3},
    "parallel": {"mesh": Mesh(1, 1, 2), "microbatches": 1},
    "fed-sgd": {"batch_size": None},
    "byzantine": {"batch_size": None, "groups": 3},
}
"""What else than the defaults these take."""


def system(name: str) -> dure.Strategy:
    """The smallest of its kind."""
    made: type[dure.Strategy] = getattr(dure, catalog.SYSTEMS[name].kind)
    fields = {field.name for field in dataclasses.fields(made)}  # type: ignore[arg-type]
    small = {"batch_size": 8, "clients": 3, "fraction": 1.0}
    settings = {key: value for key, value in small.items() if key in fields}
    return made(**{**settings, **OWN.get(name, {})})


def world(strategy: dure.Strategy) -> dure.World | None:
    if strategy.traits.kind == "ranks" and not strategy.traits.alone:
        return dure.Processes(strategy.run_traits.ranks or 2)
    return dure.Threads(2) if strategy.traits.kind == "threads" else None


@pytest.mark.parametrize("name", catalog.SYSTEMS)
def test_bytes_are_those_of_the_training_however_often_it_is_evaluated(name: str) -> None:
    strategy = system(name)
    stop = dure.Stop(steps=4) if strategy.traits.unit == "step" else dure.Stop(rounds=4)
    found = []
    for every in (100, 1):
        run = dure.train(small_task(), strategy, world(strategy), stop, evaluate_every=every)
        found.append([run.summary["bytes_sent"], run.summary["bytes_received"]])
    assert found[0] == found[1]


def test_shards_of_layers_and_of_parameters_together() -> None:
    strategy = dure.Parallel(Mesh(2, 1, 2), 8, 1, zero=3)
    found = []
    for every in (100, 1):
        run = dure.train(
            small_task(), strategy, dure.Processes(4), dure.Stop(steps=2), evaluate_every=every
        )
        found.append([run.summary["bytes_sent"], run.summary["bytes_received"]])
    assert found[0] == found[1]
