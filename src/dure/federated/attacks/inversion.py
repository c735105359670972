"""Gradient inversion: inputs whose update would equal the observed update.

    x* = argmin over x in the range of inputs of D(g(x, labels), g seen) + R(x)

g(x) is the update that clients would have sent for x. For a single step, g is the gradient of the
loss. Few local steps of a single client are simulated, and gradients pass through all of them. For
more steps, or a sum over several clients, the update over -lr · steps is taken as a single
gradient. The attacks define D and R: `dlg`, `geiping`. Labels come from the attack on labels
(`labels`).

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

from dure.federated.attacks.observation import AttackedModel, ObservedUpdate
from dure.randomness.seeds import generator

SIMULATED = 10
"""Largest number of local steps to simulate."""

EXACT = 1e-12
"""Relative distance of gradients at which the search stops: the inputs are found."""

Estimate = Callable[[Tensor], Mapping[str, Tensor]]
"""Function from inputs to a client's mean gradient, with an autograd graph."""

IterationCallback = Callable[[int, int], None]
"""Callback after an iteration: iterations done, iterations in total."""


class InputSpace(NamedTuple):
    """Shape, dtype, and smallest and largest number of the inputs."""

    shape: tuple[int, ...]
    low: float
    high: float
    dtype: torch.dtype

    @property
    def span(self) -> float:
        return self.high - self.low

    def drawn(self, examples: int, draws: torch.Generator) -> Tensor:
        """Return starting inputs of shape (examples, *shape), uniform in the range."""
        x = torch.rand(examples, *self.shape, generator=draws, dtype=self.dtype)
        return self.low + self.span * x


@dataclass(frozen=True)
class InversionResult:
    """Result of an inversion.

    Args:
        inputs: rebuilt inputs, of shape (n, ...).
        distance: D between their gradient and the observed gradient; less is closer.
    """

    inputs: Tensor
    distance: float


def space_of(inputs: Tensor) -> InputSpace:
    """Return shape, dtype and range of these inputs, of shape (n, ...).

    Raises ValueError for inputs that are not a floating-point tensor.
    """
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        raise ValueError(
            "inputs are rebuilt along gradients, and those of the task are no floating-point tensor"
        )
    return InputSpace(
        tuple(inputs.shape[1:]), float(inputs.min()), float(inputs.max()), inputs.dtype
    )


def estimate_of(model: AttackedModel, seen: ObservedUpdate, labels: Tensor) -> Estimate:
    """Return a function that computes the mean gradient clients would send for inputs.

    The inputs have these labels, in this order.
    """
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


def _batches(seen: ObservedUpdate, examples: int) -> list[Tensor]:
    """Return the positions of each simulated step's examples.

    Without simulation the result is a single batch of all examples. The order in which a client
    visits its examples is unknown to the attacker; any order will do.
    """
    everything = [torch.arange(examples)]
    if seen.updates > 1 or not 1 < seen.steps <= SIMULATED:
        return everything
    epoch = torch.split(torch.arange(examples), seen.batch_size)
    return [epoch[step % len(epoch)] for step in range(seen.steps)]


def check_second_derivatives(
    model: AttackedModel, seen: ObservedUpdate, inputs: Tensor, labels: Tensor
) -> None:
    """Check that the gradient has a derivative by the inputs; raises ValueError if not."""
    x = inputs.detach().clone().requires_grad_()
    try:
        gradient = model.gradient(seen.state, x, labels, again=True)
        total = torch.stack([one.square().sum() for one in gradient.values()]).sum()
        # `backward`, since `torch.autograd.grad` stops at the inputs: a function without a second
        # derivative raises its error at another leaf.
        total.backward()  # type: ignore[no-untyped-call]
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"the gradient of this model has no derivative by its inputs, so it cannot be inverted "
            f"({reason})"
        ) from error


def restarts(
    seed: int, count: int, once: Callable[[torch.Generator], InversionResult]
) -> InversionResult:
    """Return the closest result of at most `count` random starts; stops after an exact result."""
    best = once(generator(seed, "inversion", 0))
    for attempt in range(1, count):
        if best.distance < EXACT:
            break
        found = once(generator(seed, "inversion", attempt))
        # NaN compares false with every number, and any result is better than NaN.
        if found.distance < best.distance or not math.isfinite(best.distance):
            best = found
    return best
