"""Trainer of a user, as dure uses it, whichever library it is of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

from dure.contracts.task import Task
from dure.contracts.trainer import ClientTrainer

RoundState = Literal["reset", "keep"]
"""Whether a client's optimizer, schedule and counters begin anew in each round."""


class TrainedClient(NamedTuple):
    """Trainer of a client, and the client's task."""

    trainer: ClientTrainer
    task: Task


class KnownTrainer(NamedTuple):
    """Trainer that was recognised.

    method: name of the method that trains. client: makes the client, from the arguments of a call
    of the method.
    """

    method: str
    client: Callable[[RoundState, tuple[Any, ...], Mapping[str, Any]], TrainedClient]


def check_state(state: str) -> RoundState:
    """Return the setting of a client's state. Raises ValueError for another text."""
    for known in get_args(RoundState):
        if state == known:
            found: RoundState = known
            return found
    raise ValueError(f"state_of_rounds is {state!r}, but it has to be reset or keep")
