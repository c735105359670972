"""Server of split learning: the tail of the model, or its middle in the U-shape.

    Smashed, from one client or from all   ->  forward, and with the labels the loss
                                           ->  backward, one step of the optimizer, Gradients
    without labels                         ->  Outputs; OutputGradients  ->  as above

The order (`dure.split.orders`) decides which clients train next, and with which tail;
`dure.split.message_order` decides which message of a client is due; `dure.split.blame` attributes
failed computations to clients.

The server does no I/O: messages in, messages out, and `now` is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from dure.errors import (
    DureError,
    LossNotFiniteError,
    WorkerFailedError,
    described,
    traceback_of,
)
from dure.parallel.pipeline.stage import Microbatch
from dure.split.batching import Batching
from dure.split.blame import GRADIENT, ExcessiveValueError, blamed, check_grown, check_size, largest
from dure.split.compute_queue import ComputeQueue
from dure.split.message_order import DueMessages
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
    SideState,
    Smashed,
)
from dure.split.orders import TurnOrder
from dure.split.sides import SideRunner, copied
from dure.tasks.loss_shares import LossShare


@dataclass
class JointBatch:
    """Clients' batches that form a batch of the server, during its forward and backward pass.

    at: step of the run, over all clients.
    """

    clients: Sequence[str]
    smashed: Sequence[Smashed]
    at: int
    batching: Batching
    back: dict[str, OutputGradients] = field(default_factory=dict)

    @property
    def shares(self) -> list[float]:
        """Share of each client's batch in the joint batch, by count in the loss."""
        total = sum(one.counted for one in self.smashed)
        return [one.counted / total if total else 0.0 for one in self.smashed]

    def sizes(self) -> dict[str, float]:
        """Return the largest absolute value that each client has sent."""
        return {
            name: largest([*one.values, *(self.back[name].values if name in self.back else ())])
            for name, one in zip(self.clients, self.smashed, strict=True)
        }


@dataclass(frozen=True)
class ServerSnapshot:
    """State of a server between turns.

    order: from `TurnOrder.state`. losses, samples: as in `TailServer`.
    """

    order: Mapping[str, Any]
    head: SideState | None
    tails: Sequence[SideState]
    losses: Sequence[tuple[float, float]]
    samples: int


