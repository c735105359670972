"""The holder of the labels: the tail of the model, and which step it is.

    begin         ->  Step to every party
    Activations   ->  from all: joined in the order of parties, forward, loss, backward, one step of
                      the tail's optimizer, ActivationGradients to each

It is the server, or a party that has features too (`LabelParty`).

No I/O: messages in, messages out, `now` is an argument. It shares nothing with the parties but
messages, and knows of each its name and what leaves its head.
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
from dure.split.busy import Busy
from dure.split.parties.guarded import GuardedGradients
from dure.split.parties.messages import (
    ActivationGradients,
    Activations,
    Envelope,
    Leaving,
    Message,
    Step,
)
from dure.split.parties.model import joined
from dure.split.parties.part import TrainedPart
from dure.split.parties.party import Party
from dure.tasks.loss_shares import CountedLoss


class Holder:
    """Of the labels of all people.

    parties: what leaves the head of each, by its name, in the order in which activations are
    joined. targets: of these rows, at a step. seed: from which the tail draws. seconds: how long so
    many examples take in the tail, forward or backward. guarded: the defence of the gradients that
    leave; None where there is none.
    """

    def __init__(
        self,
        name: str,
        parties: Mapping[str, Leaving],
        part: TrainedPart,
        join: str,
        targets: Callable[[Tensor, int], Any],
        batches: Batches,
        losses: CountedLoss,
        seed: int,
        seconds: Callable[[int, bool], float],
        busy: Busy,
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
        """Steps that it has made."""
        self.loss: tuple[float, float] = (0.0, 0.0)
        """(mean, what it counts) of the newest step."""
        self._came: dict[str, Activations] = {}

    @property
    def wake(self) -> float:
        return self.busy.wake

    def tick(self, now: float) -> list[Envelope]:
        return self.busy.tick(now)

    @property
    def awaited(self) -> list[str]:
        """Whose activations have not come yet."""
        return [name for name in self.parties if name not in self._came]

    def drop(self) -> None:
        """The step that has begun will not be made."""
        self._came = {}

    def begin(self, now: float) -> list[Envelope]:
        """The next step begins."""
        return [(name, Step(self.done)) for name in self.parties]

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """What it says to a message.

        Raises ValueError for one that is not due or has not the shape that was agreed upon,
        CutNotANumberError and LossNotFiniteError. What is refused before it is joined changes
        nothing.
        """
        if sender not in self.parties or not isinstance(message, Activations):
            raise ValueError(f"{self.name} is told {type(message).__name__} by {sender}")
        examples = len(self.batches.at(self.done))
        if message.step != self.done or sender in self._came:
            raise ValueError(
                f"{sender} sends activations of step {message.step + 1}, and {self.name} is in "
                f"step {self.done + 1}"
            )
        self._check(sender, message, examples)
        self._came[sender] = message
        return self._train(examples, now) if len(self._came) == len(self.parties) else []

    def _check(self, sender: str, message: Activations, examples: int) -> None:
        """Raises the errors of `receive` for activations that cannot be joined."""
        values = message.values
        shape, dtype = self.leaving[sender]
        # Also the dtype: joined with others, another one would be converted without a word.
        if tuple(values.shape) != (examples, *shape) or values.dtype != dtype:
            raise ValueError(
                f"{sender} sends activations of shape {list(values.shape)} and {values.dtype}, and "
                f"a batch of {examples} examples has {[examples, *shape]} and {dtype} there"
            )
        if bool(values.isnan().any()):
            raise CutNotANumberError("activations", sender, f"step {message.step + 1}")

    def _train(self, examples: int, now: float) -> list[Envelope]:
        # In the order of parties, whoever came first: the sum has the same bits.
        came = [self._came[name] for name in self.parties]
        self._came = {}
        step = self.done
        values = [one.values.detach().requires_grad_(one.trains) for one in came]
        targets = self.targets(self.batches.at(step), step)
        seed_generators(self.seed, "party", step, len(self.parties))
        with torch.enable_grad():
            inputs = joined(values, self.join)
            # The tail may compute in place, which a tensor that gets gradients cannot bear.
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
        return self.busy.work(seconds, said, now)

    def _are_bounded(self, gradients: Mapping[str, Tensor | None]) -> bool:
        """Whether no gradient of the tail, or of activations, is absurd."""
        own = [one.grad for one in self.part.module.parameters()]
        return largest([*own, *gradients.values()]) <= GRADIENT

    def _blamed(self, came: Sequence[Activations]) -> str:
        """Whose activations, infinite or absurd, have made the loss what it is; the holder where
        nobody's have."""
        bad = [
            name
            for name, one in zip(self.parties, came, strict=True)
            if not largest([one.values]) <= GRADIENT
        ]
        return " and ".join(bad) or self.name


class LabelParty:
    """A party that has the labels as well: what the two say to each other, no message carries.

    They compute on one machine, so they share their `Busy`.
    """

    def __init__(self, party: Party, holder: Holder) -> None:
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
        """The next step begins."""
        return self._within(self.holder.begin(now), now)

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """What it says to a message of another party."""
        return self._within(self.holder.receive(sender, message, now), now)

    def _within(self, said: list[Envelope], now: float) -> list[Envelope]:
        """Hands on what the two say to each other; what they say to others."""
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
