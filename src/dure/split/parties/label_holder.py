"""Holder of the labels: trains the tail of the model and counts the steps.

    begin         ->  Step to every party
    Activations   ->  from all: joined in the order of parties, forward, loss, backward, one step of
                      the tail's optimizer, ActivationGradients to each

The holder is the server, or a party that has features too (`LabelParty`).

The holder does no I/O: messages in, messages out, and `now` is an argument. Parties and holder
share nothing but messages. The holder knows the name of each party and the form of its activations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dure.data.batches import Batches
from dure.errors import CutNotANumberError, LossNotFiniteError
from dure.randomness.seeds import seed_generators
from dure.split.blame import GRADIENT, largest
from dure.split.compute_queue import ComputeQueue
from dure.split.parties.guarded import GuardedGradients
from dure.split.parties.messages import (
    ActivationForm,
    ActivationGradients,
    Activations,
    BeginStep,
    Envelope,
    Message,
)
from dure.split.parties.model import joined
from dure.split.parties.part import TrainedPart
from dure.split.parties.party import Party
from dure.tasks.loss_shares import CountedLoss


class LabelHolder:
    """State machine of the holder of the labels.

    Args:
        name: name of the holder.
        parties: form of the activations of each party, by name, in the order of the join.
        part: the tail and its optimizer.
        join: "concat" or "sum".
        targets: `targets(rows, step)` returns the targets of these rows.
        batches: rows of each step.
        losses: the loss of the task.
        seed: seed of the random numbers of the tail.
        seconds: `seconds(examples, backward)` returns the duration of a pass through the tail.
        busy: the compute time of the holder's machine.
        guarded: defence of the outgoing gradients; None without a defence.
    """

    def __init__(
        self,
        name: str,
        parties: Mapping[str, ActivationForm],
        part: TrainedPart,
        join: str,
        targets: Callable[[Tensor, int], Any],
        batches: Batches,
        losses: CountedLoss,
        seed: int,
        seconds: Callable[[int, bool], float],
        busy: ComputeQueue,
        guarded: GuardedGradients | None = None,
    ) -> None:
        self.name = name
        self.parties = list(parties)
        self.leaving = dict(parties)
        self.part = part
        self.join = join
        self.targets = targets
        self.batches = batches
        self.losses = losses
        self.seed = seed
        self.seconds = seconds
        self.busy = busy
        self.guarded = guarded
        self.done = 0
        """Number of finished steps."""
        self.loss: tuple[float, float] = (0.0, 0.0)
        """(mean loss, count) of the newest step; no example counts if the count is 0."""
        self._came: dict[str, Activations] = {}

    @property
    def wake(self) -> float:
        return self.busy.wake

    def tick(self, now: float) -> list[Envelope]:
        return self.busy.tick(now)

    @property
    def awaited(self) -> list[str]:
        """Names of the parties whose activations have not arrived yet."""
        return [name for name in self.parties if name not in self._came]

    def drop(self) -> None:
        """Abort the current step and discard its activations."""
        self._came = {}

    def begin(self, now: float) -> list[Envelope]:
        """Return the messages that begin the next step."""
        return [(name, BeginStep(self.done)) for name in self.parties]

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """Process a message and return the replies.

        A message that is refused before the join changes nothing.

        Raises:
            ValueError: the message is not due, or its shape or dtype is not the agreed one.
            CutNotANumberError: activations or gradients contain NaN.
            LossNotFiniteError: the loss is not finite, or activations make gradients too large.
        """
        if sender not in self.parties or not isinstance(message, Activations):
            raise ValueError(f"{self.name} cannot process {type(message).__name__} from {sender}")
        examples = len(self.batches.at(self.done))
        if message.step != self.done or sender in self._came:
            raise ValueError(
                f"{sender} sends activations of step {message.step + 1}, but {self.name} is in "
                f"step {self.done + 1}"
            )
        self._check(sender, message, examples)
        self._came[sender] = message
        return self._train(examples, now) if len(self._came) == len(self.parties) else []

    def _check(self, sender: str, message: Activations, examples: int) -> None:
        """Raise the errors of `receive` for activations that cannot be joined."""
        values = message.values
        shape, dtype = self.leaving[sender]
        # torch.cat and add would convert another dtype silently, so the dtype is checked too.
        if tuple(values.shape) != (examples, *shape) or values.dtype != dtype:
            raise ValueError(
                f"{sender} sends activations of shape {list(values.shape)} and {values.dtype}, "
                f"but a batch of {examples} examples needs {[examples, *shape]} and {dtype}"
            )
        if bool(values.isnan().any()):
            raise CutNotANumberError("activations", sender, f"step {message.step + 1}")

    def _train(self, examples: int, now: float) -> list[Envelope]:
        # Joined in the order of parties, not of arrival, so that the sum has the same bits.
        came = [self._came[name] for name in self.parties]
        self._came = {}
        step = self.done
        values = [one.values.detach().requires_grad_(one.trains) for one in came]
        targets = self.targets(self.batches.at(step), step)
        seed_generators(self.seed, "party", step, len(self.parties))
        with torch.enable_grad():
            inputs = joined(values, self.join)
            # The tail may compute in place, which autograd forbids for a leaf with gradients.
            inputs = inputs.clone() if inputs is values[0] else inputs
            outputs = self.part.module(inputs)
            found = self.losses.mean(outputs, targets, examples)
        loss = float(found.loss.item())
        if not math.isfinite(loss):
            raise LossNotFiniteError(loss, self._blamed(came), f"step {step + 1}")
        found.loss.backward()  # type: ignore[no-untyped-call]
        gradients = {name: one.grad for name, one in zip(self.parties, values, strict=True)}
        blamed = self._blamed(came)
        if blamed != self.name and not self._are_bounded(gradients):
            self.part.optimizer.zero_grad(set_to_none=True)
            raise LossNotFiniteError(math.nan, blamed, f"step {step + 1}")
        if any(one is not None and bool(one.isnan().any()) for one in gradients.values()):
            self.part.optimizer.zero_grad(set_to_none=True)
            raise CutNotANumberError("gradients", self.name, f"step {step + 1}")
        if self.guarded is not None:
            gradients = self.guarded.gradients(gradients, targets, step)
        self.loss = loss, found.counted
        self.part.update(step)
        self.done += 1
        said: list[Envelope] = [
            (name, ActivationGradients(step, gradient)) for name, gradient in gradients.items()
        ]
        seconds = self.seconds(examples, False) + self.seconds(examples, True)
        return self.busy.work(seconds, said, now, "tail")

    def _are_bounded(self, gradients: Mapping[str, Tensor | None]) -> bool:
        """Return whether no gradient of the tail or of the activations exceeds `GRADIENT`."""
        own = [one.grad for one in self.part.module.parameters()]
        return largest([*own, *gradients.values()]) <= GRADIENT

    def _blamed(self, came: Sequence[Activations]) -> str:
        """Return the parties whose activations exceed `GRADIENT`; else the holder's name."""
        bad = [
            name
            for name, one in zip(self.parties, came, strict=True)
            if not largest([one.values]) <= GRADIENT
        ]
        return " and ".join(bad) or self.name


class LabelParty:
    """A party that also has the labels: pairs a `Party` with the `LabelHolder` on the same machine.

    Messages between the two are delivered locally. The two share one `ComputeQueue`, as one machine
    computes both.
    """

    def __init__(self, party: Party, holder: LabelHolder) -> None:
        assert party.name == holder.name
        assert party.busy is holder.busy
        self.name = party.name
        self.party = party
        self.holder = holder

    @property
    def wake(self) -> float:
        return self.holder.busy.wake

    def tick(self, now: float) -> list[Envelope]:
        return self._within(self.holder.tick(now), now)

    def begin(self, now: float) -> list[Envelope]:
        """Return the messages that begin the next step."""
        return self._within(self.holder.begin(now), now)

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """Process a message of another party and return the replies."""
        return self._within(self.holder.receive(sender, message, now), now)

    def _within(self, said: list[Envelope], now: float) -> list[Envelope]:
        """Deliver local messages between party and holder; return the messages to other parties."""
        others: list[Envelope] = []
        while said:
            name, message = said.pop(0)
            if name != self.name:
                others.append((name, message))
            elif isinstance(message, Activations):
                said += self.holder.receive(name, message, now)
            else:
                said += self.party.receive(name, message, now)
        return others
