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

from dure.split.average import mean
from dure.split.messages import Ended, Envelope, Own, Smashed, Turn, client
from dure.split.sides import Party, copied


@dataclass(frozen=True)
class Amounts:
    """How many steps each client makes in a round, and how many examples it has."""

    steps: Sequence[int]
    examples: Sequence[int]

    @property
    def clients(self) -> int:
        return len(self.steps)


class Order(ABC):
    """Of the clients of a round. tails: the server's part, or its copies.

    personal: whether every client keeps a head of its own, which nobody sends.
    """

    def __init__(
        self, amounts: Amounts, head: Own | None, tail: Party, personal: bool = False
    ) -> None:
        self.amounts = amounts
        self.head = head
        """The newest head that the server knows; None where it knows none."""
        self.personal = personal
        self.tails = [tail]
        self.done = 0
        """Steps that are done, on the way of all."""
        self.round = 0
        self.over = True
        """Whether the round is over."""
        self.absent: frozenset[str] = frozenset()
        """Who takes no part in this round."""
        self.turns: dict[str, int] = {}
        """The clients that have a turn, and its number."""
        self.begun = 0
        """Turns that have begun."""
        self.since: dict[str, int] = {}
        """The newest turn of each client that counts."""
        self.counted: dict[str, float] = {}
        """What the loss has counted in batches with each client, in this round."""
        self.taken: dict[str, int] = {}
        """Steps that each client has made in turns that count."""

    def begin(self, round: int, absent: frozenset[str] = frozenset()) -> list[Envelope]:
        """A round begins. absent: who takes no part in it."""
        self.open(round)
        return self.again(absent)

    def open(self, round: int) -> None:
        """The round is this one, and nothing of it has begun."""
        self.round = round
        self.over = False

    def again(self, absent: frozenset[str]) -> list[Envelope]:
        """What there is to do begins, or does so once more after `restore`, without these."""
        self.absent = absent
        self.turns = {}
        self.counted = {}
        self.over = not self.present
        return self._begin() if self.present else []

    @abstractmethod
    def _begin(self) -> list[Envelope]:
        """The first turns of a round."""

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

    def learned(self, clients: Sequence[str], counted: float) -> None:
        """Note a step with these clients' batches. counted: what the loss counts in them."""
        for name in clients:
            self.counted[name] = self.counted.get(name, 0.0) + counted

    @property
    def sums(self) -> bool:
        """Whether all heads make one step by the sum of their gradients."""
        return False

    @property
    def together(self) -> Sequence[str]:
        """The clients whose gradients of heads are one step of all heads."""
        return ()

    @property
    def everyone(self) -> list[str]:
        """All clients."""
        return [client(number) for number in range(self.amounts.clients)]

    @property
    def present(self) -> list[str]:
        """Those that take part in the round and have a batch to train on."""
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
        head: Own | None = None,
        comes: bool = False,
        brings: bool = False,
    ) -> Envelope:
        """The next turn of a client."""
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
        """Let a client without a turn take no part in the rest of the round."""
        if not self.over:
            self.absent |= {name}

    def count(self, name: str) -> None:
        """The turn of a client counts."""
        self.since[name] = self.turns.pop(name)
        steps = self.amounts.steps[self.everyone.index(name)]
        self.taken[name] = self.taken.get(name, 0) + steps

    @property
    def keeper(self) -> int:
        """The client that has the newest head, where clients keep heads."""
        return 0

    def given(self) -> Own | None:
        """The head that a client is given; None where it has one."""
        return None if self.personal or self.head is None else copied(self.head)

    def newest(self, held: Sequence[Own]) -> Own:
        """The head that stands for all, where clients hold these: of heads of their own the mean,
        which nobody but a simulation could know.
        """
        return mean(held, self.amounts.examples) if self.personal else self.shared(held)

    def shared(self, held: Sequence[Own]) -> Own:
        """The one head of all, where clients hold these."""
        return held[self.keeper]

    def state(self) -> dict[str, Any]:
        """What it needs to go on where it is `whole`, without heads and tails."""
        return {
            "done": self.done,
            "round": self.round,
            "over": self.over,
            "begun": self.begun,
            "since": dict(self.since),
            "taken": dict(self.taken),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """As `state` was. The numbers of turns that have begun since are not given again."""
        self.done = state["done"]
        self.round = state["round"]
        self.over = state["over"]
        self.begun = max(self.begun, state["begun"])
        self.since = dict(state["since"])
        self.taken = dict(state["taken"])
        self.turns = {}
