"""A party of vertical split learning: trains a head on its columns, and has no labels.

    Step                  ->  the head's activations of the batch
    ActivationGradients   ->  backward, one step of the head's optimizer

The party does no I/O: messages in, messages out, and `now` is an argument. The party shares nothing
but messages with the others, and knows the holder's name alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dure.data.batches import Batches
from dure.errors import CutNotANumberError
from dure.randomness.seeds import seed_generators
from dure.split.compute_queue import ComputeQueue
from dure.split.gradient_bound import GradientBound
from dure.split.leakage.guard import Guard
from dure.split.parties.messages import (
    ActivationGradients,
    Activations,
    BeginStep,
    Envelope,
    Message,
    party,
)
from dure.split.parties.part import TrainedPart
from dure.split.tensor_forms import form_of
from dure.tensors.backward import backward_from

Read = Callable[[Tensor, int], Tensor]
"""read(rows, step): the columns of a party for the people in these rows."""


class Party:
    """State machine of party `number`.

    Args:
        number: number of the party, counted from 0.
        holder: name of the holder of the labels.
        part: the head and its optimizer.
        read: reads the party's columns.
        batches: rows of each step, in the order that all parties share.
        seed: seed of the random numbers of the head; may be secret.
        seconds: `seconds(examples, backward)` returns the duration of a pass through the head.
        guard: defence of the outgoing activations; None without a defence.
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
        self.busy = ComputeQueue()
        self.bound: GradientBound | None = None
        """Limit on gradients from another machine; None for gradients of the same process."""
        self.done = 0
        """Number of finished steps."""
        self._sent: Tensor | None = None
        """Activations, with their graph, whose gradients are pending; None if there are none."""

    @property
    def wake(self) -> float:
        return self.busy.wake

    def tick(self, now: float) -> list[Envelope]:
        return self.busy.tick(now)

    def drop(self) -> None:
        """Abort the current step and discard its activations."""
        self._sent = None

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """Process a message and return the replies. A refused message changes nothing.

        Raises:
            ValueError: the message is not due, or its shape or dtype is not that of the
                activations.
            CutNotANumberError: the gradients contain NaN.
            ReceivedError: the gradients exceed the bound.
        """
        if sender == self.holder and isinstance(message, BeginStep):
            return self._forward(message, now)
        if sender == self.holder and isinstance(message, ActivationGradients):
            return self._backward(message, now)
        raise ValueError(f"{self.name} cannot process {type(message).__name__} from {sender}")

    def _forward(self, message: BeginStep, now: float) -> list[Envelope]:
        if message.number != self.done or self._sent is not None:
            raise ValueError(
                f"{self.name} should start step {message.number + 1}, but is in step "
                f"{self.done + 1}"
            )
        rows = self.batches.at(message.number)
        inputs = self.read(rows, message.number)
        # The seed is the party's own, so no other party knows its random numbers.
        seed_generators(self.seed, "party", message.number, self.number)
        with torch.enable_grad():
            self._sent = values = self.part.module(inputs)
        if self.guard is not None:
            self.guard.sent([inputs], [values])
        # Contiguous, as the values arrive after transport: the same layout gives the same bits.
        said = Activations(message.number, values.detach().contiguous(), values.requires_grad)
        seconds = self.seconds(len(rows), False)
        return self.busy.work(seconds, [(self.holder, said)], now, "head")

    def _backward(self, message: ActivationGradients, now: float) -> list[Envelope]:
        sent = self._sent
        if sent is None or message.step != self.done:
            raise ValueError(
                f"{self.name} received gradients of step {message.step + 1}, but is in step "
                f"{self.done + 1}"
            )
        gradients = self._gradients(sent, message)
        self._sent = None
        if gradients is not None:
            backward_from([(sent, gradients)])
        # Also without gradients, so that the learning-rate schedule advances.
        self.part.update(message.step)
        self.done += 1
        return self.busy.work(self.seconds(len(sent), True), [], now, "head")

    def _gradients(self, sent: Tensor, message: ActivationGradients) -> Tensor | None:
        """Return the gradients for the head's backward pass; None without a backward pass."""
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
