"""Who trains when, and with which tail: what systems of split learning differ in.

in_turn      one client after another, each with the head of the one before
parallel     the batches of all clients are one batch of the server's
split_fed    all clients at the same time, averaged at the end of a round
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dure.split.messages import Ended, Envelope, Own, Smashed, client
from dure.split.sides import Party


@dataclass(frozen=True)
class Amounts:
    """How many steps each client makes in a round, and how many examples it has."""

    steps: Sequence[int]
    examples: Sequence[int]

    @property
    def clients(self) -> int:
        return len(self.steps)


class Order(ABC):
    """Of the clients of a round. tails: the server's part, or its copies."""

    def __init__(self, amounts: Amounts, head: Own | None, tail: Party) -> None:
        self.amounts = amounts
        self.head = head
        """The newest head that the server knows; None where it knows none."""
        self.tails = [tail]
        self.done = 0
        """Steps that are done, on the way of all."""
        self.round = 0
        self.over = True
        """Whether the round is over."""

    @abstractmethod
    def begin(self, round: int) -> list[Envelope]:
        """A round begins."""

    @abstractmethod
    def came(self, sender: str, message: Smashed) -> None:
        """Values of a client are there. Raises ValueError for one whose turn it is not."""

    @abstractmethod
    def ready(self) -> tuple[Sequence[str], Sequence[Smashed], int] | None:
        """The clients whose batches are the server's next one, these, and the step it is."""

    @abstractmethod
    def ended(self, sender: str, message: Ended) -> list[Envelope]:
        """A client has done its turn."""

    def tail(self, clients: Sequence[str]) -> Party:
        """The part of the server with which these are trained."""
        return self.tails[0]

    def draws(self, at: int, clients: Sequence[str]) -> int:
        """From which number the draws of the server's part follow, at a step on the way of all."""
        return at

    def rate(self, at: int) -> int:
        """The step of schedules at a step on the way of all."""
        return at

    @property
    def together(self) -> Sequence[str]:
        """The clients whose gradients of heads are one step of all heads."""
        return ()

    @property
    def everyone(self) -> list[str]:
        """All clients."""
        return [client(number) for number in range(self.amounts.clients)]

    def newest(self, held: Sequence[Own]) -> Own:
        """The head that stands for all, where clients hold these."""
        return held[0] if self.head is None else self.head

    def state(self) -> dict[str, Any]:
        """What it needs to go on after a round."""
        return {"done": self.done, "round": self.round}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.done = state["done"]
        self.round = state["round"]
