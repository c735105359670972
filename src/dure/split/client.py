"""Client of split learning: the head of the model, its data, and in the U-shape the end as well.

    Turn, and the head if sent separately  ->  the values of the first batch
    Gradients                              ->  backward, one step of the head's optimizer, and the
                                               values of the next batch
    after the last                         ->  Ended, and the head to the client of the next turn

The client does no I/O: messages in, messages out, and `now` is an argument. Client and server share
nothing but messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dure.data.examples import Examples, reader_on
from dure.errors import DureError, StateError
from dure.machine.devices import CPU
from dure.parallel.pipeline.stage import Microbatch
from dure.parallel.pipeline.trace import leaves_of
from dure.randomness.seeds import seed_generators
from dure.split import messages
from dure.split.blame import InvalidMessageError
from dure.split.compute_queue import ComputeQueue
from dure.split.head_checks import HeadChecks
from dure.split.leakage.defence import Memory
from dure.split.leakage.guard import Guard
from dure.split.messages import (
    SERVER,
    Ended,
    Envelope,
    Gradients,
    HeadGradients,
    HeadHandover,
    HeadSum,
    Message,
    OutputGradients,
    Outputs,
    Pass,
    SideState,
    Smashed,
    Turn,
)
from dure.split.sides import SideRunner, copied, without_optimizer_state
from dure.tasks.loss_shares import CountedLoss, LossShare


@dataclass(frozen=True)
class Rules:
    """Agreement between clients and the server before the run.

    Args:
        labels_stay: whether the model's end is at the client.
        hands: whether a client sends its head to the next client directly.
        sums: whether all heads make the same step by the sum of their gradients.
        returns: whether the head goes to the server at the end of a turn.
        forgets: whether the optimizer's state is reset at the end of a turn.
        by_round: whether learning-rate schedules count rounds.
    """

    labels_stay: bool
    hands: bool = False
    sums: bool = False
    returns: bool = False
    forgets: bool = False
    by_round: bool = False


class HeadError(DureError):
    """The head from another client is invalid. turn: the turn for which it was sent."""

    def __init__(self, turn: int, reason: str) -> None:
        super().__init__(turn, reason)
        self.turn = turn
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class SplitClientState(NamedTuple):
    """State of a client after a turn. memory: of its defence."""

    own: SideState
    memory: Memory


class SplitClient:
    """State machine of client `number`.

    Args:
        number: number of the client, counted from 0.
        party: its stages and weights.
        rules: the agreement with the server.
        examples: its data.
        at: returns the indices of the examples of a step; steps count from 0 over all turns.
        losses: the loss of the task.
        seed: the run's seed.
        seconds: `seconds(examples, stages, backward)` returns the duration of a pass.
        guard: defence of the outgoing values; None without a defence.
        device: device of its stages, on which its batches are read.
    """

    def __init__(
        self,
        number: int,
        party: SideRunner,
        rules: Rules,
        examples: Examples,
        at: Callable[[int], Tensor],
        losses: CountedLoss,
        seed: int,
        seconds: Callable[[int, Sequence[int], bool], float],
        guard: Guard | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.number = number
        self.name = messages.client(number)
        self.party = party
        self.rules = rules
        self.examples = examples
        self.batch = reader_on(examples, device)
        self.at = at
        self.losses = losses
        self.seed = seed
        self.seconds = seconds
        self.guard = guard
        self.taken = 0
        """Number of its steps over all turns."""
        self.kept = {-1: SplitClientState(party.own, None)}
        """States by turn: of the newest turn that counts, and of a turn that may not count yet.

        The initial state has the number -1.
        """
        self.busy = ComputeQueue()
        self.heads: HeadChecks | None = None
        """Checks of heads from other clients; None if no head comes from elsewhere."""
        self.end = 2 if rules.labels_stay else None
        """Number of the stage of the model's end; None if the server has it."""
        self._turn: Turn | None = None
        self._step = 0
        self._early: tuple[str, HeadHandover] | None = None
        self._ahead: dict[int, tuple[Tensor, Microbatch]] = {}
        """Batch that was read ahead, by the step over all turns."""

    # A node

    @property
    def wake(self) -> float:
        return self.busy.wake

    def tick(self, now: float) -> list[Envelope]:
        return self.busy.tick(now)

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """Process a message and return the replies.

        Raises HeadError for an invalid head of another client.
        """
        if isinstance(message, Turn):
            return self._begin(message, now)
        if isinstance(message, HeadHandover):
            return self._handed(sender, message, now)
        if isinstance(message, Outputs):
            return self._end_of_model(message, now)
        if isinstance(message, Gradients):
            return self._descend(message, now)
        if isinstance(message, HeadSum):
            return self._summed(message, now)
        if isinstance(message, Pass):
            head = self.after(message.since).own
            return [(message.to, HeadHandover(message.turn, copied(head)))]
        raise ValueError(f"{self.name} cannot process {type(message).__name__} from {sender}")

    # A turn

    def _begin(self, turn: Turn, now: float) -> list[Envelope]:
        # An unfinished turn has been rolled back.
        self.party.drop()
        self.busy.drop()
        self._turn = turn
        self._step = 0
        self._ahead.clear()
        self.taken = turn.taken
        # Only the state after `since` is needed: a rollback cannot go further back.
        self.kept = {number: one for number, one in self.kept.items() if number == turn.since}
        if turn.head is None or self.guard is not None:
            kept = self.after(turn.since)
            if self.guard is not None:
                self.guard.memory = kept.memory
        if turn.head is not None:
            self.party.own = turn.head
        elif not turn.comes:
            self.party.own = copied(kept.own)
        if not turn.comes:
            return self._go_on(0.0, now)
        # The head may be here before the turn.
        early = self._early
        self._early = None
        return [] if early is None else self._handed(*early, now)

    def after(self, turn: int) -> SplitClientState:
        """Return the state after a turn. Raises StateError for a turn whose state is not saved."""
        if turn not in self.kept:
            raise StateError(
                f"{self.name} does not have its state after turn {turn}, which the server "
                "expects: start it with its former --state folder"
            )
        return self.kept[turn]

    def _handed(self, sender: str, message: HeadHandover, now: float) -> list[Envelope]:
        if self._turn is None or self._turn.number != message.turn:
            self._early = sender, message
            return []
        try:
            if self.heads is not None:
                self.heads.check(message.head)
        except InvalidMessageError as error:
            raise HeadError(message.turn, f"{sender} hands on a head, and {error}") from error
        self.party.own = message.head
        return self._go_on(0.0, now)

    @property
    def _place(self) -> int:
        """Step of the run, over all clients."""
        assert self._turn is not None
        return self._turn.first + self._step

    def _ascend(self, now: float) -> list[Envelope]:
        """Run the next batch up to the cut."""
        assert self._turn is not None
        ahead = self.taken in self._ahead
        indices, batch = self._ahead.pop(self.taken) if ahead else self.read(self.taken)
        values = self.party.forward(0, self._place, batch, [])
        if self.guard is not None:
            self.guard.sent(batch.inputs, values)
        targets = None if self.rules.labels_stay else leaves_of(batch.targets)
        smashed = Smashed(
            turn=self._turn.number,
            step=self._step,
            examples=batch.examples,
            counted=self.losses.expected(indices),
            values=tuple(values),
            targets=targets,
        )
        seconds = self.seconds(batch.examples, [0], False)
        return self.busy.work(seconds, [(SERVER, smashed)], now, "head")

    def meanwhile(self) -> None:
        """Read the next batch of the turn; call this after the replies have been sent."""
        if self._turn is not None and self._step + 1 < self._turn.steps and not self._ahead:
            self._ahead[self.taken + 1] = self.read(self.taken + 1)

    def read(self, taken: int) -> tuple[Tensor, Microbatch]:
        """Return the batch of a step of its life, and the indices of its examples."""
        indices = self.at(taken)
        if self.examples.draws:
            seed_generators(self.seed, "read", taken, self.number, everything=True)
        inputs, targets = self.batch(indices)
        return indices, Microbatch(len(indices), LossShare(1.0, 1.0), lambda: (inputs, targets))

    def _end_of_model(self, outputs: Outputs, now: float) -> list[Envelope]:
        """Run the end of the model and the loss, and go backward to the second cut."""
        assert self.end is not None
        assert self._turn is not None
        # The batch of the head, with its share of the joint batch's loss.
        head = self.party.batch(0)
        share = LossShare(outputs.share, 1.0)
        batch = Microbatch(head.examples, share, lambda: (head.inputs, head.targets))
        self.party.forward(self.end, self._place, batch, outputs.values)
        gradients = self.party.backward(self.end, [])
        if self.guard is not None:
            gradients = self.guard.gradients(gradients, batch.targets, self._place)
        loss, counted = self.party.loss(self.end)
        said = OutputGradients(
            turn=self._turn.number,
            step=self._step,
            values=tuple(gradients),
            missed=self.party.missed(self.end, batch.examples),
            loss=loss / outputs.share if outputs.share else 0.0,
            counted=counted,
        )
        seconds = self.seconds(batch.examples, [self.end], False)
        seconds += self.seconds(batch.examples, [self.end], True)
        return self.busy.work(seconds, [(SERVER, said)], now, "end")

    def _descend(self, message: Gradients, now: float) -> list[Envelope]:
        """Run the head's backward pass, and update the head or send its gradients."""
        assert self._turn is not None
        examples = self.party.examples(0)
        values: Sequence[Tensor] = message.values
        missed = message.missed
        if self.guard is not None:
            values = self.guard.returned(values, message.share)
            missed = 0 if self.guard.adds else missed
        self.party.backward(0, values)
        gradients = self.party.gradients(missed)
        seconds = self.seconds(examples, [0], True)
        if self.rules.sums:
            said = HeadGradients(self._turn.number, self._step, gradients)
            return self.busy.work(seconds, [(SERVER, said)], now, "head")
        self.party.update(gradients, self._rate)
        self.busy.work(seconds, [], now, "head")
        return self._next(0.0, now)

    def _summed(self, message: HeadSum, now: float) -> list[Envelope]:
        self.party.update(message.values, self._rate)
        return self._next(0.0, now)

    @property
    def _rate(self) -> int:
        """Step of the learning-rate schedule."""
        assert self._turn is not None
        return self._turn.round if self.rules.by_round else self._place

    def _next(self, seconds: float, now: float) -> list[Envelope]:
        assert self._turn is not None
        if self._step < self._turn.steps:
            self.taken += 1
        self._step += 1
        return self._go_on(seconds, now)

    def _go_on(self, seconds: float, now: float) -> list[Envelope]:
        """Begin the next batch, end the turn, or wait for other clients without a batch left."""
        assert self._turn is not None
        self.busy.work(seconds, [], now)
        if self._step < self._turn.steps:
            return self._ascend(now)
        return self._finish(now) if self._step >= self._turn.until else []

    def _finish(self, now: float) -> list[Envelope]:
        assert self._turn is not None
        if self.rules.forgets:
            self.party.own = without_optimizer_state(self.party.own)
        memory = None if self.guard is None else self.guard.memory
        # Not a copy: the next turn copies it.
        self.kept[self._turn.number] = SplitClientState(self.party.own, memory)
        head = self.party.own if self.rules.returns or self._turn.brings else None
        ended = Ended(self._turn.number, head)
        self._turn = None
        return self.busy.work(0.0, [(SERVER, ended)], now)
