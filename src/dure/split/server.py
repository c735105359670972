"""The server: the tail of the model, or its middle in the U-shape, and whose turn it is.

    Smashed, from one client or from all   ->  forward, and with the labels the loss
                                           ->  backward, one step of the optimizer, Gradients
    without labels                         ->  Outputs; OutputGradients  ->  as above

Who trains when, and with which tail, is the order's (`dure.split.orders`).

No I/O: messages in, messages out, `now` is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from dure.errors import LossNotFiniteError
from dure.parallel.pipeline.stage import Microbatch
from dure.split.batching import Batching
from dure.split.busy import Busy
from dure.split.messages import (
    SERVER,
    Ended,
    Envelope,
    Gradients,
    HeadGradients,
    HeadSum,
    Message,
    OutputGradients,
    Outputs,
    Own,
    Smashed,
)
from dure.split.orders import Order
from dure.split.sides import Party, copied
from dure.tasks.loss_shares import Share


@dataclass
class Joint:
    """Batches of clients that are one batch of the server's, on their way through it.

    at: the step on the way of all.
    """

    clients: Sequence[str]
    smashed: Sequence[Smashed]
    at: int
    batching: Batching
    back: dict[str, OutputGradients] = field(default_factory=dict)

    @property
    def shares(self) -> list[float]:
        """What each client's batch counts in the joint one."""
        total = sum(one.counted for one in self.smashed)
        return [one.counted / total if total else 0.0 for one in self.smashed]


@dataclass(frozen=True)
class Whole:
    """What a server knows while no turn is under way.

    order: as `Order.state` says it. losses, samples: as `Server` has them.
    """

    order: Mapping[str, Any]
    head: Own | None
    tails: Sequence[Own]
    losses: Sequence[tuple[float, float]]
    samples: int


