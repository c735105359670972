"""Memory of training a model on one worker, without activations.

    weights     W    every parameter and buffer, once
    gradients   G    as many bytes as the trained parameters; sparse gradients are not counted
    state       S    the optimizer's state: AdamW two numbers a weight, SGD none
    passing     U    temporaries of an update: AdamW twice as much as the largest parameter, SGD
                     none; with `foreach` all parameters are updated at once

A worker has a part of each of these:

    single worker, data parallel            W             G             S      U
    ZeRO 1, 2, 3 on N ranks                 W, W, W/N     G, G/N, G/N   S/N    U/N
    tensor parallel, pipeline on N ranks    W/N           G/N           S/N    U/N
    parameters, gradients, state offloaded  0             0             0      0

The third line is a lower bound: layers that a plan does not divide, and unequal stages, make a
rank's part larger, and a stage may contain the largest parameter of the model.

Activations, measured by `dure.memory.activations`, and the memory of a process itself are extra.

The size of an optimizer's state is found by a step over parameters of a few elements for each
parameter. State tensors of the parameter's shape are scaled; the others count as they are. The
temporaries of an update are the bytes alive besides the state during a step over one such
parameter, and over three.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dure.machine.compiler import deferred_compiler
from dure.memory.live_storages import LiveStorages
from dure.randomness.seeds import generators_state, restore_generators

_SIDE = 32
"""Rows and columns of a parameter on which an update is tried, much larger than other numbers."""


class MemoryShares(NamedTuple):
    """Parts of the undivided model that a worker has in memory."""

    weights: Fraction = Fraction(1)
    gradients: Fraction = Fraction(1)
    state: Fraction = Fraction(1)
    passing: Fraction = Fraction(1)

    def without(self, parts: Collection[str]) -> MemoryShares:
        """Return the shares if these parts are offloaded, by the names of `offload`."""
        nothing = Fraction(0)
        return MemoryShares(
            nothing if "parameters" in parts else self.weights,
            nothing if "gradients" in parts else self.gradients,
            nothing if "optimizer" in parts else self.state,
            # An offloaded optimizer steps piece by piece.
            nothing if "optimizer" in parts else self.passing,
        )


WHOLE = MemoryShares()
"""Shares of a worker that has the whole model."""


def divided_shares(parts: int, stage: int = 0, ranks: int = 1) -> MemoryShares:
    """Return the shares of a worker that has a part of the model, divided into `parts` parts.

    stage: stage of ZeRO, which divides each part over `ranks`; 0 for none.
    """
    part = Fraction(1, parts)
    less = part / ranks
    return MemoryShares(
        weights=less if stage >= 3 else part,
        gradients=less if stage >= 2 else part,
        state=less if stage >= 1 else part,
        passing=less if stage >= 1 else part,
    )


class TrainingMemory(NamedTuple):
    """Bytes of training a model, undivided.

    passing: temporaries of an update.
    """

    weights: int
    gradients: int
    state: int
    passing: int = 0

    def of(self, shares: MemoryShares) -> TrainingMemory:
        """Return the bytes that a worker with these shares needs."""
        parts = zip(self, shares, strict=True)
        return TrainingMemory(*(int(nbytes * share) for nbytes, share in parts))

    @property
    def total(self) -> int:
        """Sum of all bytes, which an update needs at the same time."""
        return sum(self)


def training_memory_of(
    model: nn.Module, optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
) -> TrainingMemory:
    """Return the bytes that training the model with this optimizer needs."""
    trained = [one for one in model.parameters() if one.requires_grad and not is_lazy(one)]
    sparse = _sparse(model)
    dense = [one for one in trained if one not in sparse]
    return TrainingMemory(
        weights=bytes_of(tensors_of(model)),
        gradients=sum(one.nbytes for one in dense),
        state=_state_bytes(trained, optimizer),
        passing=_passing_bytes(trained, optimizer),
    )


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a model, except lazy parameters of unknown shape."""
    for one in itertools.chain(model.parameters(), model.buffers()):
        if not is_lazy(one):
            yield one


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors; tensors with the same memory count once."""
    found: dict[object, int] = {}
    for tensor in tensors:
        # A meta tensor has no memory yet; it will have its own.
        key = id(tensor) if tensor.is_meta else tensor.untyped_storage().data_ptr()
        found[key] = max(found.get(key, 0), tensor.nbytes)
    return sum(found.values())


def _sparse(model: nn.Module) -> set[Tensor]:
    """Return the parameters whose gradients have only the rows that a batch has used."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    found = (module for module in model.modules() if isinstance(module, tables) and module.sparse)
    return {module.weight for module in found}


_Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def _state_bytes(parameters: Iterable[nn.Parameter], make: _Make) -> int:
    """Return the bytes of the optimizer's state for these parameters; 0 if it cannot be tried."""
    real = list(parameters)
    small = [_small(parameter) for parameter in real]
    optimizer = _tried(small, make)
    if optimizer is None:
        return 0
    return sum(
        _scaled(optimizer.state.get(tried, {}), tried, parameter)
        for tried, parameter in zip(small, real, strict=True)
    )


def _tried(
    parameters: Sequence[nn.Parameter], make: _Make, live: LiveStorages | None = None
) -> torch.optim.Optimizer | None:
    """Return the optimizer after a step over these parameters; None if it fails.

    live: counts bytes during the step.
    """
    before = generators_state()
    try:
        with deferred_compiler(), torch.enable_grad(), live or nullcontext():
            optimizer = make(parameters)
            optimizer.step()
        return optimizer
    # A user-defined optimizer may need properties that only the real parameters have.
    except Exception:
        return None
    finally:
        restore_generators(before)


def _passing_bytes(parameters: Sequence[nn.Parameter], make: _Make) -> int:
    """Return the peak bytes of temporaries in an update of these parameters."""
    if not parameters:
        return 0
    one, three = (_passing(count, make) for count in (1, 3))
    sizes = [parameter.nbytes for parameter in parameters]
    # All parameters are updated at once, or one after another.
    return int(one * (sum(sizes) if three >= 3 * one else max(sizes)))


def _passing(count: int, make: _Make) -> Fraction:
    """Return the temporaries of an update of `count` parameters, per byte of a parameter."""
    tried = [nn.Parameter(torch.zeros(_SIDE, _SIDE)) for _ in range(count)]
    gradients = [torch.zeros_like(parameter) for parameter in tried]
    for parameter, gradient in zip(tried, gradients, strict=True):
        parameter.grad = gradient
    live = LiveStorages([*tried, *gradients])
    optimizer = _tried(tried, make, live)
    # The bytes that are still alive are the optimizer's state.
    return Fraction(0) if optimizer is None else Fraction(live.peak - live.bytes, tried[0].nbytes)


def _small(parameter: nn.Parameter) -> nn.Parameter:
    """Return a small parameter with as many dimensions, with a gradient."""
    # Dimensions have different sizes, so that they cannot be confused.
    shape = [min(size, 2 + place) for place, size in enumerate(parameter.shape)]
    small = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype))
    small.__dict__.update(vars(parameter))
    small.grad = torch.zeros_like(small)
    return small


def _scaled(state: Mapping[Any, Any], small: Tensor, parameter: Tensor) -> int:
    """Return the bytes of a state of the small parameter, scaled to the real parameter."""
    total = 0
    for value in state.values():
        if isinstance(value, Tensor):
            grows = value.shape == small.shape
            total += value.itemsize * (parameter.numel() if grows else value.numel())
    return total
