"""Turn a function that gives each rank its data into a task that can be trained on.

While a run is prepared, no rank knows the others' data: checks use the data of one rank, as if the
other ranks' were alike. On the ranks, each rank calls the function for itself, and all ranks
exchange the number of their examples in one message, which the meters do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from dure.collectives.group import Group
from dure.contracts.strategy import Strategy
from dure.contracts.task import Task
from dure.contracts.world import World
from dure.data.block_shuffling import BlockLayout
from dure.data.examples import Examples
from dure.data.rank_examples import RankDataFactory, RankExamples
from dure.errors import RunFolderError


def task_for_checks(task: Task, strategy: Strategy, world: World) -> Task:
    """Return a task with the data of one rank, for checks before the ranks start.

    Raises ValueError for a strategy whose ranks cannot have data of their own.
    """
    train = task.train
    if not isinstance(train, RankDataFactory):
        return task
    if world.kind == "clients":
        raise ValueError(
            f"Task.train is a function of (rank, world), but {strategy.name} divides the data "
            "among clients by a partition: give examples"
        )
    ranks = world.workers or 1
    if world.kind == "threads" or ranks == 1:
        return replace(task, train=train.of(0, 1))
    if not strategy.traits.own_data:
        raise ValueError(
            f"Task.train is a function of (rank, world), but the ranks of {strategy.name} share "
            "their examples: give examples, or dure.Shards on a disk that all of them can read"
        )
    if world.starts_again:
        raise ValueError(
            "Task.train is a function of (rank, world), but an elastic job continues with fewer "
            "ranks, which cannot read the data of the lost ranks: give examples, or dure.Shards "
            "on a disk that all ranks can read"
        )
    own = train.of(world.rank_here, ranks)
    alike = [own.arrangement()] * ranks
    return replace(task, train=RankExamples(own, alike, world.rank_here, counted=False))


def release_rank_data(task: Task) -> None:
    """Release the data that the checks loaded, since the ranks are other processes."""
    if isinstance(task.train, RankDataFactory):
        task.train.forget()


class _CountedRanks(World):
    """World of a number of ranks, as the ranks know it while they run."""

    name = "ranks"
    kind = "ranks"

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    @property
    def workers(self) -> int:
        return self._ranks


def with_own_data(task: Task, strategy: Strategy, group: Group) -> Task:
    """Return the task with this rank's data. Collective: all ranks call this function together.

    Raises ValueError if the counted examples do not fit the strategy.
    """
    train = task.train
    if not isinstance(train, RankDataFactory):
        return task
    own = train.of(group.rank, group.size)
    train.forget()
    if group.size == 1:
        return replace(task, train=own)
    counted = replace(task, train=RankExamples(own, _told(own, group), group.rank))
    strategy.check(counted, _CountedRanks(group.size))
    return counted


def _told(own: Examples, group: Group) -> list[BlockLayout]:
    """Return the arrangements of all ranks' examples, on every rank."""
    gathered = group.gather_bytes(msgspec.msgpack.encode(own.arrangement()))
    told = group.broadcast_bytes(msgspec.msgpack.encode(gathered) if gathered else None)
    each = msgspec.msgpack.decode(told, type=list[bytes])
    return [msgspec.msgpack.decode(one, type=BlockLayout) for one in each]


def check_as_before(folder: Path | None, before: Sequence[int], now: Sequence[int]) -> None:
    """Raise RunFolderError if ranks have other numbers of examples than when the run began."""
    if list(before) == list(now):
        return
    told = [", ".join(map(str, lies)) if lies else "none" for lies in (before, now)]
    raise RunFolderError(
        f"the ranks of {folder} had their own examples, {told[0]}, and now have {told[1]}: give "
        "each rank the same examples, or start a new run"
    )