class TailServer:
    """State machine that trains the server's part with the clients that the order chooses.

    targets: structure of a batch's targets for the loss; None if they stay at clients. seconds:
    `seconds(examples, backward)` returns the duration of a pass through the server's part.
    """

    name = SERVER

    def __init__(
        self,
        order: TurnOrder,
        batching: Callable[[tuple[int, ...]], Batching],
        targets: TreeSpec | None,
        seconds: Callable[[int, bool], float] = lambda examples, back: 0.0,
    ) -> None:
        self.order = order
        self.batching = batching
        self.targets = targets
        self.seconds = seconds
        self.busy = ComputeQueue()
        self.losses: list[tuple[float, float]] = []
        """(loss, count) of each step, since a caller last cleared the list."""
        self.samples = 0
        self.due = DueMessages(order.sums)
        self.blames = False
        """Whether an error of a computation names the clients that caused it (CannotComputeError).

        For remote clients, which may be faulty; otherwise the error is raised unchanged.
        """
        self._newest: JointBatch | None = None
        """Newest batch whose step of the tail is pending."""
        self._sized: ServerSnapshot | None = None
        self._sizes: list[float] = []
        """Largest absolute weight of each tail in the state `_sized`."""
        self._joint: dict[str, JointBatch] = {}
        """Current batch of each client."""
        self._heads: dict[str, HeadGradients] = {}
        self.keeps = False
        """Whether turns are transactions, which `back` rolls back."""
        self.whole: ServerSnapshot | None = None
        """State between turns, if `keeps` is set; `back` restores it."""

    # A node

    @property
    def wake(self) -> float:
        return self.busy.wake

    def tick(self, now: float) -> list[Envelope]:
        return self.busy.tick(now)

    def begin(self, round: int, absent: frozenset[str] = frozenset()) -> list[Envelope]:
        """Begin a round; return the first messages. absent: clients that take no part in it."""
        self.order.open(round)
        if self.keeps:
            self.keep()
        return self.again(absent)

    def again(self, absent: frozenset[str]) -> list[Envelope]:
        """Begin the next turns, also after `back`, without the absent clients."""
        return self._noted(self.order.again(absent))

    def _noted(self, said: list[Envelope]) -> list[Envelope]:
        self.due.note(said)
        return said

    def meanwhile(self) -> None:
        """Compute the pending steps of the tails; call this after the replies have been sent.

        Raises CannotComputeError if `blames` is set and a step damages the tail.
        """
        if self.blames:
            self._check_newest()
        for tail in self.order.tails:
            tail.settle()

    def _check_newest(self) -> None:
        """Make the newest pending step of a tail. Raises CannotComputeError if it does damage."""
        joint = self._newest
        self._newest = None
        if joint is None:
            return
        tail = self.order.tail(joint.clients)
        with self._computing(joint):
            check_size("gradients of the tail", tail.unsettled, GRADIENT)
            tail.settle()
            check_grown("the tail", tail.own, self._before(tail))

    def _before(self, tail: SideRunner) -> float:
        """Return the largest absolute weight of a tail in the state between turns."""
        if self.whole is None:
            return 0.0
        if self._sized is not self.whole:
            self._sized = self.whole
            self._sizes = [largest(one.weights) for one in self.whole.tails]
        return self._sizes[self.order.tails.index(tail)]

    # Turns are transactions: a turn counts as a whole, or not at all

    def keep(self) -> None:
        """Save the current state for `back`."""
        self.whole = ServerSnapshot(
            order=self.order.state(),
            head=self.order.head,
            tails=[copied(one.own) for one in self.order.tails],
            losses=list(self.losses),
            samples=self.samples,
        )

    def back(self) -> None:
        """Roll back to the state that `keep` saved."""
        assert self.whole is not None
        self._joint.clear()
        self._heads.clear()
        self._newest = None
        self.due.drop()
        self.busy.drop()
        self.order.restore(self.whole.order)
        self.order.head = self.whole.head
        for tail, own in zip(self.order.tails, self.whole.tails, strict=True):
            tail.drop()
            tail.own = copied(own)
        self.losses = list(self.whole.losses)
        self.samples = self.whole.samples

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """Process a message and return the replies.

        Raises ValueError for a message that is not due, and LossNotFiniteError; if `blames` is set,
        CannotComputeError.
        """
        # A message of a turn that was rolled back is discarded.
        if getattr(message, "turn", None) != self.order.turns.get(sender):
            return []
        self.due.take(sender, message)
        if isinstance(message, Smashed):
            self.order.came(sender, message)
            return self._go_on(now)
        if isinstance(message, OutputGradients):
            return self._returned(sender, message, now)
        if isinstance(message, HeadGradients):
            return self._sum_heads(sender, message, now)
        if isinstance(message, Ended):
            said = self._noted(self.order.ended(sender, message))
            # The turn counts: commit the state, so that a later rollback does not go behind it.
            if self.keeps and sender not in self.order.turns:
                self.keep()
            return [*said, *self._go_on(now)]
        raise ValueError(f"the server cannot process {type(message).__name__} from {sender}")

    def awaited(self) -> list[str]:
        """Return the clients whose messages are awaited."""
        return [name for name in self.order.turns if name in self.due]

    # A step

    def _go_on(self, now: float) -> list[Envelope]:
        """Process the batches that are ready."""
        said: list[Envelope] = []
        while (ready := self.order.ready()) is not None:
            said += self._forward(*ready, now)
        return said

    def _forward(
        self, clients: Sequence[str], smashed: Sequence[Smashed], at: int, now: float
    ) -> list[Envelope]:
        if self.blames:
            self._check_newest()
        sizes = [one.examples for one in smashed]
        joint = JointBatch(clients, smashed, at, self.batching(tuple(sizes)))
        examples = sum(sizes)
        self.samples += examples
        tail = self.order.tail(clients)
        with self._computing(joint):
            values = joint.batching.together([one.values for one in smashed])
            found = self._through(tail, joint.at, clients, smashed, values)
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
        return self.busy.work(seconds, self._noted(said), now, "tail")

    def _through(
        self,
        tail: SideRunner,
        at: int,
        clients: Sequence[str],
        smashed: Sequence[Smashed],
        values: Sequence[Tensor],
    ) -> list[Tensor]:
        """Return the output of the tail for the batches of these clients at the step `at`."""
        examples = sum(one.examples for one in smashed)
        batch = Microbatch(examples, LossShare(1.0, 1.0), lambda: (None, self._targets(smashed)))
        found = tail.forward(1, self.order.draws(at, clients), batch, values)
        if self.blames:
            check_size("values that leave the tail", found, math.inf)
        return found

    def _targets(self, smashed: Sequence[Smashed]) -> Any:
        """Return the targets of the joint batch."""
        assert self.targets is not None
        leaves = zip(*[one.targets for one in smashed], strict=True)
        return tree_unflatten([_joined(each) for each in leaves], self.targets)

    def _returned(self, sender: str, message: OutputGradients, now: float) -> list[Envelope]:
        """Add the gradients of a client's outputs; go backward once all have arrived."""
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
        joint: JointBatch,
        tail: SideRunner,
        gradients: Sequence[Tensor],
        back: Sequence[OutputGradients] | None,
        seconds: float,
        now: float,
    ) -> list[Envelope]:
        examples = tail.examples(1)
        with self._computing(joint):
            found = tail.backward(1, gradients)
            if back is None:
                mean, counted = tail.loss(1)
                missed = 0
                missed_before = tail.missed(1, examples)
            else:
                mean, counted = _mean_of(back)
                missed = -1
                # A value of the joint batch lacks a gradient only if it lacks one at all clients.
                for one in back:
                    missed &= one.missed
                missed_before = tail.passed_on(1, missed)
            if not math.isfinite(mean):
                raise LossNotFiniteError(mean, " and ".join(joint.clients), f"step {joint.at + 1}")
            if self.blames:
                check_size("gradients at the cut", found, GRADIENT)
        self.losses.append((mean, counted))
        self.order.learned(joint.clients, counted)
        self._newest = joint
        # Deferred, so that clients need not wait for the step of the tail.
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
        return self.busy.work(seconds, self._noted(said), now, "tail")

    # Attribution of failed computations

    @contextmanager
    def _computing(self, joint: JointBatch) -> Iterator[None]:
        """Context manager: if `blames` is set, errors inside name the clients that caused them.

        The tail is changed after an error: the caller has to call `back`.
        """
        try:
            yield
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if not self.blames:
                raise
            named = blamed(
                joint.clients, error, lambda name: self._alone(joint, name), joint.sizes()
            )
            if named is None:
                raise _nobodys(error, joint) from error
            raise named from error

    def _alone(self, joint: JointBatch, name: str) -> Exception | None:
        """Return the error that the batch of a client causes alone; None if there is none."""
        one = joint.smashed[joint.clients.index(name)]
        tail = self.order.tail(joint.clients)
        tail.drop()
        try:
            self._through(tail, joint.at, [name], [one], one.values)
            if self.targets is not None or name in joint.back:
                back = joint.back.get(name)
                found = tail.backward(1, [] if back is None else back.values)
                loss = tail.loss(1)[0] if back is None else back.loss
                if not math.isfinite(loss):
                    return LossNotFiniteError(loss, name, f"step {joint.at + 1}")
                check_size("gradients at the cut", found, GRADIENT)
                check_size("gradients of the tail", tail.gradients(0), GRADIENT)
        except Exception as error:
            return error
        finally:
            tail.drop()
        return None

    # Heads that make the same step

    def _sum_heads(self, sender: str, message: HeadGradients, now: float) -> list[Envelope]:
        """Sum the gradients of all heads of a step, once all have arrived."""
        self._heads[sender] = message
        clients = self.order.together
        if len(self._heads) < len(clients):
            return []
        parts = [self._heads[client].values for client in clients]
        self._heads.clear()
        summed = HeadSum(message.step, total(parts))
        return self._noted([(client, summed) for client in self.order.present])


