"""Checks by a client of its server's messages, before the client's state machine gets them.

    Turn               a number after the turn that counts; as many steps as the client's batches;
                       a head only if the server passes heads on, of this model, finite
    Outputs            due, of this step; the forms of the server's part's output; finite
    Gradients          due, of this step; of the values that were sent; bounded
                       (`dure.split.gradient_bound`)
    HeadSum            due, of this step; the gradients of the head's weights; bounded
    Pass               only if clients pass heads on, to another client of the roster, and one
                       head for a turn
    Handed             from another client, for the turn that waits for it, once
    Final, Measure     a head only if heads come to the server, of this model, finite

A message that is not due is refused: messages of a channel are in order, so a server that sends
another message violates the protocol. Within these bounds a malicious server may still choose its
answers.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dure.fleet.virtual_network import Envelope
from dure.split.blame import InvalidMessageError, largest
from dure.split.client import Rules, SplitClient
from dure.split.gradient_bound import GradientBound, ReceivedError
from dure.split.head_checks import HeadChecks
from dure.split.messages import (
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
from dure.split.tensor_forms import TensorForm, form_of

MOST = 1 << 53
"""Bound on rounds and steps: integers that are exact as floats."""

_CLIENT = re.compile(r"client (0|[1-9][0-9]{0,8})")


@dataclass(frozen=True)
class CutValueChecks:
    """Properties of the values at the cuts.

    leaving: for each value of the head's output, whether it has a gradient. arriving: raises
    ValueError for values that do not match the output of the server's part for this number of
    examples.
    """

    leaving: Sequence[bool]
    arriving: Callable[[Sequence[Tensor], int], None]


class CheckedClient:
    """A client that checks its server's messages.

    Args:
        machine: the client.
        crossing: properties of the values of its batches.
        steps: number of steps of a turn.
        clients: number of clients of the run.
        largest: the norm of gradients that the site allows; None: by the gradients before.
    """

    def __init__(
        self,
        machine: SplitClient,
        crossing: CutValueChecks,
        steps: int,
        clients: int,
        largest: float | None = None,
    ) -> None:
        self.machine = machine
        self.heads = machine.heads = HeadChecks(machine.party.side)
        """Checks of received heads, from any sender."""
        self.rules: Rules = machine.rules
        self.crossing = crossing
        self.steps = steps
        self.clients = clients
        self.bound = GradientBound(largest, steps)
        self.sums = GradientBound(largest, steps)
        self.accepted = 0
        """Number of messages with progress: new turns, heads, and answers to steps."""
        self._turn: Turn | None = None
        self._due: type[Message] | None = None
        self._step = 0
        self._examples = 0
        self._sent: list[TensorForm] = []
        self._newest = -1
        self._passed: dict[int, tuple[int, str]] = {}
        """For each turn, the head that was passed on (`since`) and its receiver."""

    @property
    def wake(self) -> float:
        return self.machine.wake

    def tick(self, now: float) -> list[Envelope]:
        return self.machine.tick(now)

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """Return the client's replies to a message. Raises ReceivedError for an invalid message."""
        self._check(sender, message)
        said = self.machine.receive(sender, message, now)
        for _, own in said:
            self._note(own)
        if isinstance(message, HeadSum) and not said:
            # This client has no batch left; the next step's sum of gradients is due.
            self._step += 1
            self._due = HeadSum
        if isinstance(message, Turn) and message.number > self._newest:
            self._newest = message.number
            self.accepted += 1
        elif not isinstance(message, Turn | Pass):
            self.accepted += 1
        return said

    # Messages that are due

    def _note(self, said: Any) -> None:
        """Note a message of the client, and set the answer that is due."""
        self._due = None
        if isinstance(said, Smashed):
            self._step = said.step
            self._examples = said.examples
            there = zip(said.values, self.crossing.leaving, strict=True)
            self._sent = [form_of(one) for one, differentiable in there if differentiable]
            self._due = Outputs if self.rules.labels_stay else Gradients
        elif isinstance(said, OutputGradients):
            self._due = Gradients
        elif isinstance(said, HeadGradients):
            self._due = HeadSum

    def _check(self, sender: str, message: Message) -> None:
        if isinstance(message, Turn):
            self._check_turn(sender, message)
        elif isinstance(message, Pass):
            self._check_pass(sender, message)
        elif isinstance(message, HeadHandover):
            self._check_handed(sender, message)
        elif isinstance(message, Outputs | Gradients | HeadSum):
            self._check_due(sender, message)
        else:
            raise ReceivedError(
                f"{sender} sends {type(message).__name__}, which a server does not send"
            )

    def _check_due(self, sender: str, message: Outputs | Gradients | HeadSum) -> None:
        name = type(message).__name__
        if self._turn is None or self._due is not type(message) or message.step != self._step:
            due = "nothing" if self._due is None else f"{self._due.__name__} of {self._step + 1}"
            raise ReceivedError(
                f"{sender} sends {name} of step {message.step + 1}, but {due} is expected"
            )
        if isinstance(message, HeadSum):
            wanted = [form_of(one) for one in self.machine.party.side.parameters.values()]
            self.sums.check(sender, "gradients of the head", message.values, wanted)
            return
        _check_share(sender, message.share)
        if isinstance(message, Outputs):
            if not math.isfinite(largest(message.values)):
                raise ReceivedError(
                    f"{sender} sends values at the second cut that are not all finite numbers"
                )
            try:
                self.crossing.arriving(message.values, self._examples)
            except ValueError as error:
                raise ReceivedError(f"{sender}: {error}") from error
            return
        self.bound.check(sender, "gradients at the cut", message.values, self._sent)
        if not 0 <= message.missed < 1 << 62:
            raise ReceivedError(f"{sender} says that gradients {message.missed} are missing")

    # Turns and heads

    def _check_turn(self, sender: str, turn: Turn) -> None:
        numbers = (turn.round, turn.first, turn.taken, turn.until)
        counts = turn.since < turn.number < MOST and all(0 <= one < MOST for one in numbers)
        if not counts or turn.since < -1:
            raise ReceivedError(
                f"{sender} starts turn {turn.number} after turn {turn.since}, in round "
                f"{turn.round}: turn numbers have to increase"
            )
        longer = turn.until != turn.steps if not self.rules.sums else turn.until < turn.steps
        if turn.steps != self.steps or longer:
            raise ReceivedError(
                f"{sender} asks for a turn of {turn.steps} steps, until {turn.until}, but the "
                f"client's batches make {self.steps}"
            )
        if turn.comes and not self.rules.hands:
            raise ReceivedError(
                f"{sender} announces a head, but clients do not send heads in this run"
            )
        if turn.brings and not (self.rules.sums or self.rules.returns):
            raise ReceivedError(f"{sender} asks for the head, which it must not receive")
        if turn.head is not None:
            if not (self.rules.returns or self.rules.sums):
                raise ReceivedError(
                    f"{sender} sends a head, but it must not have heads in this run"
                )
            self.check_head(sender, turn.head)
        self._turn = turn
        self._due = HeadHandover if turn.comes else None

    def _check_pass(self, sender: str, message: Pass) -> None:
        found = _CLIENT.fullmatch(message.to)
        other = found is not None and int(found[1]) != self.machine.number
        if not self.rules.hands or not other or int(message.to[7:]) >= self.clients:
            raise ReceivedError(
                f"{sender} asks for the head, for {message.to[:40]!r}: the head is sent only to "
                "another client of the run"
            )
        before = self._passed.setdefault(message.turn, (message.since, message.to))
        if before != (message.since, message.to):
            raise ReceivedError(
                f"{sender} asks for the head for turn {message.turn} twice: after turn {before[0]} "
                f"for {before[1]}, and after turn {message.since} for {message.to}"
            )

    def _check_handed(self, sender: str, message: HeadHandover) -> None:
        if self._turn is None or self._due is not HeadHandover or message.turn != self._turn.number:
            due = "none" if self._turn is None else f"one for turn {self._turn.number}"
            reason = f"{due} is expected" if self._due is HeadHandover else "none is expected"
            raise ReceivedError(f"{sender} sent a head for turn {message.turn}, but {reason}")

    def check_head(self, sender: str, own: SideState) -> None:
        """Raise ReceivedError for a head of another model, or values that training cannot give."""
        try:
            self.heads.check(own)
        except InvalidMessageError as error:
            raise ReceivedError(f"{sender} sends an invalid head: {error}") from error


def _check_share(sender: str, share: float) -> None:
    if not (math.isfinite(share) and 0 <= share <= 1):
        raise ReceivedError(f"{sender} states that the client's share of a batch is {share}")


class ProgressTimeout:
    """Timeout of a site for a server that makes no progress, whatever messages it sends.

    Only accepted messages count: a new turn, a head, an answer to a step. seconds: None for no
    timeout.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._since: float | None = None
        self._accepted = -1

    def note(self, accepted: int) -> None:
        """Note the number of accepted messages; the timeout starts with the first call."""
        if accepted != self._accepted:
            self._accepted = accepted
            self._since = time.monotonic()

    @property
    def left(self) -> float | None:
        """Seconds until the timeout; None without a timeout. Raises ReceivedError afterwards."""
        if self.seconds is None or self._since is None:
            return None
        left = self._since + self.seconds - time.monotonic()
        if left <= 0:
            raise ReceivedError(
                f"the server is connected, but has made no progress for {self.seconds:g} s: no "
                "turn started, and no step was answered (--give-up)"
            )
        return left
