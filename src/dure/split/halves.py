"""The two halves of a run of split learning: what is made of a divided model for the server and for
a client.

Both halves live in one process in a simulation, and apart over a network; they share what `Draws`
has, which is a function of the seed, and messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch.utils._pytree import tree_flatten

from dure.data.examples import Examples
from dure.data.own_part import OwnPart
from dure.randomness.seeds import generator
from dure.split.client import Client
from dure.split.divided import Divided
from dure.split.leakage.defence import Defence
from dure.split.leakage.guard import Crossing, Guard
from dure.split.messages import Own
from dure.split.orders import Amounts, Order
from dure.split.plan import Plan
from dure.split.server import Server
from dure.split.sides import Party


@dataclass(frozen=True)
class Halves:
    """Makes them, of one divided model.

    examples: those that are trained on; a server elsewhere has some like them. secret: from which a
    client's defence draws where the server, which knows the seed, could draw the same.
    """

    divided: Divided
    plan: Plan
    examples: Examples
    seed: int
    secret: int | None = None

    def server(
        self,
        amounts: Amounts,
        head: Own | None,
        seconds: Callable[[int, bool], float] = lambda examples, back: 0.0,
    ) -> Server:
        """The server. head: of all clients, as far as it is known here."""
        side = self.divided.tails
        tail = side.own()
        order: Order = self.plan.order(
            amounts, head, lambda number: Party(side, tail, number), self.seed
        )
        structure = None
        if not self.plan.rules.labels_stay:
            _, targets = self.examples.batch(torch.arange(1))
            structure = tree_flatten(targets)[1]
        return Server(order, lru_cache(maxsize=64)(self.divided.batching), structure, seconds)

    def client(
        self,
        number: int,
        head: Own,
        part: OwnPart,
        seconds: Callable[[int, Sequence[int], bool], float] = lambda count, stages, back: 0.0,
    ) -> Client:
        """A client, of the examples that are its part. head: with which it begins."""
        return Client(
            number,
            Party(self.divided.heads, head, number),
            self.plan.rules,
            self.examples,
            part.at,
            self.divided.losses,
            self.seed,
            seconds,
            self._guard(number),
        )

    def _guard(self, number: int) -> Guard | None:
        drawn = self.seed if self.secret is None else self.secret
        return guard_of(self.plan.defence, self.divided.crossings_of_two, drawn, number)


def guard_of(
    defence: Defence, crossings: Callable[[], list[list[Crossing]]], seed: int, number: int
) -> Guard | None:
    """The defence of a client. crossings: what crosses at each cut."""
    if defence.guards in ("nothing", "labels"):
        return None
    found = crossings()
    return Guard(defence, found[0], found[-1], partial(generator, seed, "defence", number))
