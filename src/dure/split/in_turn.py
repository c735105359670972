"""Split learning in turn: clients train one after another, each with the head of the client before.

    turn of client k     head and its optimizer come from client k-1, or from the server
                         E epochs over its own data, each step with the server
                         on to client k+1

The result is SGD on the data of the clients, in that order. The bits are the same if heads are
handed over peer to peer or through the server.

    bytes of a turn, beside those at the cut     the head's trained weights and optimizer state:
                                                 b |head| for SGD, 3 b |head| and 4 bytes a tensor
                                                 for Adam; twice through the server

With personal heads no head is handed over: each client has its own head, and the tail alone goes
from client to client.

Source: Gupta and Raskar 2018, "Distributed Learning of Deep Neural Network over Multiple Agents".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dure.contracts.task import Task
from dure.contracts.world import World
from dure.split.client import Rules
from dure.split.messages import Ended, Envelope, Pass, SideState, Smashed, client
from dure.split.orders import Amounts, TurnOrder
from dure.split.sides import SideRunner
from dure.split.strategy import Split


class SequentialOrder(TurnOrder):
    """Order of a client after another.

    Args:
        amounts: steps and examples of each client.
        head: initial head, or None if the server does not know it.
        tail: the server's part.
        hands: whether clients send the head to each other.
        personal: whether every client has its own head.
    """

    def __init__(
        self,
        amounts: Amounts,
        head: SideState | None,
        tail: SideRunner,
        hands: bool,
        personal: bool = False,
    ) -> None:
        super().__init__(amounts, head, tail, personal)
        self.hands = hands
        self.holder: int | None = None
        """Number of the client with the newest head; None before the first turn."""
        self._at = 0
        self._first = 0
        self._waiting: Smashed | None = None

    def open(self, round: int) -> None:
        super().open(round)
        self._at = 0

    def _begin(self) -> list[Envelope]:
        return self._next()

    def _next(self) -> list[Envelope]:
        """Begin the next client's turn; the client gets the newest head."""
        present = self.present
        while self._at < self.amounts.clients and client(self._at) not in present:
            self._at += 1
        if self._at == self.amounts.clients:
            self.over = True
            return []
        self._first = self.done
        self._waiting = None
        name = client(self._at)
        # The first client makes the initial head from the seed itself.
        stays = self.holder == self._at or (self.hands and self.holder is None)
        comes = self.hands and not stays
        head = None if stays or comes else self.given()
        said = [self.turn(name, first=self.done, head=head, comes=comes)]
        if comes:
            assert self.holder is not None
            holder = client(self.holder)
            said.append((holder, Pass(self.turns[name], self.since[holder], name)))
        return said

    def leave_out(self, name: str) -> None:
        # The turn of an earlier client in this round counts.
        if self.everyone.index(name) >= self._at:
            super().leave_out(name)

    def came(self, sender: str, message: Smashed) -> None:
        if sender != client(self._at) or self.over:
            raise ValueError(f"{sender} sends values, but it is not its turn")
        self._waiting = message

    def ready(self) -> tuple[Sequence[str], Sequence[Smashed], int] | None:
        if self._waiting is None:
            return None
        smashed = self._waiting
        self._waiting = None
        self.done = self._first + smashed.step + 1
        return [client(self._at)], [smashed], self.done - 1

    def ended(self, sender: str, message: Ended) -> list[Envelope]:
        self.count(sender)
        self.holder = self._at
        if message.head is not None:
            self.head = message.head
        self._at += 1
        return self._next()

    @property
    def keeper(self) -> int:
        return self.holder or 0

    def state(self) -> dict[str, Any]:
        return {**super().state(), "holder": self.holder, "at": self._at}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.holder = state["holder"]
        self._at = state["at"]
        self._waiting = None


@dataclass(frozen=True)
class SplitLearning(Split):
    """Clients train one after another, each with the head of the client before.

    Args:
        handover: who sends the head to the next client: the client before (peer), or the server
            (server).
    """

    handover: str = "peer"

    name: ClassVar[str] = "split"
    title: ClassVar[str] = "split"

    def check(self, task: Task, world: World) -> None:
        super().check(task, world)
        if self.handover not in ("peer", "server"):
            raise ValueError(f"handover is {self.handover!r}, but it has to be peer or server")

    def rules(self) -> Rules:
        hands = self.handover == "peer" and not self.personal_heads
        returns = self.handover == "server" and not self.personal_heads
        return Rules(labels_stay=self.labels_stay, hands=hands, returns=returns)

    def order(
        self, amounts: Amounts, head: SideState | None, tail: Callable[[int], SideRunner], seed: int
    ) -> TurnOrder:
        return SequentialOrder(amounts, head, tail(0), self.rules().hands, self.personal_heads)
