"""A party: its columns of everybody's examples, and the head for them. It sees no label.

    Step                  ->  the head's activations of the batch
    ActivationGradients   ->  backward, one step of the head's optimizer

No I/O: messages in, messages out, `now` is an argument. It shares nothing with the others but
messages, and knows nothing of them but the holder's name.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dure.data.batches import Batches
from dure.errors import CutNotANumberError
from dure.randomness.seeds import seed_generators
from dure.split.busy import Busy
from dure.split.leakage.guard import Guard
from dure.split.parties.messages import (
    ActivationGradients,
    Activations,
    Envelope,
    Message,
    Step,
    party,
)
from dure.split.parties.part import TrainedPart
from dure.split.received import GradientBound
from dure.split.tensor_forms import form_of
from dure.tensors.backward import backward_from

Read = Callable[[Tensor, int], Tensor]
"""read(rows, step): the columns of a party of the people in these rows."""


class Party:
    """Party `number`. holder: of the labels.

    batches: of the rows of people, in the order that all know. seed: from which it draws; a secret
    of its own will do. seconds: how long so many examples take in its head, forward or backward.
    guard: the defence of what leaves the head; None where there is none.
    """

    def __init__(
        self,
        number: int,
        holder: str,
        part: TrainedPart,
        read: Read,
        batches: Batches,
        seed: int,
        seconds: Callable[[int, bool], float],
        guard: Guard | None = None,
    ) -> None:
        self.number = number
        self.name = party(number)
        self.holder = holder
        self.part = part
        self.read = read
        self.batches = batches
        self.seed = seed
        self.seconds = seconds
        self.guard = guard
        self.busy = Busy()
        self.bound: GradientBound | None = None
        """Of gradients that come from another machine; None where nobody else sends them."""
        self.done = 0
        """Steps that it has made."""
        self._sent: Tensor | None = None
        """What it has sent and got no gradients for, with its graph."""

    @property
    def wake(self) -> float:
        return self.busy.wake

    def tick(self, now: float) -> list[Envelope]:
        return self.busy.tick(now)

    def drop(self) -> None:
        """The step that has begun will not be made."""
        self._sent = None

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """What it says to a message.

        Raises ValueError for one that is not due or has not the shape of what was sent, and
        CutNotANumberError; ReceivedError for gradients beyond the bound. What is refused changes
        nothing.
        """
        if sender == self.holder and isinstance(message, Step):
            return self._forward(message, now)
        if sender == self.holder and isinstance(message, ActivationGradients):
            return self._backward(message, now)
        raise ValueError(f"{self.name} is told {type(message).__name__} by {sender}")

    def _forward(self, message: Step, now: float) -> list[Envelope]:
        if message.number != self.done or self._sent is not None:
            raise ValueError(
                f"{self.name} is told to begin step {message.number + 1}, and is in step "
                f"{self.done + 1}"
            )
        rows = self.batches.at(message.number)
        inputs = self.read(rows, message.number)
        # Of its own: no other party knows what it draws.
        seed_generators(self.seed, "party", message.number, self.number)
        with torch.enable_grad():
            self._sent = values = self.part.module(inputs)
        if self.guard is not None:
            self.guard.sent([inputs], [values])
        # In the layout in which they arrive elsewhere.
        said = Activations(message.number, values.detach().contiguous(), values.requires_grad)
        return self.busy.work(self.seconds(len(rows), False), [(self.holder, said)], now)

    def _backward(self, message: ActivationGradients, now: float) -> list[Envelope]:
        sent = self._sent
        if sent is None or message.step != self.done:
            raise ValueError(
                f"{self.name} is sent gradients of step {message.step + 1}, and is in step "
                f"{self.done + 1}"
            )
        gradients = self._gradients(sent, message)
        self._sent = None
        if gradients is not None:
            backward_from([(sent, gradients)])
        # Also where nothing came: schedules go on.
        self.part.update(message.step)
        self.done += 1
        return self.busy.work(self.seconds(len(sent), True), [], now)

    def _gradients(self, sent: Tensor, message: ActivationGradients) -> Tensor | None:
        """With which the head goes backward; None where it does not."""
        gradients = message.values
        if gradients is not None:
            if gradients.shape != sent.shape or gradients.dtype != sent.dtype:
                raise ValueError(
                    f"{self.holder} sends {self.name} gradients of shape {list(gradients.shape)} "
                    f"and {gradients.dtype} for activations of shape {list(sent.shape)} and "
                    f"{sent.dtype}"
                )
            if bool(gradients.isnan().any()):
                when = f"step {message.step + 1}"
                raise CutNotANumberError("gradients", self.holder, when, intact=False)
            if self.bound is not None:
                self.bound.check(self.holder, "gradients", [gradients], [form_of(sent)])
        if self.guard is None or not sent.requires_grad:
            return gradients
        if gradients is None and self.guard.adds:
            gradients = torch.zeros_like(sent)
        returned = self.guard.returned([] if gradients is None else [gradients], 1.0)
        return returned[0] if returned else None
