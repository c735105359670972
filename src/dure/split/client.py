"""A client: the head of the model, its data, and in the U-shape the end of the model as well.

    Turn, and the head if it comes apart   ->  the values of the first batch
    Gradients                              ->  backward, one step of the head's optimizer, and the
                                               values of the next batch
    after the last                         ->  Ended, and the head on to whoever has the next turn

No I/O: messages in, messages out, `now` is an argument. It shares nothing with the server but
messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from dure.data.examples import Examples
from dure.errors import DureError, StateError
from dure.parallel.pipeline.stage import Microbatch
from dure.parallel.pipeline.trace import leaves_of
from dure.randomness.seeds import seed_generators
from dure.split import messages
from dure.split.blame import WrongError
from dure.split.busy import Busy
from dure.split.heads import Heads
from dure.split.leakage.defence import Memory
from dure.split.leakage.guard import Guard
from dure.split.messages import (
    SERVER,
    Ended,
    Envelope,
    Gradients,
    Handed,
    HeadGradients,
    HeadSum,
    Message,
    OutputGradients,
    Outputs,
    Own,
    Pass,
    Smashed,
    Turn,
)
from dure.split.sides import Party, copied, fresh
from dure.tasks.loss_shares import CountedLoss, Share


@dataclass(frozen=True)
class Rules:
    """What clients and the server agree upon before they begin.

    labels_stay: whether the model's end is with the client. hands: whether a client hands its head
    to the next one itself. sums: whether heads make one step by the sum of their gradients.
    returns: whether the head goes to the server at the end of a turn. forgets: whether what its
    optimizer remembers ends with the turn. by_round: whether schedules count rounds.
    """

    labels_stay: bool
    hands: bool = False
    sums: bool = False
    returns: bool = False
    forgets: bool = False
    by_round: bool = False


class HeadError(DureError):
    """The head that a client was handed by another one cannot be. turn: for which it was."""

    def __init__(self, turn: int, reason: str) -> None:
        super().__init__(turn, reason)
        self.turn = turn
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class Kept(NamedTuple):
    """What a client knew after a turn. memory: of its defence."""

    own: Own
    memory: Memory


class Client:
    """Client `number`. at: gives the indices of its examples in a step of its own, counted from 0.

    seconds: how long so many examples take in these stages, forward or backward. guard: the defence
    of what leaves the client; None where there is none.
    """

    def __init__(
        self,
        number: int,
        party: Party,
        rules: Rules,
        examples: Examples,
        at: Callable[[int], Tensor],
        losses: CountedLoss,
        seed: int,
        seconds: Callable[[int, Sequence[int], bool], float],
        guard: Guard | None = None,
    ) -> None:
        self.number = number
        self.name = messages.client(number)
        self.party = party
        self.rules = rules
        self.examples = examples
        self.at = at
        self.losses = losses
        self.seed = seed
        self.seconds = seconds
        self.guard = guard
        self.taken = 0
        """Steps that it has made in its life."""
        self.kept = {-1: Kept(party.own, None)}
        """What it knew after the newest of its turns that counts, and after the one that may not
        count yet; before the first, with the number -1."""
        self.busy = Busy()
        self.heads: Heads | None = None
        """What the heads that others hand on have to be like; None where nobody else makes them."""
        self.end = 2 if rules.labels_stay else None
        """The stage of the model's end, where that is here."""
        self._turn: Turn | None = None
        self._step = 0
        self._early: tuple[str, Handed] | None = None
        self._ahead: dict[int, tuple[Tensor, Microbatch]] = {}
        """The batch that was read before its step, by the step of the client's life."""

    # A node

    @property
    def wake(self) -> float:
        return self.busy.wake

    def tick(self, now: float) -> list[Envelope]:
        return self.busy.tick(now)

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """What it says to a message. Raises HeadError for the head of another client that cannot
        be."""
        if isinstance(message, Turn):
            return self._begin(message, now)
        if isinstance(message, Handed):
            return self._handed(sender, message, now)
        if isinstance(message, Outputs):
            return self._end_of_model(message, now)
        if isinstance(message, Gradients):
            return self._descend(message, now)
        if isinstance(message, HeadSum):
            return self._summed(message, now)
        if isinstance(message, Pass):
            head = self.after(message.since).own
            return [(message.to, Handed(message.turn, copied(head)))]
        raise ValueError(f"{self.name} is told {type(message).__name__} by {sender}")

    # A turn

    def _begin(self, turn: Turn, now: float) -> list[Envelope]:
        # What it is in the middle of, if anything, has been taken back.
        self.party.drop()
        self.busy.drop()
        self._turn = turn
        self._step = 0
        self._ahead.clear()
        self.taken = turn.taken
        # Nothing but this turn can be gone on from: what was known after others is not needed.
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

    def after(self, turn: int) -> Kept:
        """What it knew after a turn. Raises StateError where that is not here any more."""
        if turn not in self.kept:
            raise StateError(
                f"{self.name} does not have what it knew after turn {turn}, which the server "
                f"counts: start it with the --state folder that it had then"
            )
        return self.kept[turn]

    def _handed(self, sender: str, message: Handed, now: float) -> list[Envelope]:
        if self._turn is None or self._turn.number != message.turn:
            self._early = sender, message
            return []
        try:
            if self.heads is not None:
                self.heads.check(message.head)
        except WrongError as error:
            raise HeadError(message.turn, f"{sender} hands on a head, and {error}") from error
        self.party.own = message.head
        return self._go_on(0.0, now)

    @property
    def _place(self) -> int:
        """The step on the way of all."""
        assert self._turn is not None
        return self._turn.first + self._step

    def _ascend(self, now: float) -> list[Envelope]:
        """The next batch, up to the cut."""
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
        """To be called when what it has said is on its way: reads the next batch of the turn."""
        if self._turn is not None and self._step + 1 < self._turn.steps and not self._ahead:
            self._ahead[self.taken + 1] = self.read(self.taken + 1)

    def read(self, taken: int) -> tuple[Tensor, Microbatch]:
        """The batch of a step of its life, and the indices of its examples."""
        indices = self.at(taken)
        if self.examples.draws:
            seed_generators(self.seed, "read", taken, self.number, everything=True)
        inputs, targets = self.examples.batch(indices)
        return indices, Microbatch(len(indices), Share(1.0, 1.0), lambda: (inputs, targets))

    def _end_of_model(self, outputs: Outputs, now: float) -> list[Envelope]:
        """The end of the model, with the loss, and back to the second cut."""
        assert self.end is not None
        assert self._turn is not None
        # The batch of the head, with its share in the loss of the joint batch.
        head = self.party.batch(0)
        share = Share(outputs.share, 1.0)
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
        """Back to the examples."""
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
        """The step of the schedule."""
        assert self._turn is not None
        return self._turn.round if self.rules.by_round else self._place

    def _next(self, seconds: float, now: float) -> list[Envelope]:
        assert self._turn is not None
        if self._step < self._turn.steps:
            self.taken += 1
        self._step += 1
        return self._go_on(seconds, now)

    def _go_on(self, seconds: float, now: float) -> list[Envelope]:
        """The next batch, or the end of the turn; a client without a batch waits for the others."""
        assert self._turn is not None
        self.busy.work(seconds, [], now)
        if self._step < self._turn.steps:
            return self._ascend(now)
        return self._finish(now) if self._step >= self._turn.until else []

    def _finish(self, now: float) -> list[Envelope]:
        assert self._turn is not None
        if self.rules.forgets:
            self.party.own = fresh(self.party.own)
        memory = None if self.guard is None else self.guard.memory
        # Not a copy: the next turn makes one of its own.
        self.kept[self._turn.number] = Kept(self.party.own, memory)
        head = self.party.own if self.rules.returns or self._turn.brings else None
        ended = Ended(self._turn.number, head)
        self._turn = None
        return self.busy.work(0.0, [(SERVER, ended)], now)
