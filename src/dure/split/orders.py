"""Order in which clients train, and with which tail: the difference between split learning systems.

in_turn      one client after another, each with the head of the client before
parallel     the batches of all clients form a single batch of the server
split_fed    all clients at the same time, averaged at the end of a round
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dure.split.messages import Ended, Envelope, SideState, Smashed, Turn, client
from dure.split.sides import SideRunner, copied


@dataclass(frozen=True)
class Amounts:
    """Number of steps of each client in a round, and number of its examples."""

    steps: Sequence[int]
    examples: Sequence[int]

    @property
    def clients(self) -> int:
        return len(self.steps)


class TurnOrder(ABC):
    """Base class of the order of turns in a round. tails: the server's part, or its copies.

    personal: whether every client has its own head, which is never sent.
    """

    def __init__(
        self, amounts: Amounts, head: SideState | None, tail: SideRunner, personal: bool = False
    ) -> None:
        self.amounts = amounts
        self.head = head
        """Newest head that the server knows; None if it knows none."""
        self.personal = personal
        self.tails = [tail]
        self.done = 0
        """Number of finished steps, over all clients."""
        self.round = 0
        self.over = True
        """Whether the round is over."""
        self.absent: frozenset[str] = frozenset()
        """Clients that take no part in this round."""
        self.turns: dict[str, int] = {}
        """Number of the current turn, by client."""
        self.begun = 0
        """Number of turns that have begun."""
        self.since: dict[str, int] = {}
        """Newest turn of each client that counts."""
        self.counted: dict[str, float] = {}
        """Count in the loss of the batches with each client, in this round."""
        self.taken: dict[str, int] = {}
        """Number of steps of each client in turns that count."""

    def begin(self, round: int, absent: frozenset[str] = frozenset()) -> list[Envelope]:
        """Begin a round; return the first messages. absent: clients that take no part in it."""
        self.open(round)
        return self.again(absent)

    def open(self, round: int) -> None:
        """Set the current round, before any of its turns begins."""
        self.round = round
        self.over = False

    def again(self, absent: frozenset[str]) -> list[Envelope]:
        """Begin the next turns, also after `restore`, without the absent clients."""
        self.absent = absent
        self.turns = {}
        self.counted = {}
        self.over = not self.present
        return self._begin() if self.present else []

    @abstractmethod
    def _begin(self) -> list[Envelope]:
        """Return the messages of the first turns of a round."""

    @abstractmethod
    def came(self, sender: str, message: Smashed) -> None:
        """Record a client's values. Raises ValueError if it is not the client's turn."""

    @abstractmethod
    def ready(self) -> tuple[Sequence[str], Sequence[Smashed], int] | None:
        """Return the clients of the server's next batch, their messages, and the step; or None."""

    @abstractmethod
    def ended(self, sender: str, message: Ended) -> list[Envelope]:
        """Process the end of a client's turn."""

    def tail(self, clients: Sequence[str]) -> SideRunner:
        """Return the server's part for these clients."""
        return self.tails[0]

    def draws(self, at: int, clients: Sequence[str]) -> int:
        """Return the number that seeds the random numbers of the server's part at a step."""
        return at

    def rate(self, at: int) -> int:
        """Return the step of learning-rate schedules at a step of the run."""
        return at

    def learned(self, clients: Sequence[str], counted: float) -> None:
        """Note a step with these clients' batches. counted: their count in the loss."""
        for name in clients:
            self.counted[name] = self.counted.get(name, 0.0) + counted

    @property
    def sums(self) -> bool:
        """Whether all heads make the same step by the sum of their gradients."""
        return False

    @property
    def together(self) -> Sequence[str]:
        """Clients whose head gradients are summed to a step of all heads."""
        return ()

    @property
    def everyone(self) -> list[str]:
        """Names of all clients."""
        return [client(number) for number in range(self.amounts.clients)]

    @property
    def present(self) -> list[str]:
        """Clients that take part in the round and have a batch to train on."""
        return [
            name
            for name, steps in zip(self.everyone, self.amounts.steps, strict=True)
            if steps and name not in self.absent
        ]

    def turn(
        self,
        name: str,
        *,
        first: int,
        until: int | None = None,
        head: SideState | None = None,
        comes: bool = False,
        brings: bool = False,
    ) -> Envelope:
        """Return the message that begins a client's next turn.

        Args:
            name: name of the client.
            first: as in `Turn`.
            until: as in `Turn`; None for the number of the client's steps.
            head: as in `Turn`.
            comes: as in `Turn`.
            brings: as in `Turn`.
        """
        number = self.begun
        self.begun += 1
        self.turns[name] = number
        steps = self.amounts.steps[self.everyone.index(name)]
        return name, Turn(
            number=number,
            round=self.round,
            first=first,
            steps=steps,
            until=steps if until is None else until,
            taken=self.taken.get(name, 0),
            since=self.since.get(name, -1),
            head=head,
            comes=comes,
            brings=brings,
        )

    def leave_out(self, name: str) -> None:
        """Exclude a client without a turn from the rest of the round."""
        if not self.over:
            self.absent |= {name}

    def count(self, name: str) -> None:
        """Count a client's finished turn."""
        self.since[name] = self.turns.pop(name)
        steps = self.amounts.steps[self.everyone.index(name)]
        self.taken[name] = self.taken.get(name, 0) + steps

    @property
    def keeper(self) -> int:
        """Number of the client with the newest head, if clients keep heads."""
        return 0

    def given(self) -> SideState | None:
        """Return the head to send to a client; None if the client has it."""
        return None if self.personal or self.head is None else copied(self.head)

    def newest(self, held: Sequence[SideState]) -> SideState:
        """Return the head for the whole model, from the heads of all clients.

        With personal heads it is their mean, which only a simulation can compute.
        """
        return mean(held, self.amounts.examples) if self.personal else self.shared(held)

    def shared(self, held: Sequence[SideState]) -> SideState:
        """Return the common head, from the heads of all clients."""
        return held[self.keeper]

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint between turns, without heads and tails."""
        return {
            "done": self.done,
            "round": self.round,
            "over": self.over,
            "begun": self.begun,
            "since": dict(self.since),
            "taken": dict(self.taken),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`. Numbers of turns that have begun since are not reused."""
        self.done = state["done"]
        self.round = state["round"]
        self.over = state["over"]
        # Numbers are never reused, so that late messages of a lost turn cannot be mistaken.
        self.begun = max(self.begun, state["begun"])
        self.since = dict(state["since"])
        self.taken = dict(state["taken"])
        self.turns = {}


def mean(owns: Sequence[SideState], weights: Sequence[float]) -> SideState:
    """Return the weighted mean of weights and buffers, with an empty optimizer state.

    Integer buffers, such as the number of batches seen, are those of the first side.
    """
    return SideState(
        weights=_means([one.weights for one in owns], weights),
        buffers=_means([one.buffers for one in owns], weights),
        optimizer=tuple({} for _ in owns[0].optimizer),
        groups=(),
    )


def _means(tensors: Sequence[Sequence[Tensor]], weights: Sequence[float]) -> tuple[Tensor, ...]:
    total = sum(weights)
    found = []
    for each in zip(*tensors, strict=True):
        if not each[0].is_floating_point():
            found.append(each[0].clone())
            continue
        sums = torch.zeros_like(each[0], dtype=torch.float64)
        for tensor, weight in zip(each, weights, strict=True):
            sums.add_(tensor, alpha=weight / total)
        found.append(sums.to(each[0].dtype))
    return tuple(found)
