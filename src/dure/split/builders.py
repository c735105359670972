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
from dure.machine.devices import CPU
from dure.randomness.seeds import generator
from dure.split.client import SplitClient
from dure.split.divided_model import DividedModel
from dure.split.leakage.defence import Defence
from dure.split.leakage.guard import CutValue, Guard
from dure.split.messages import SideState
from dure.split.orders import Amounts, TurnOrder
from dure.split.plan import SplitPlan
from dure.split.server import TailServer
from dure.split.sides import SideRunner


@dataclass(frozen=True)
class SplitBuilder:
    """Factory of the server and the clients of a divided model.

    examples: the training examples; a remote server has some similar examples. secret: seed of a
    client's defence if the server, which knows `seed`, must not be able to draw the same noise.
    device: on which the clients compute.
    """

    divided: DividedModel
    plan: SplitPlan
    examples: Examples
    seed: int
    secret: int | None = None
    device: torch.device = CPU

    def server(
        self,
        amounts: Amounts,
        head: SideState | None,
        seconds: Callable[[int, bool], float] = lambda examples, back: 0.0,
    ) -> TailServer:
        """Return the server. head: the initial head of all clients, or None if unknown here."""
        side = self.divided.tails
        tail = side.own()
        order: TurnOrder = self.plan.order(
            amounts, head, lambda number: SideRunner(side, tail, number), self.seed
        )
        structure = None
        if not self.plan.rules.labels_stay:
            _, targets = self.examples.batch(torch.arange(1))
            structure = tree_flatten(targets)[1]
        return TailServer(order, lru_cache(maxsize=64)(self.divided.batching), structure, seconds)

    def client(
        self,
        number: int,
        head: SideState,
        part: ClientExamples,
        seconds: Callable[[int, Sequence[int], bool], float] = lambda count, stages, back: 0.0,
    ) -> SplitClient:
        """Return a client. head: its initial head. part: the indices of its examples."""
        return SplitClient(
            number,
            SideRunner(self.divided.heads, head, number),
            self.plan.rules,
            self.examples,
            part.at,
            self.divided.losses,
            self.seed,
            seconds,
            self._guard(number),
            self.device,
        )

    def _guard(self, number: int) -> Guard | None:
        drawn = self.seed if self.secret is None else self.secret
        return guard_of(self.plan.defence, self.divided.crossings_of_two, drawn, number)


def guard_of(
    defence: Defence, crossings: Callable[[], list[list[CutValue]]], seed: int, number: int
) -> Guard | None:
    """Return the defence of a client; None if it guards no outgoing values.

    crossings: returns the `CutValue` of each value at each cut.
    """
    if defence.guards in ("nothing", "labels"):
        return None
    found = crossings()
    return Guard(defence, found[0], found[-1], partial(generator, seed, "defence", number))
