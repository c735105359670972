"""What is compared where no system is named shows the whole family tree."""

from __future__ import annotations

from collections.abc import Iterator

from dure.catalog import FAMILIES, Family
from dure.cli.comparing import COMPARED
from dure.cli.worlds import entry
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


def test_each_of_them_can_train_the_digits():
    task = load_task("digits")
    for system in COMPARED:
        strategy, world = entry(system, None)
        strategy.check(task, world.workers)
