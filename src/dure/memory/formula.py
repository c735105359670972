"""The memory that training a model takes on one worker, without what its activations take.

    weights     W    every parameter and buffer, once
    gradients   G    as many bytes as what is trained; sparse ones are less, and not counted
    state       S    what the optimizer keeps: AdamW two numbers a weight, SGD none
    passing     U    what an update makes and drops: AdamW twice as much as the largest parameter,
                     SGD nothing; with `foreach` all parameters are updated at once

A worker holds a part of each of these:

    single worker, data parallel            W             G             S      U
    ZeRO 1, 2, 3 on N ranks                 W, W, W/N     G, G/N, G/N   S/N    U/N
    tensor parallel, pipeline on N ranks    W/N           G/N           S/N    U/N
    parameters, gradients, state offloaded  0             0             0      0

The third line is the least: layers that a plan does not divide, and stages that are not alike, make
a rank's part larger, and a stage's largest parameter may be the model's.

Activations come on top, which `dure.memory.activations` measures, and what a process has anyway.

How much an optimizer keeps is seen by letting it step over a parameter of a few elements, one for
each kind of them. What grows with the parameter is scaled; the rest is what it is. What an update
passes is what lives beside the state while it steps over one such parameter, and over three.
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

from dure.machine.compiler import left_out
from dure.memory.live import Live
from dure.randomness.seeds import generators_state, restore_generators

_SIDE = 32
"""Rows and columns of a parameter on which an update is tried: few numbers are beside it."""


class Shares(NamedTuple):
    """The parts of the undivided model that one worker has in memory."""

    weights: Fraction = Fraction(1)
    gradients: Fraction = Fraction(1)
    state: Fraction = Fraction(1)
    passing: Fraction = Fraction(1)

    def without(self, parts: Collection[str]) -> Shares:
        """The same where these lie elsewhere, by the names of `offload`."""
        nothing = Fraction(0)
        return Shares(
            nothing if "parameters" in parts else self.weights,
            nothing if "gradients" in parts else self.gradients,
            nothing if "optimizer" in parts else self.state,
            # It then steps piece by piece.
            nothing if "optimizer" in parts else self.passing,
        )


WHOLE = Shares()
"""Those of a worker that has all of it."""


def divided(parts: int, stage: int = 0, ranks: int = 1) -> Shares:
    """Those of a worker that has one of so many parts of the model.

    stage: of ZeRO, which divides each part over so many ranks; 0: none.
    """
    part = Fraction(1, parts)
    less = part / ranks
    return Shares(
        weights=less if stage >= 3 else part,
        gradients=less if stage >= 2 else part,
        state=less if stage >= 1 else part,
        passing=less if stage >= 1 else part,
    )


class Need(NamedTuple):
    """Bytes that a model takes while it is trained, undivided.

    passing: what an update makes on its way, and drops.
    """

    weights: int
    gradients: int
    state: int
    passing: int = 0

    def of(self, shares: Shares) -> Need:
        """What a worker with these shares needs."""
        parts = zip(self, shares, strict=True)
        return Need(*(int(nbytes * share) for nbytes, share in parts))

    @property
    def total(self) -> int:
        """All of it, as it is there at once during an update."""
        return sum(self)


def need_of(
    model: nn.Module, optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
) -> Need:
    """What training the model with this optimizer takes."""
    trained = [one for one in model.parameters() if one.requires_grad and not is_lazy(one)]
    sparse = _sparse(model)
    dense = [one for one in trained if one not in sparse]
    return Need(
        weights=bytes_of(tensors_of(model)),
        gradients=sum(one.nbytes for one in dense),
        state=_state_bytes(trained, optimizer),
        passing=_passing_bytes(trained, optimizer),
    )


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers of a model, but for those whose shape is not known yet."""
    for one in itertools.chain(model.parameters(), model.buffers()):
        if not is_lazy(one):
            yield one


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, those that lie in one place once."""
    found: dict[object, int] = {}
    for tensor in tensors:
        # A shape alone has no memory; it will have its own.
        key = id(tensor) if tensor.is_meta else tensor.untyped_storage().data_ptr()
        found[key] = max(found.get(key, 0), tensor.nbytes)
    return sum(found.values())


def _sparse(model: nn.Module) -> set[Tensor]:
    """Parameters whose gradients have only the rows that a batch has used."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    found = (module for module in model.modules() if isinstance(module, tables) and module.sparse)
    return {module.weight for module in found}


_Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def _state_bytes(parameters: Iterable[nn.Parameter], make: _Make) -> int:
    """Bytes of the optimizer's state over these; 0 where it cannot be tried."""
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
    parameters: Sequence[nn.Parameter], make: _Make, live: Live | None = None
) -> torch.optim.Optimizer | None:
    """The optimizer after a step over these; None where there is none. live: counts meanwhile."""
    before = generators_state()
    try:
        with left_out(), torch.enable_grad(), live or nullcontext():
            optimizer = make(parameters)
            optimizer.step()
        return optimizer
    # It is the user's: it may want what only the real parameters have.
    except Exception:
        return None
    finally:
        restore_generators(before)


def _passing_bytes(parameters: Sequence[nn.Parameter], make: _Make) -> int:
    """Bytes that an update of these makes at most at one time, and drops."""
    if not parameters:
        return 0
    one, three = (_passing(count, make) for count in (1, 3))
    sizes = [parameter.nbytes for parameter in parameters]
    # All at once, or one after another.
    return int(one * (sum(sizes) if three >= 3 * one else max(sizes)))


def _passing(count: int, make: _Make) -> Fraction:
    """What an update makes and drops, for a byte of one of so many parameters."""
    tried = [nn.Parameter(torch.zeros(_SIDE, _SIDE)) for _ in range(count)]
    gradients = [torch.zeros_like(parameter) for parameter in tried]
    for parameter, gradient in zip(tried, gradients, strict=True):
        parameter.grad = gradient
    live = Live([*tried, *gradients])
    optimizer = _tried(tried, make, live)
    # What still lives is the optimizer's state.
    return Fraction(0) if optimizer is None else Fraction(live.peak - live.bytes, tried[0].nbytes)


def _small(parameter: nn.Parameter) -> nn.Parameter:
    """One of as many dimensions, with a gradient."""
    # No dimension of two sizes would be taken for another.
    shape = [min(size, 2 + place) for place, size in enumerate(parameter.shape)]
    small = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype))
    small.__dict__.update(vars(parameter))
    small.grad = torch.zeros_like(small)
    return small


def _scaled(state: Mapping[Any, Any], small: Tensor, parameter: Tensor) -> int:
    """The bytes of a state over the small one, if it were over the parameter."""
    total = 0
    for value in state.values():
        if isinstance(value, Tensor):
            grows = value.shape == small.shape
            total += value.itemsize * (parameter.numel() if grows else value.numel())
    return total
