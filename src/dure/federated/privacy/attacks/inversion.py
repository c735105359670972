"""Gradient inversion: inputs whose update would be the one that was seen.

    x* = argmin over x in the range of inputs of D(g(x, labels), g seen) + R(x)

g(x) is what clients would have sent of x. Of one step it is the gradient of the loss. Of few local
steps they are simulated, and gradients go through all of them. Of more, or of a sum of several
steps of several clients, the update over -lr · steps is taken for one gradient. D and R are the
attacks': `dlg`, `geiping`. Labels are those of the attack on them (`labels`).

Cost: iterations · 3 times a forward and backward pass over all examples and steps.

Sources: L. Zhu, Z. Liu, S. Han, "Deep Leakage from Gradients", NeurIPS 2019; J. Geiping et al.,
"Inverting Gradients: How easy is it to break privacy in federated learning?", NeurIPS 2020.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dure.federated.privacy.attacks.seen import Model, Seen
from dure.randomness.seeds import generator

SIMULATED = 10
"""Local steps that are simulated, at the most."""

EXACT = 1e-12
"""A relative distance of gradients at which nothing is left to be found."""

Estimate = Callable[[Tensor], Mapping[str, Tensor]]
"""The mean gradient of the steps that a client would have sent of these inputs, with its graph."""

Look = Callable[[int, int], None]
"""Told after an iteration: how many are done, of how many."""


class Space(NamedTuple):
    """What inputs are like: their shape, and the smallest and the largest number in them."""

    shape: tuple[int, ...]
    low: float
    high: float
    dtype: torch.dtype

    @property
    def span(self) -> float:
        return self.high - self.low

    def drawn(self, examples: int, draws: torch.Generator) -> Tensor:
        """Inputs to begin with, uniform in the range."""
        x = torch.rand(examples, *self.shape, generator=draws, dtype=self.dtype)
        return self.low + self.span * x


@dataclass(frozen=True)
class Inverted:
    """What an inversion found. distance: D of it, less is closer."""

    inputs: Tensor
    distance: float


def space_of(inputs: Tensor) -> Space:
    """What these inputs are like.

    Raises ValueError for inputs that are no numbers that can be moved along a gradient.
    """
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        raise ValueError(
            "inputs are rebuilt along gradients, and those of the task are no floating-point tensor"
        )
    return Space(tuple(inputs.shape[1:]), float(inputs.min()), float(inputs.max()), inputs.dtype)


def estimate_of(model: Model, seen: Seen, labels: Tensor) -> Estimate:
    """What clients would have sent of inputs with these labels."""
    batches = _batches(seen, len(labels))
    lr, decay = seen.rate

    def one(inputs: Tensor) -> Mapping[str, Tensor]:
        return model.gradient(seen.state, inputs, labels, again=True)

    def several(inputs: Tensor) -> Mapping[str, Tensor]:
        state = dict(seen.state)
        for batch in batches:
            moved = model.gradient(state, inputs[batch], labels[batch], again=True)
            state |= {
                name: state[name] - lr * (g + decay * state[name]) for name, g in moved.items()
            }
        scale = -1 / (lr * len(batches))
        return {
            name: (state[name] - seen.state[name]) * scale - decay * seen.state[name]
            for name in seen.delta
        }

    return several if len(batches) > 1 else one


def _batches(seen: Seen, examples: int) -> list[Tensor]:
    """The examples of each simulated step; one of all where steps are not simulated.

    In which order a client visits its examples is its own affair: any order will do.
    """
    everything = [torch.arange(examples)]
    if seen.updates > 1 or not 1 < seen.steps <= SIMULATED:
        return everything
    epoch = torch.split(torch.arange(examples), seen.batch_size)
    return [epoch[step % len(epoch)] for step in range(seen.steps)]


def check_second_derivatives(model: Model, seen: Seen, inputs: Tensor, labels: Tensor) -> None:
    """Raises ValueError where a gradient cannot be moved by moving inputs."""
    x = inputs.detach().clone().requires_grad_()
    try:
        gradient = model.gradient(seen.state, x, labels, again=True)
        total = torch.stack([one.square().sum() for one in gradient.values()]).sum()
        # Not `grad`, which goes only where inputs are: a function that says that it has one
        # derivative alone says so at a leaf of its own.
        total.backward()  # type: ignore[no-untyped-call]
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"the gradient of this model has no derivative by its inputs, so it cannot be inverted "
            f"({reason})"
        ) from error


def restarts(seed: int, count: int, once: Callable[[torch.Generator], Inverted]) -> Inverted:
    """The closest of several attempts, each from another beginning; none after an exact one."""
    best = once(generator(seed, "inversion", 0))
    for attempt in range(1, count):
        if best.distance < EXACT:
            break
        found = once(generator(seed, "inversion", attempt))
        # NaN is not below anything, and anything is better than NaN.
        if found.distance < best.distance or not math.isfinite(best.distance):
            best = found
    return best
