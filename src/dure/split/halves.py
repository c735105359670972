"""The two halves of a run of split learning: what is made of a cut model for the server and for a
client.

Both halves live in one process in a simulation, and apart over a network; they share what `Draws`
has, which is a function of the seed, and messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch.utils._pytree import tree_flatten

from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.data.own_part import OwnPart
from dure.parallel.pipeline.cut import CutModel
from dure.parallel.pipeline.draws import Stream
from dure.randomness.seeds import derive, generator
from dure.split.batching import Batching, crossings
from dure.split.client import Client
from dure.split.leakage.guard import Guard
from dure.split.messages import Own
from dure.split.orders import Amounts, Order
from dure.split.plan import Plan
from dure.split.server import Server
from dure.split.sides import Party, Side, weighed
from dure.tasks.loss_shares import CountedLoss


@dataclass(frozen=True)
class Halves:
    """Makes them, of one cut model.

    examples: those that are trained on; a server elsewhere has some like them. seen: whether they
    are here, all of them; without them each batch tells what it counts.
    """

    task: Task
    cut: CutModel
    plan: Plan
    examples: Examples
    seed: int
    seen: bool = True

    @property
    def losses(self) -> CountedLoss:
        """The loss, and what it counts in a batch."""
        return CountedLoss(self.task.loss, self.examples if self.seen else None)

    def side(self, stages: Sequence[int]) -> Side:
        """These stages, with an optimizer of their own."""
        # Every operation draws from a seed of its own: neither side tells the other what it drew.
        stream = Stream(derive(self.seed, "split"), carried=False)
        drawn = stream.drawing(weighed(self.losses), -1)
        return Side(self.cut, stages, self.task, stream, drawn)

    def server(
        self,
        side: Side,
        amounts: Amounts,
        head: Own | None,
        seconds: Callable[[int, bool], float] = lambda examples, back: 0.0,
    ) -> Server:
        """The server. head: of all clients, as far as it is known here."""
        tail = side.own()
        order: Order = self.plan.order(
            amounts, head, lambda number: Party(side, tail, number), self.seed
        )
        structure = None
        if not self.plan.rules.labels_stay:
            _, targets = self.examples.batch(torch.arange(1))
            structure = tree_flatten(targets)[1]
        batching = lru_cache(maxsize=64)(partial(Batching, self.cut))
        return Server(order, batching, structure, seconds)

    def client(
        self,
        number: int,
        side: Side,
        head: Own,
        part: OwnPart,
        seconds: Callable[[int, Sequence[int], bool], float] = lambda count, stages, back: 0.0,
    ) -> Client:
        """A client, of the examples that are its part. head: with which it begins."""
        return Client(
            number,
            Party(side, head, number),
            self.plan.rules,
            self.examples,
            part.at,
            self.losses,
            self.seed,
            seconds,
            self._guard(number),
        )

    def _guard(self, number: int) -> Guard | None:
        """The defence of a client."""
        defence = self.plan.defence
        if defence.guards in ("nothing", "labels"):
            return None
        first = crossings(self.cut, 0)
        last = crossings(self.cut, self.cut.stages - 2)
        return Guard(defence, first, last, partial(generator, self.seed, "defence", number))
