"""One pass of a model for a proof: forward and backward, and forward in evaluation.

It is made by a copy of the model, so that the model stays as it is: `Twins`. Random draws give
constants (`dure.parallel.settled`), and whole gradients are cut as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from dure.parallel.gradients import as_dense
from dure.parallel.settled import Settled
from dure.randomness.seeds import generators_state, restore_generators, seed_generators
from dure.tensors.copies import copy_of

LossOf = Callable[[Any], Tensor]
"""The loss of a model's outputs."""

Gradients = dict[str, Tensor | None]
"""By the names of the parameters, in the model's order; None where none has come."""

Make = Callable[[], nn.Module]
"""Makes the same model once more."""


class Examples(NamedTuple):
    """What is computed.

    inputs: as the model takes them, as one argument. evaluates: whether in evaluation as well.
    """

    inputs: Any
    evaluates: bool


class Passed(NamedTuple):
    """What came of it.

    evaluated: the loss in evaluation, then the outputs.
    """

    loss: Tensor
    gradients: Gradients
    evaluated: list[Tensor]
    settled: Settled


def passed(
    model: nn.Module,
    examples: Examples,
    loss: LossOf,
    keep: Callable[[str, Tensor], Tensor] = lambda name, gradient: gradient,
) -> Passed:
    """What a model makes of the examples; it is of no use after that.

    keep: what is kept of a gradient, by the name of its parameter.
    """
    gradients: Gradients = {}
    for name, parameter in model.named_parameters():
        gradients[name] = None
        if parameter.requires_grad:
            keeper = _keeper(name, gradients, keep)
            parameter.register_post_accumulate_grad_hook(keeper)  # type: ignore[no-untyped-call]
    seed_generators(0, "proof", everything=True)
    evaluated: list[Tensor] = []
    with Settled() as settled:
        result = loss(model.train()(examples.inputs))
        result.backward()  # type: ignore[no-untyped-call]
        if examples.evaluates:
            with torch.no_grad():
                outputs = model.eval()(examples.inputs)
                evaluated = [loss(outputs), *_tensors(outputs)]
    return Passed(result.detach(), gradients, evaluated, settled)


def _keeper(
    name: str, gradients: Gradients, keep: Callable[[str, Tensor], Tensor]
) -> Callable[[Tensor], None]:
    def kept(parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        own = keep(name, as_dense(parameter.grad))
        parameter.grad = None
        # A checkpointed part of a model may have a backward pass of its own, and give its share.
        before = gradients[name]
        gradients[name] = own if before is None else before + own

    return kept


def _tensors(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, Tensor)]


class Twins:
    """Copies of a model, each for one use.

    They lie in the memory of the model's parameters, if `make` makes the same model once more: for
    a forward pass may write into parameters, which then have to be put back.
    """

    def __init__(self, model: nn.Module, make: Make | None) -> None:
        self._model = model
        self._make = make
        self._share = make is not None
        self._before = _bits(model) if self._share else []

    def one(self) -> nn.Module:
        """One more. Raises ValueError where the model can neither be copied nor made."""
        twin = copy_of(self._model, same_parameters=self._share)
        if twin is not None:
            return twin
        if self._make is None:
            raise ValueError(
                f"this {type(self._model).__name__} cannot be copied, for a copy would share what "
                "it holds, such as a function that was made inside of it: give make=, which makes "
                "the same model once more"
            )
        twin = self._make()
        _write(self._model, twin)
        return twin

    def put_back(self) -> bool:
        """Makes the model's parameters those of before; returns whether they were others.

        From then on twins have parameters of their own.
        """
        if self._make is None or not self._share or _bits(self._model) == self._before:
            return False
        _write(self._make(), self._model)
        self._share = False
        return True


@torch.no_grad()
def _write(source: nn.Module, target: nn.Module) -> None:
    theirs = (*source.parameters(), *source.buffers())
    for mine, other in zip((*target.parameters(), *target.buffers()), theirs, strict=True):
        mine.copy_(other)


@torch.no_grad()
def _bits(model: nn.Module) -> list[int]:
    """A number for each parameter, which is another one once an element has changed."""
    numbers = []
    for parameter in model.parameters():
        flat = parameter.detach().contiguous().view(-1).view(torch.uint8)
        # Whole numbers are added without rounding, and the widest in the least time.
        wide = {0: torch.int64, 4: torch.int32}.get(len(flat) % 8, torch.uint8)
        numbers.append(int(flat.view(wide).sum(dtype=torch.int64)))
    return numbers


@contextmanager
def generators_kept(model: nn.Module) -> Iterator[None]:
    """After it all generators are as they were."""
    before = generators_state()
    cuda = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    try:
        with torch.random.fork_rng(devices=list(cuda)):
            yield
    finally:
        restore_generators(before)