class Server:
    """Trains its part with whoever the order lets.

    targets: how the leaves of a batch's targets make up what the loss is called with. seconds: how
    long so many examples take in the server's part, forward or backward.
    """

    name = SERVER

    def __init__(
        self,
        order: Order,
        batching: Callable[[tuple[int, ...]], Batching],
        targets: TreeSpec | None,
        seconds: Callable[[int, bool], float] = lambda examples, back: 0.0,
    ) -> None:
        self.order = order
        self.batching = batching
        self.targets = targets
        self.seconds = seconds
        self.busy = Busy()
        self.losses: list[tuple[float, float]] = []
        """(loss, what it counts) of each step, since somebody took them."""
        self.samples = 0
        self._joint: dict[str, Joint] = {}
        """In which batch a client is."""
        self._heads: dict[str, HeadGradients] = {}
        self.keeps = False
        """Whether turns are transactions, which `back` takes back."""
        self.whole: Whole | None = None
        """What was so when nothing was under way, where it `keeps`."""

    # A node

    @property
    def wake(self) -> float:
        return self.busy.wake

    def tick(self, now: float) -> list[Envelope]:
        return self.busy.tick(now)

    def begin(self, round: int, absent: frozenset[str] = frozenset()) -> list[Envelope]:
        """A round begins. absent: the clients that take no part in it."""
        self.order.open(round)
        if self.keeps:
            self.keep()
        return self.order.again(absent)

    def meanwhile(self) -> None:
        """To be called when what it has said is on its way: computes what nobody waits for."""
        for tail in self.order.tails:
            tail.settle()

    # Turns are transactions: all of one counts, or nothing

    def keep(self) -> None:
        """What the server knows now is what `back` comes back to."""
        self.whole = Whole(
            order=self.order.state(),
            head=self.order.head,
            tails=[copied(one.own) for one in self.order.tails],
            losses=list(self.losses),
            samples=self.samples,
        )

    def back(self) -> None:
        """What has begun since `keep` was called does not count."""
        assert self.whole is not None
        self._joint.clear()
        self._heads.clear()
        self.busy.drop()
        self.order.restore(self.whole.order)
        self.order.head = self.whole.head
        for tail, own in zip(self.order.tails, self.whole.tails, strict=True):
            tail.drop()
            tail.own = copied(own)
        self.losses = list(self.whole.losses)
        self.samples = self.whole.samples

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """What it says to a message. Raises LossNotFiniteError."""
        # Of a turn that has been taken back since.
        if getattr(message, "turn", None) != self.order.turns.get(sender):
            return []
        if isinstance(message, Smashed):
            self.order.came(sender, message)
            return self._go_on(now)
        if isinstance(message, OutputGradients):
            return self._returned(sender, message, now)
        if isinstance(message, HeadGradients):
            return self._sum_heads(sender, message, now)
        if isinstance(message, Ended):
            said = self.order.ended(sender, message)
            # Its turn counts, and with it all that nobody can take back any more.
            if self.keeps and sender not in self.order.turns:
                self.keep()
            return [*said, *self._go_on(now)]
        raise ValueError(f"the server is told {type(message).__name__} by {sender}")

    def awaited(self) -> list[str]:
        """The clients whose messages it cannot go on without."""
        if self._heads:
            return [one for one in self.order.together if one not in self._heads]
        if self._joint:
            return [one for one, joint in self._joint.items() if one not in joint.back]
        return self.order.awaited()

    # A step

    def _go_on(self, now: float) -> list[Envelope]:
        """Computes with whatever has come that can be computed with."""
        said: list[Envelope] = []
        while (ready := self.order.ready()) is not None:
            said += self._forward(*ready, now)
        return said

    def _forward(
        self, clients: Sequence[str], smashed: Sequence[Smashed], at: int, now: float
    ) -> list[Envelope]:
        sizes = [one.examples for one in smashed]
        joint = Joint(clients, smashed, at, self.batching(tuple(sizes)))
        examples = sum(sizes)
        self.samples += examples
        values = joint.batching.together([one.values for one in smashed])
        tail = self.order.tail(clients)
        batch = Microbatch(examples, Share(1.0, 1.0), lambda: (None, self._targets(smashed)))
        found = tail.forward(1, self.order.draws(at, clients), batch, values)
        seconds = self.seconds(examples, False)
        if self.targets is not None:
            return self._backward(joint, tail, [], None, seconds, now)
        for client in clients:
            self._joint[client] = joint
        said: list[Envelope] = [
            (client, Outputs(one.step, tuple(own), share))
            for client, one, own, share in zip(
                clients, smashed, joint.batching.apart_again(found), joint.shares, strict=True
            )
        ]
        return self.busy.work(seconds, said, now, "tail")

    def _targets(self, smashed: Sequence[Smashed]) -> Any:
        """Those of the joint batch."""
        assert self.targets is not None
        leaves = zip(*[one.targets for one in smashed], strict=True)
        return tree_unflatten([_joined(each) for each in leaves], self.targets)

    def _returned(self, sender: str, message: OutputGradients, now: float) -> list[Envelope]:
        """The gradients of a client's outputs; with those of all others it goes on."""
        joint = self._joint.pop(sender)
        joint.back[sender] = message
        if len(joint.back) < len(joint.clients):
            return []
        back = [joint.back[client] for client in joint.clients]
        gradients = joint.batching.gradients_together([one.values for one in back])
        tail = self.order.tail(joint.clients)
        return [*self._backward(joint, tail, gradients, back, 0.0, now), *self._go_on(now)]

    def _backward(
        self,
        joint: Joint,
        tail: Party,
        gradients: Sequence[Tensor],
        back: Sequence[OutputGradients] | None,
        seconds: float,
        now: float,
    ) -> list[Envelope]:
        examples = tail.examples(1)
        found = tail.backward(1, gradients)
        if back is None:
            mean, counted = tail.loss(1)
            missed = 0
            missed_before = tail.missed(1, examples)
        else:
            counted = sum(one.counted for one in back)
            mean = sum(one.loss * one.counted for one in back) / counted if counted else 0.0
            missed = -1
            for one in back:
                missed &= one.missed
            missed_before = tail.passed_on(1, missed)
        if not math.isfinite(mean):
            raise LossNotFiniteError(mean, " and ".join(joint.clients), f"step {joint.at + 1}")
        self.losses.append((mean, counted))
        # Clients need not wait for the step of the tail.
        tail.leave(tail.gradients(missed), self.order.rate(joint.at))
        said: list[Envelope] = [
            (client, Gradients(one.step, tuple(own), missed_before, mean, counted, share))
            for client, one, own, share in zip(
                joint.clients,
                joint.smashed,
                joint.batching.gradients_apart(found),
                joint.shares,
                strict=True,
            )
        ]
        seconds += self.seconds(examples, True)
        return self.busy.work(seconds, said, now, "tail")

    # Heads that make one step

    def _sum_heads(self, sender: str, message: HeadGradients, now: float) -> list[Envelope]:
        """Adds up the gradients of all heads of a step."""
        self._heads[sender] = message
        clients = self.order.together
        if len(self._heads) < len(clients):
            return []
        parts = [self._heads[client].values for client in clients]
        self._heads.clear()
        summed = HeadSum(message.step, total(parts))
        return [(client, summed) for client in self.order.present]


def total(parts: Sequence[tuple[Tensor | None, ...]]) -> tuple[Tensor | None, ...]:
    """The sum of gradients of several heads, in their order; None where none has one."""
    sums: list[Tensor | None] = []
    for each in zip(*parts, strict=True):
        there = [one for one in each if one is not None]
        sums.append(torch.stack(there).sum(dim=0) if there else None)
    return tuple(sums)


def _joined(leaves: Sequence[Any]) -> Any:
    """The targets of several clients, one after another."""
    if len(leaves) == 1:
        return leaves[0]
    if all(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves):
        return torch.cat(list(leaves))
    raise ValueError(
        "targets of several clients make one batch, and have to be tensors whose first dimension "
        "is the example"
    )
