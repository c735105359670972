"""Choice of the way to clip a model's gradients: the fastest that agrees with a loop in a trial.

No assumption is made about a model. Before the first step, a copy of the model with other weights
(initial weights may hide gradients behind zeros) is tried on the first examples of the data:

    in training mode        an example's output does not depend on the other examples of its batch,
                            with the same random numbers in every call; buffers do not change
    alone and together      an example's output and loss are the same, alone and in a batch
    norms, and sums         of every way agree with those of a loop over examples

A model or a loss that fails one of the first two checks is refused: a bound on an example's own
gradient does not bound its effect on other examples' gradients. A way that fails the third check is
not used.

The last two checks run in training mode without dropout. A model that draws random numbers in
another way is checked in evaluation mode there, and its examples are computed one by one in
training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from dure.contracts.fresh_model import unused_copy
from dure.contracts.learner import Proof
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.machine.devices import device_of_model, to_device
from dure.privacy.per_example.clipping import (
    CannotClipError,
    ClippedSums,
    PerExampleClipping,
    count,
    cut,
)
from dure.privacy.per_example.functional import FunctionalClipping
from dure.privacy.per_example.ghost import GhostClipping
from dure.privacy.per_example.looped import LoopClipping
from dure.privacy.per_example.losses import Each, losses_of
from dure.privacy.per_example.unsupported_layers import check_layers
from dure.randomness.seeds import (
    generators_state,
    restore_generators,
    same_state,
    seed_generators,
)
from dure.tasks.loss_shares import loss_and_count
from dure.tasks.modes import perturbed

TRIED = 3
"""Number of examples: odd, so that it differs from most dimensions of models."""

DRAWS = 4
"""Number of trials with different random numbers."""

SAME = 1e-5
"""Relative tolerance between outputs of batches of the same shape."""

WAYS: tuple[type[PerExampleClipping], ...] = (GhostClipping, FunctionalClipping)
"""Ways from fast to slow; `LoopClipping` is always right."""

ALONE: tuple[type[PerExampleClipping], ...] = (FunctionalClipping,)
"""Ways that compute each example alone, so that no layer can mix it with others."""

_DROPOUT = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d),
    *(F.alpha_dropout, F.feature_alpha_dropout, torch.dropout),
}

_DROPOUT_P = 4
"""Position of dropout_p among the arguments of attention."""

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}
"""Relative tolerance between ways, as sums are computed in other orders."""

_NOTICED = (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError)
"""Errors of a model's or a loss's code that is called in an unsupported way."""


class ClippingChoice(NamedTuple):
    """The chosen way: its class, its factory for a model, and the proof."""

    kind: type[PerExampleClipping]
    make: Callable[[nn.Module], PerExampleClipping]
    each: Each
    proof: Proof

    def made(self, model: nn.Module) -> PerExampleClipping:
        """Return the way for a model of the same architecture as in the trial."""
        return self.make(model)


def choose(task: Task, model: nn.Module, examples: Examples) -> ClippingChoice:
    """Return the fastest way that is right for the model and the task's loss.

    model: unchanged. examples: the training data. Raises ValueError for a model or a loss that
    mixes the examples of a batch, and for a model that `check_layers` refuses.
    """
    check_layers(model)
    started = time.perf_counter()
    before = generators_state()
    try:
        device = device_of_model(model)
        loss = task.on(device).loss
        twin = perturbed(unused_copy(model, task, 0).to(device), "dp-sgd proof")
        batch = examples.batch(torch.arange(min(TRIED, len(examples))))
        inputs, targets = to_device(batch, device)
        _check_others(twin, inputs)
        with _still(twin, inputs) as draws:
            _check_apart(twin, loss, inputs, targets)
            each = _losses(loss, twin, inputs, targets)
            way = _fastest(twin, each, inputs, targets, ALONE if draws else WAYS)
    finally:
        restore_generators(before)
    what = (
        f"the gradients of {count(targets)} examples by {way.name} equal those of each example "
        "alone"
    )
    return ClippingChoice(
        type(way), _making(way, each), each, Proof(what, time.perf_counter() - started)
    )


def _making(way: PerExampleClipping, each: Each) -> Callable[[nn.Module], PerExampleClipping]:
    """Return the factory of the way for another model, with the results of the trial."""
    if isinstance(way, GhostClipping):
        return partial(GhostClipping, each=each, shared=frozenset(way.shared))
    return partial(type(way), each=each)  # type: ignore[call-arg]


@torch.no_grad()
def _check_others(model: nn.Module, inputs: Any) -> None:
    """Raise ValueError if an example's output in training depends on its batch.

    The model is in training mode, and draws the same numbers in every call; only the other examples
    change. A model that draws is tried with several draws, since it may mix examples in some steps
    only.
    """
    model.train()
    drawn = generators_state()
    for attempt in range(DRAWS):
        seed_generators(attempt, "dp-sgd proof", everything=True)
        start = generators_state()
        together = _called(model, inputs, start)
        draws = not same_state(start, generators_state())
        for at in range(count(inputs)):
            alike = _called(model, _repeated(inputs, at), start)
            if not _alike(cut(together, at, at + 1), cut(alike, at, at + 1), SAME):
                raise _mixes()
        # State that a model carries from batch to batch also mixes examples.
        if not _alike(together, _called(model, inputs, start), SAME):
            raise ValueError(
                "dp-sgd: the model returns different outputs for the same batch and the same "
                "random numbers: it stores state from earlier batches, or has its own random "
                "generator"
            )
        if not draws:
            break
    restore_generators(drawn)


def _repeated(inputs: Any, at: int) -> Any:
    """Return a batch that repeats an example, of the same size."""

    def repeated(leaf: Any) -> Any:
        one = isinstance(leaf, Tensor)
        return leaf[at : at + 1].expand_as(leaf).clone() if one else leaf

    return tree_map(repeated, inputs)


def _called(model: nn.Module, inputs: Any, start: Any) -> Any:
    """Return the outputs, with the generators at `start`. Raises ValueError if buffers change."""
    restore_generators(start)
    kept = [buffer.clone() for buffer in model.buffers()]
    outputs = model(inputs)
    for (name, now), before in zip(model.named_buffers(), kept, strict=True):
        if not torch.equal(now, before):
            raise ValueError(
                f"dp-sgd: a forward pass changes the model's buffer {name}, to which no noise is "
                "added: use a layer that stores nothing of the data"
            )
    return outputs


def _mixes() -> ValueError:
    return ValueError(
        "dp-sgd: the model's output for an example depends on the other examples of its batch: "
        "examples have to be the first dimension, and no layer may mix them"
    )


@contextmanager
def _still(model: nn.Module, inputs: Any) -> Iterator[bool]:
    """Context manager: turns off random numbers in the model, as far as possible.

    Yields whether the model draws random numbers in training other than by dropout; the model is
    then in evaluation mode.
    """
    model.train()
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.eval()
    with _WithoutDropout():
        draws = _draws(model, inputs)
        if draws:
            model.eval()
        yield draws


class _WithoutDropout(TorchFunctionMode):
    """Context manager: dropout functions return their input, and attention drops nothing."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function in _DROPOUT:
            return args[0] if args else kwargs["input"]
        if function is F.scaled_dot_product_attention:
            if len(args) > _DROPOUT_P:
                args = (*args[:_DROPOUT_P], 0.0, *args[_DROPOUT_P + 1 :])
            kwargs = {name: 0.0 if name == "dropout_p" else one for name, one in kwargs.items()}
        return function(*args, **kwargs)


