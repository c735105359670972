"""Which way clips a model's gradients: the fastest that gives, on a few examples, what a loop does.

Nothing is believed of a model. Before the first step, a copy of it with other weights (those that
a model begins with may hide gradients behind zeros) is tried on the first examples of the data:

    in training mode        an example's output does not depend on which others are in its batch,
                            with the same random numbers in every call; buffers stay as they are
    alone and together      an example's output and loss are the same, alone and in a batch
    norms, and sums         of every way are those of one example after another

A model or a loss that fails one of the first two is refused: no bound on an example's gradient
bounds what the example does to others'. A way that fails the third is not taken.

The last two are tried in training mode without dropout. A model that draws random numbers in
another way is tried in evaluation mode there, and its examples are computed one by one in training.
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
from dure.randomness.seeds import (
    generators_state,
    restore_generators,
    same_state,
    seed_generators,
)
from dure.tasks.loss_shares import loss_and_count
from dure.tasks.perturbed import perturbed

TRIED = 3
"""Examples. An odd number, which few models have as a dimension of their own."""

DRAWS = 4
"""How often a model is tried with random numbers of its own."""

SAME = 1e-5
"""By which outputs may differ between batches of one shape, as a share."""

WAYS: tuple[type[Way], ...] = (Ghost, Functional)
"""From fast to slow; `Looped` is always right."""

ALONE: tuple[type[Way], ...] = (Functional,)
"""Of those, the ways that compute an example alone, so that nothing can mix it with others."""

_DROPOUT = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d),
    *(F.alpha_dropout, F.feature_alpha_dropout, torch.dropout),
}

_DROPOUT_P = 4
"""The place of dropout_p among the arguments of attention."""

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}
"""By which ways may differ, as a share: sums are taken in other orders."""

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
    """Return the fastest way that is right for the model and the task's loss.

    model: stays as it is. examples: the training data. Raises ValueError for a model or a loss that
    mixes the examples of a batch, and for what `check_layers` refuses.
    """
    check_layers(model)
    started = time.perf_counter()
    before = generators_state()
    try:
        device = home_of(model)
        loss = task.on(device).loss
        twin = perturbed(another(model, task, 0).to(device), "dp-sgd proof")
        batch = examples.batch(torch.arange(min(TRIED, len(examples))))
        inputs, targets = to_device(batch, device)
        _check_others(twin, inputs)
        with _still(twin, inputs) as draws:
            _check_apart(twin, loss, inputs, targets)
            each = _losses(loss, twin, inputs, targets)
            way = _fastest(twin, each, inputs, targets, ALONE if draws else WAYS)
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
def _check_others(model: nn.Module, inputs: Any) -> None:
    """Raise ValueError where an example's output in training depends on its batch.

    The model is in training mode, and draws the same numbers in every call; only the other examples
    change. A model that draws is tried with several draws, since it may mix in some steps only.
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
        # Also what a model remembers of one batch for the next mixes them.
        if not _alike(together, _called(model, inputs, start), SAME):
            raise ValueError(
                "dp-sgd: the model gives other outputs for the same batch and the same random "
                "numbers: it keeps something of earlier batches, or has a generator of its own"
            )
        if not draws:
            break
    restore_generators(drawn)


def _repeated(inputs: Any, at: int) -> Any:
    """A batch of one example, as often as there are examples."""

    def repeated(leaf: Any) -> Any:
        one = isinstance(leaf, Tensor)
        return leaf[at : at + 1].expand_as(leaf).clone() if one else leaf

    return tree_map(repeated, inputs)


def _called(model: nn.Module, inputs: Any, start: Any) -> Any:
    """The outputs, with the generators at `start`. Raises ValueError where a buffer changes."""
    restore_generators(start)
    kept = [buffer.clone() for buffer in model.buffers()]
    outputs = model(inputs)
    for (name, now), before in zip(model.named_buffers(), kept, strict=True):
        if not torch.equal(now, before):
            raise ValueError(
                f"dp-sgd: a forward pass changes the model's buffer {name}, to which no noise is "
                f"added: take a layer that keeps nothing of the data"
            )
    return outputs


def _mixes() -> ValueError:
    return ValueError(
        "dp-sgd: what the model gives for an example depends on the other examples of its batch: "
        "examples have to be the first dimension, and no layer may mix them"
    )


@contextmanager
def _still(model: nn.Module, inputs: Any) -> Iterator[bool]:
    """Inside, the model draws no random numbers, as far as that can be had.

    Gives whether it draws in training by itself, other than by dropout: it is then in evaluation
    mode.
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
    """Inside, functions of dropout give their input, and attention drops nothing."""

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
    """Raises ValueError where examples of a batch know of each other."""
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


def _fastest(
    model: nn.Module, each: Each, inputs: Any, targets: Any, kinds: Sequence[type[Way]]
) -> Way:
    right = Looped(model, each).clipped(inputs, targets, math.inf)
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
