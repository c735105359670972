"""Split a share of the training data off as a validation set (`dure.data.validation_split`).

The split happens where the job is prepared and again on every rank, by the same random draws, so
that only the share travels.
"""

from __future__ import annotations

from dataclasses import replace

from dure.contracts.strategy import Strategy
from dure.contracts.task import Task
from dure.contracts.world import World
from dure.data.rank_examples import RankDataFactory, RankExamples
from dure.data.validation_split import OWN, split_validation


def with_validation(task: Task, seed: int) -> Task:
    """Return the task with a validation share split off its training data."""
    share = task.validation
    if not isinstance(share, float):
        return task
    train, validation = split_validation(task.train, share, seed)
    return replace(task, train=train, validation=validation)


def check_validation(task: Task, strategy: Strategy, world: World) -> None:
    """Raise ValueError if this strategy or world cannot measure or split off the validation set."""
    if task.validation is None:
        return
    if world.serves and strategy.traits.trains_at_server:
        raise ValueError(
            f"{strategy.name} over a network is evaluated on the clients' own data and cannot use "
            "a validation set: leave validation out"
        )
    if not isinstance(task.validation, float):
        return
    whose = "clients" if world.serves else "ranks"
    if world.serves or isinstance(task.train, (RankDataFactory, RankExamples)):
        raise ValueError(
            f"validation={task.validation} is a fraction of the training data, which only the "
            f"{whose} hold: {OWN}"
        )
