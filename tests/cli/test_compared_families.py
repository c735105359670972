"""What is compared where no system is named shows the whole family tree."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import dure
from dure.catalog import FAMILIES, Family
from dure.cli.comparing import COMPARED
from dure.cli.worlds import entry
from dure.federated.aggregate import Mean, Median
from dure.tasks.builtin import load_task

OF_TABLES = {"vertical-split"}
"""What needs inputs in columns, which the images of `digits` are not."""


def families(branches: tuple[Family, ...] = FAMILIES) -> Iterator[Family]:
    for family in branches:
        if family.systems:
            yield family
        yield from families(family.branches)


def test_there_is_a_system_of_every_family():
    named = [system.partition(",")[0] for system in COMPARED]
    missing = [
        family.title for family in families() if not {*named, *OF_TABLES} & {*family.systems}
    ]
    assert not missing
    # In the order of the tree, where a system may stand beside what it is compared with.
    order = [name for family in families() for name in family.systems]
    assert named == sorted(named, key=order.index)


@pytest.mark.parametrize("workers", [None, 4])
def test_each_of_them_can_train_the_digits(workers: int | None) -> None:
    task = load_task("digits")
    for system in COMPARED:
        # The degrees of a mesh fix its number of ranks.
        count = None if system.startswith("parallel,") else workers
        strategy, world = entry(system, count)
        strategy.check(task, world)


def test_robust_systems_are_compared_with_the_mean_with_and_without_an_attack() -> None:
    entries = [entry(system, None) for system in COMPARED]
    federated = [
        (type(strategy).__name__, strategy.aggregate, world.conditions.attackers > 0)
        for strategy, world in entries
        if isinstance(strategy, dure.FedAvg | dure.ByzantineGD)
    ]
    for attacked in (False, True):
        assert ("FedAvg", Mean(), attacked) in federated
        assert ("FedAvg", Median(), attacked) in federated
        assert ("ByzantineGD", Mean(), attacked) in federated