def _nobodys(error: Exception, joint: JointBatch) -> Exception:
    """Return the error for a batch if no client of it can be named alone."""
    when = f"step {joint.at + 1}"
    who = " and ".join(joint.clients)
    if isinstance(error, LossNotFiniteError):
        return error
    if isinstance(error, ExcessiveValueError):
        return LossNotFiniteError(math.nan, who, when)
    if isinstance(error, DureError):
        return error
    reason = f"{described(error)} (with the batches of {who})"
    return WorkerFailedError("the server's part", when, reason, traceback_of(error))


def _mean_of(back: Sequence[OutputGradients]) -> tuple[float, float]:
    """Return (mean loss, count) of a batch from its clients' losses."""
    counted = sum(one.counted for one in back)
    total = sum(one.loss * one.counted for one in back)
    return (total / counted if counted else 0.0), counted


def total(parts: Sequence[tuple[Tensor | None, ...]]) -> tuple[Tensor | None, ...]:
    """Return the sum of gradients of several heads, in order; None if no head has a gradient."""
    sums: list[Tensor | None] = []
    for each in zip(*parts, strict=True):
        there = [one for one in each if one is not None]
        sums.append(torch.stack(there).sum(dim=0) if there else None)
    return tuple(sums)


def _joined(leaves: Sequence[Any]) -> Any:
    """Return the concatenated targets of several clients."""
    if len(leaves) == 1:
        return leaves[0]
    if all(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves):
        return torch.cat(list(leaves))
    raise ValueError(
        "targets of several clients are joined into one batch, so they have to be tensors whose "
        "first dimension is the example"
    )
