"""Which way clips a model's gradients: the fastest that gives, on a few examples, what a loop does.

Nothing is believed of a model. Before the first step, a copy of it with other weights (those that
a model begins with may hide gradients behind zeros) is tried on the first examples of the data:

    alone and together      an example's output and loss are the same, alone and in a batch; buffers
                            stay as they are
    norms, and sums         of every way are those of one example after another

A model or a loss that fails the first is refused: no bound on an example's gradient bounds what the
example does to others'. A way that fails the second is not taken.

It is tried in training mode without dropout; a model that draws by itself, in evaluation mode.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves

from dure.contracts.strategy import Proof, another
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.machine.devices import home_of, to_device
from dure.privacy.per_example.functional import Functional
from dure.privacy.per_example.ghost import Ghost
from dure.privacy.per_example.looped import Looped
from dure.privacy.per_example.losses import Each, losses_of
from dure.privacy.per_example.refused import check_layers
from dure.privacy.per_example.way import CannotClipError, Clipped, Way, count, cut
from dure.randomness.seeds import generator, generators_state, restore_generators
from dure.tasks.loss_shares import loss_and_count

TRIED = 3
"""Examples. An odd number, which few models have as a dimension of their own."""

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}
"""By which ways may differ, as a share: sums are taken in other orders."""

MOVED = 0.02
"""How far the weights of the copy are moved, in deviations of a normal number."""

_NOTICED = (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError)
"""What the code of a model or a loss raises where it is called in a way that it does not know."""


class Choice(NamedTuple):
    """The way that was chosen, as what makes it for a model, and what was tried."""

    kind: type[Way]
    make: Callable[[nn.Module], Way]
    each: Each
    proof: Proof

    def made(self, model: nn.Module) -> Way:
        """The way for a model like the one that was tried."""
        return self.make(model)


def choose(task: Task, model: nn.Module, examples: Examples) -> Choice:
    """The fastest way that is right for the model and the task's loss.

    model: stays as it is. examples: the training data, in the model's dtype. Raises ValueError for
    a model or a loss that mixes the examples of a batch, and for what `check_layers` refuses.
    """
    check_layers(model)
    started = time.perf_counter()
    before = generators_state()
    try:
        device = home_of(model)
        loss = task.on(device).loss
        twin = _moved(another(model, task, 0).to(device))
        batch = examples.batch(torch.arange(min(TRIED, len(examples))))
        inputs, targets = to_device(batch, device)
        with _still(twin, inputs):
            _check_apart(twin, loss, inputs, targets)
            each = _losses(loss, twin, inputs, targets)
            way = _fastest(twin, each, inputs, targets)
    finally:
        restore_generators(before)
    what = f"{count(targets)} examples' gradients by {way.name} are those of each alone"
    return Choice(type(way), _making(way, each), each, Proof(what, time.perf_counter() - started))


def _making(way: Way, each: Each) -> Callable[[nn.Module], Way]:
    """What makes the way for another model, with what was found out here."""
    if isinstance(way, Ghost):
        return partial(Ghost, each=each, shared=frozenset(way.shared))
    return partial(type(way), each=each)  # type: ignore[call-arg]


@torch.no_grad()
def _moved(model: nn.Module) -> nn.Module:
    """The model with other weights, which are the same on every rank."""
    draws = generator(0, "dp-sgd proof")
    for parameter in model.parameters():
        if parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=draws, dtype=parameter.dtype)
            parameter.add_(noise.to(parameter.device), alpha=MOVED)
    return model


@contextmanager
def _still(model: nn.Module, inputs: Any) -> Iterator[None]:
    """Inside, the model draws no random numbers, as far as that can be had."""
    model.train()
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.eval()
    if _draws(model, inputs):
        model.eval()
    yield


@torch.no_grad()
def _draws(model: nn.Module, inputs: Any) -> bool:
    before = torch.get_rng_state()
    model(inputs)
    return not torch.equal(before, torch.get_rng_state())


@torch.no_grad()
def _check_apart(model: nn.Module, loss: Any, inputs: Any, targets: Any) -> None:
    """Raises ValueError where examples of a batch know of each other."""
    kept = [buffer.clone() for buffer in model.buffers()]
    together = model(inputs)
    changed = next(
        (
            name
            for (name, now), before in zip(model.named_buffers(), kept, strict=True)
            if not torch.equal(now, before)
        ),
        None,
    )
    if changed is not None:
        raise ValueError(
            f"dp-sgd: a forward pass changes the model's buffer {changed}, to which no noise is "
            f"added: take a layer that keeps nothing of the data"
        )
    examples = count(targets)
    alone = [model(cut(inputs, at, at + 1)) for at in range(examples)]
    for at, one in enumerate(alone):
        if not _alike(cut(together, at, at + 1), one):
            raise ValueError(
                "dp-sgd: what the model gives for an example depends on the other examples of its "
                "batch: examples have to be the first dimension, and no layer may mix them"
            )
    each = [loss_and_count(loss, one, cut(targets, at, at + 1), 1) for at, one in enumerate(alone)]
    total, counted = loss_and_count(loss, together, targets, examples)
    if counted and not _near(total / counted, sum(a for a, _ in each) / sum(b for _, b in each)):
        raise ValueError(
            "dp-sgd: the loss of a batch is not the mean of its examples' losses, so that it mixes "
            "them: take one that is"
        )


def _losses(loss: Any, model: nn.Module, inputs: Any, targets: Any) -> Each:
    """The fastest way to the losses of single examples that gives what the last one gives."""
    ways = losses_of(loss)
    with torch.no_grad():
        outputs = model(inputs)
    *faster, last = ways
    right = last(outputs, targets)
    for each in faster:
        try:
            if torch.allclose(each(outputs, targets), right, rtol=1e-4, atol=1e-7):
                return each
        except (CannotClipError, *_NOTICED):
            continue
    return last


def _fastest(model: nn.Module, each: Each, inputs: Any, targets: Any) -> Way:
    right = Looped(model, each).clipped(inputs, targets, math.inf)
    kinds: tuple[type[Way], ...] = (Ghost, Functional)
    for kind in kinds:
        try:
            way = kind(model, each)  # type: ignore[call-arg]
            found = way.clipped(inputs, targets, math.inf)
        except (CannotClipError, *_NOTICED):
            continue
        if _holds(found, right):
            return way
    return Looped(model, each)


def _holds(found: Clipped, right: Clipped) -> bool:
    largest = max(float(total.abs().max()) for total in right.sums if total.numel())
    pairs = [(found.norms, right.norms), *zip(found.sums, right.sums, strict=True)]
    return all(
        one.shape == other.shape
        and float((one - other).abs().max()) <= _allowed(right) * max(largest, _largest(other))
        for one, other in pairs
        if one.numel()
    )


def _allowed(right: Clipped) -> float:
    return TOLERANCE[right.sums[0].dtype]


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max())


def _alike(one: Any, other: Any) -> bool:
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(
        a.shape == b.shape
        and torch.allclose(a, b, rtol=1e-3, atol=1e-4 * (1 + float(b.abs().max())))
        for a, b in pairs
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.is_floating_point() and a.numel()
    )


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-3 * max(abs(one), abs(other)) + 1e-6