@torch.no_grad()
def _draws(model: nn.Module, inputs: Any) -> bool:
    before = generators_state()
    model(inputs)
    return not same_state(before, generators_state())


@torch.no_grad()
def _check_apart(model: nn.Module, loss: Any, inputs: Any, targets: Any) -> None:
    """Raise ValueError if examples of a batch depend on each other."""
    together = _called(model, inputs, generators_state())
    examples = count(targets)
    alone = [model(cut(inputs, at, at + 1)) for at in range(examples)]
    for at, one in enumerate(alone):
        if not _alike(cut(together, at, at + 1), one):
            raise _mixes()
    each = [loss_and_count(loss, one, cut(targets, at, at + 1), 1) for at, one in enumerate(alone)]
    total, counted = loss_and_count(loss, together, targets, examples)
    if counted and not _near(total / counted, sum(a for a, _ in each) / sum(b for _, b in each)):
        raise ValueError(
            "dp-sgd: the loss of a batch is not the mean of its examples' losses, so it mixes "
            "examples: use a mean"
        )


def _losses(loss: Any, model: nn.Module, inputs: Any, targets: Any) -> Each:
    """Return the fastest way to compute per-example losses that agrees with the last."""
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


def _fastest(
    model: nn.Module,
    each: Each,
    inputs: Any,
    targets: Any,
    kinds: Sequence[type[PerExampleClipping]],
) -> PerExampleClipping:
    right = LoopClipping(model, each).clipped(inputs, targets, math.inf)
    for kind in kinds:
        try:
            way = kind(model, each)  # type: ignore[call-arg]
            found = way.clipped(inputs, targets, math.inf)
        except (CannotClipError, *_NOTICED):
            continue
        if _holds(found, right):
            return way
    return LoopClipping(model, each)


def _holds(found: ClippedSums, right: ClippedSums) -> bool:
    largest = max(float(total.abs().max()) for total in right.sums if total.numel())
    pairs = [(found.norms, right.norms), *zip(found.sums, right.sums, strict=True)]
    return all(
        one.shape == other.shape
        and float((one - other).abs().max()) <= _allowed(right) * max(largest, _largest(other))
        for one, other in pairs
        if one.numel()
    )


def _allowed(right: ClippedSums) -> float:
    return TOLERANCE[right.sums[0].dtype]


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max())


def _alike(one: Any, other: Any, share: float = 1e-3) -> bool:
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(
        a.shape == b.shape
        and torch.allclose(a, b, rtol=share, atol=share / 10 * (1 + float(b.abs().max())))
        for a, b in pairs
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.is_floating_point() and a.numel()
    )


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-3 * max(abs(one), abs(other)) + 1e-6
