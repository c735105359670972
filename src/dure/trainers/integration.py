"""Integration of a library's trainer: how it becomes a client and a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

from dure.contracts.task import Task
from dure.trainers.ranks import RankTrainer

BetweenRounds = Literal["reset", "keep"]
"""Whether a client's optimizer, schedule and counters begin anew in each round."""


class TrainedClient(NamedTuple):
    """Trainer of a client, and the client's task."""

    trainer: RankTrainer
    task: Task


class TrainerIntegration(NamedTuple):
    """Integration of a trainer.

    Args:
        method: name of the method that trains.
        client: makes the client, from the arguments of a call of the method.
    """

    method: str
    client: Callable[[BetweenRounds, tuple[Any, ...], Mapping[str, Any]], TrainedClient]


def check_between_rounds(asked: str) -> BetweenRounds:
    """Return the setting `between_rounds`. Raises ValueError for another text."""
    for known in get_args(BetweenRounds):
        if asked == known:
            found: BetweenRounds = known
            return found
    raise ValueError(f"between_rounds is {asked!r}, but it has to be reset or keep")
