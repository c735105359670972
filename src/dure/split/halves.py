"""Construction of the server's and the clients' state machines from a divided model.

In a simulation both sides are in the same process, and over a network in separate processes; they
share messages, and random numbers that are functions of the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch.utils._pytree import tree_flatten

from dure.data.client_part import ClientExamples
from dure.data.examples import Examples
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
    """Factory of the server and the clients of a divided model.

    examples: the training examples; a remote server has some similar examples. secret: seed of a
    client's defence if the server, which knows `seed`, must not be able to draw the same noise.
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
        """Return the server. head: the initial head of all clients, or None if unknown here."""
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
        part: ClientExamples,
        seconds: Callable[[int, Sequence[int], bool], float] = lambda count, stages, back: 0.0,
    ) -> Client:
        """Return a client. head: its initial head. part: the indices of its examples."""
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
    """Return the defence of a client; None if it guards no outgoing values.

    crossings: returns the `Crossing` of each value at each cut.
    """
    if defence.guards in ("nothing", "labels"):
        return None
    found = crossings()
    return Guard(defence, found[0], found[-1], partial(generator, seed, "defence", number))
