"""SplitFed: clients train at the same time, and their parts are averaged.

    a round   every client gets the head, and trains on its own data, each step with the server
              head <- sum of n_k/n · head of client k,  n_k the count in the loss at client k
    v1        the server has a copy of the tail for each client, and averages them likewise; a round
              is FedAvg's, of the whole model
    v2        the server has a single tail, which makes a step for each client's batch, in the
              round's random order of clients

With personal heads each client has its own head, and tails alone are averaged.

Optimizers are new in every round, as those of FedAvg's clients are; v2's tail keeps its optimizer.
Schedules count rounds.

Source: Thapa et al. 2022, "SplitFed: When Federated Learning Meets Split Learning", AAAI.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from dure.contracts.task import Task
from dure.contracts.world import World
from dure.randomness.seeds import generator
from dure.split.client import Rules
from dure.split.messages import Ended, Envelope, SideState, Smashed, client
from dure.split.orders import Amounts, TurnOrder, mean
from dure.split.sides import SideRunner, copied, without_optimizer_state
from dure.split.strategy import Split


class SplitFedOrder(TurnOrder):
    """Order of SplitFed.

    Args:
        amounts: steps and examples of each client.
        head: initial head, or None if the server does not know it.
        tails: the server's parts.
        seed: the run's seed.
        copies: whether each client has a tail, averaged at the end (v1), or all share a tail (v2).
        personal: whether every client has its own head.
    """

    def __init__(
        self,
        amounts: Amounts,
        head: SideState | None,
        tails: Sequence[SideRunner],
        seed: int,
        copies: bool,
        personal: bool = False,
    ) -> None:
        super().__init__(amounts, head, tails[0], personal)
        self.tails = list(tails)
        self.seed = seed
        self.copies = copies
        self._waiting: dict[str, Smashed] = {}
        self._heads: dict[str, SideState | None] = {}
        """Heads of clients that have ended the round; None for a client that keeps its own."""
        self._before: SideState | None = None
        """Tail at the beginning of the round."""
        self._first = 0
        self._step = 0
        self._turns: list[int] = []
        """Clients in the order of this round."""
        self._position = 0

    def _begin(self) -> list[Envelope]:
        self._first = self.done
        self._step = 0
        self._position = 0
        self._waiting.clear()
        draws = generator(self.seed, "order of clients", self.round)
        turns = torch.randperm(self.amounts.clients, generator=draws).tolist()
        self._turns = [one for one in turns if client(one) in self.present]
        self._heads.clear()
        if self.copies:
            self._before = without_optimizer_state(self.tails[0].own)
            for tail in self.tails:
                tail.own = copied(self._before)
        return [self.turn(name, first=self.done, head=self.given()) for name in self.present]

    def came(self, sender: str, message: Smashed) -> None:
        if sender in self._waiting or sender in self._heads:
            raise ValueError(
                f"{sender} sends values before it has received an answer to the previous ones"
            )
        self._waiting[sender] = message

    def ready(self) -> tuple[Sequence[str], Sequence[Smashed], int] | None:
        sender = next(iter(self._waiting), None) if self.copies else self._next_of_all()
        if sender is None:
            return None
        smashed = self._waiting.pop(sender)
        return [sender], [smashed], self._first + smashed.step

    def _next_of_all(self) -> str | None:
        """Return the round's next client; None until its values and the tail are free."""
        if self.tails[0].under_way:
            return None
        while True:
            left = [one for one in self._turns if self.amounts.steps[one] > self._step]
            if not left:
                return None
            if self._position == len(left):
                self._step = self._step + 1
                self._position = 0
                continue
            name = client(left[self._position])
            if name not in self._waiting:
                return None
            self._position += 1
            return name

    def tail(self, clients: Sequence[str]) -> SideRunner:
        if not self.copies:
            return self.tails[0]
        return self._tail_of(clients[0])

    def draws(self, at: int, clients: Sequence[str]) -> int:
        # A shared tail makes several steps at the same step of its clients.
        return at if self.copies else at * self.amounts.clients + self.everyone.index(clients[0])

    def rate(self, at: int) -> int:
        return self.round

    def shared(self, held: Sequence[SideState]) -> SideState:
        # Before the first round clients have the initial heads that they made themselves.
        return held[0] if self.head is None else self.head

    def ended(self, sender: str, message: Ended) -> list[Envelope]:
        self._heads[sender] = message.head
        if len(self._heads) == len(self.present):
            self._average()
            self.done += max(self.amounts.steps)
            self.over = True
            for name in self.present:
                self.count(name)
        return []

    def _average(self) -> None:
        """Average the heads and tails of the clients that took part."""
        # A client whose loss has counted nothing has learned nothing.
        names = [name for name in self.present if self.counted.get(name)]
        if not names:
            self._leave()
            return
        weights = [self.counted[name] for name in names]
        if not self.personal:
            self.head = mean(self._heads_of(names), weights)
        if self.copies:
            self._share(mean([self._tail_of(name).own for name in names], weights))

    def _leave(self) -> None:
        """Keep the model from before the round, because no loss has counted anything."""
        if not self.personal and self.head is None:
            # The server does not know the initial head of the clients.
            heads = self._heads_of(self.present)
            self.head = mean(heads, [1.0 for _ in heads])
        if self._before is not None:
            self._share(self._before)

    def _heads_of(self, names: Sequence[str]) -> list[SideState]:
        return [head for name in names if (head := self._heads[name]) is not None]

    def _share(self, own: SideState) -> None:
        for tail in self.tails:
            tail.own = copied(own)

    def _tail_of(self, name: str) -> SideRunner:
        return self.tails[self.everyone.index(name)]


@dataclass(frozen=True)
class SplitFed(Split):
    """Clients train at the same time, and their heads are averaged after every round.

    Args:
        version: 1 has a tail for each client, which are averaged too; 2 has a single tail for all.
    """

    version: int = 1

    name: ClassVar[str] = "split-fed"

    @property
    def title(self) -> str:  # type: ignore[override]
        return f"SplitFed v{self.version}"

    def check(self, task: Task, world: World) -> None:
        super().check(task, world)
        if self.version not in (1, 2):
            raise ValueError(f"version is {self.version}, but it has to be 1 or 2")

    def rules(self) -> Rules:
        returns = not self.personal_heads
        return Rules(self.labels_stay, returns=returns, forgets=True, by_round=True)

    def order(
        self, amounts: Amounts, head: SideState | None, tail: Callable[[int], SideRunner], seed: int
    ) -> TurnOrder:
        tails = [tail(number) for number in range(self.count if self.version == 1 else 1)]
        return SplitFedOrder(amounts, head, tails, seed, self.version == 1, self.personal_heads)
