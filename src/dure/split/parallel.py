"""Parallel split learning: the batches of all clients form a single batch of the server.

    step    every client that has a batch left sends its values
            the server concatenates them, makes a step, and sends back gradients
            the heads' gradients are summed at the server, and every head makes the same step

so heads stay equal, and K clients train a single model on the joint batch, as data parallelism
does. Batch norm in the head has the statistics of a client's own batch, and its running statistics
are those of the first client.

    bytes of a step, beside those at the cut     2 b |head| K

With personal heads each client's own head makes a step by its own gradients: the system is a model
with K heads on the joint batch, and only the values and gradients at the cut are sent.

Source: Jeon and Kim 2020, "Privacy-Sensitive Parallel Split Learning", ICOIN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from dure.contracts.task import Task
from dure.split.client import Rules
from dure.split.messages import Ended, Envelope, SideState, Smashed
from dure.split.orders import Amounts, TurnOrder
from dure.split.sides import SideRunner
from dure.split.strategy import Split


class ParallelOrder(TurnOrder):
    """Order of all clients at once."""

    def __init__(
        self, amounts: Amounts, head: SideState | None, tail: SideRunner, personal: bool = False
    ) -> None:
        super().__init__(amounts, head, tail, personal)
        self._first = 0
        self._step = 0
        self._waiting: dict[str, Smashed] = {}
        self._together: Sequence[str] = ()
        self._ended: list[str] = []
        self._brought: SideState | None = None
        self.holders: list[str] = []
        """Clients with the newest head."""

    def _begin(self) -> list[Envelope]:
        self._first = self.done
        self._step = 0
        self._waiting.clear()
        self._ended.clear()
        self._brought = None
        steps = {name: self.amounts.steps[self.everyone.index(name)] for name in self.present}
        longest = max(steps.values())
        # Absent clients will need the head later, so a client brings it to the server.
        away = len(self.present) < len(self.everyone) and not self.personal
        brings = self.present[0] if away else None
        return [
            self.turn(
                name,
                first=self.done,
                until=own if self.personal else longest,
                head=None if name in self.holders else self.given(),
                brings=name == brings,
            )
            for name, own in steps.items()
        ]

    def _active(self) -> list[str]:
        """Return the clients that have a batch in this step."""
        steps = self.amounts.steps
        return [one for one in self.present if steps[self.everyone.index(one)] > self._step]

    def came(self, sender: str, message: Smashed) -> None:
        if sender in self._waiting or message.step != self._step or sender not in self._active():
            raise ValueError(f"{sender} sends values of step {message.step}, at {self._step}")
        self._waiting[sender] = message

    def ready(self) -> tuple[Sequence[str], Sequence[Smashed], int] | None:
        clients = self._active()
        if not clients or len(self._waiting) < len(clients):
            return None
        smashed = [self._waiting[one] for one in clients]
        self._waiting.clear()
        self._together = clients
        self._step += 1
        self.done += 1
        return clients, smashed, self.done - 1

    @property
    def together(self) -> Sequence[str]:
        return self._together

    @property
    def sums(self) -> bool:
        return not self.personal

    def ended(self, sender: str, message: Ended) -> list[Envelope]:
        self._ended.append(sender)
        if message.head is not None:
            self._brought = message.head
        self.over = len(self._ended) == len(self.present)
        if self.over:
            self.head = self._brought or self.head
            self.holders = self.present
            for name in self.present:
                self.count(name)
        return []

    @property
    def keeper(self) -> int:
        return self.everyone.index(self.holders[0]) if self.holders else 0

    def state(self) -> dict[str, Any]:
        return {**super().state(), "holders": list(self.holders)}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.holders = list(state["holders"])


@dataclass(frozen=True)
class ParallelSplit(Split):
    """Clients train at the same time: their values form a batch, and heads make the same step."""

    name: ClassVar[str] = "parallel-split"
    title: ClassVar[str] = "parallel split"
    joins: ClassVar[bool] = True

    def rules(self) -> Rules:
        return Rules(labels_stay=self.labels_stay, sums=not self.personal_heads)

    def order(
        self, amounts: Amounts, head: SideState | None, tail: Callable[[int], SideRunner], seed: int
    ) -> TurnOrder:
        return ParallelOrder(amounts, head, tail(0), self.personal_heads)

    def batches_of_step(self, task: Task, workers: int | None) -> Fraction | None:
        return Fraction(self.clients or 1)
