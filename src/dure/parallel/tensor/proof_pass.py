"""Single pass of a model for a proof: forward and backward, and forward in evaluation.

A copy of the model runs, so that the model does not change: `ModelCopies`. Random draws return
constants (`dure.parallel.deterministic_draws`), and whole gradients are cut as they arrive.

A weight of zeros, with which some models begin, stops gradients to everything before it, so that
errors there would stay unnoticed. So parameters with a single value are perturbed in the copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from dure.parallel.deterministic_draws import DeterministicDraws
from dure.parallel.gradients import as_dense
from dure.randomness.seeds import (
    generator,
    generators_state,
    restore_generators,
    seed_generators,
)
from dure.tensors.copies import copy_of
from dure.tensors.elements import element_bytes

LossOf = Callable[[Any], Tensor]
"""Loss of a model's outputs."""

Gradients = dict[str, Tensor | None]
"""Gradients by parameter name, in the model's order; None for a parameter without a gradient."""

PERTURBATION = 0.02
"""Standard deviation of the perturbation of parameters with a single value, as for initial weights
of transformers.
"""

ModelFactory = Callable[[], nn.Module]
"""Function that returns the same model once more."""


class ProofExamples(NamedTuple):
    """Inputs of a pass.

    inputs: as the model takes them, as a single argument. evaluates: whether the pass includes
    evaluation.
    """

    inputs: Any
    evaluates: bool


class ProofPass(NamedTuple):
    """Results of a pass.

    loss: the training loss. gradients: by parameter name. evaluated: the loss in evaluation, then
    the outputs. buffers: buffers after the passes. settled: the recorded random draws.
    """

    loss: Tensor
    gradients: Gradients
    evaluated: list[Tensor]
    buffers: dict[str, Tensor]
    settled: DeterministicDraws


def run_pass(
    model: nn.Module,
    examples: ProofExamples,
    loss: LossOf,
    keep: Callable[[str, Tensor], Tensor] = lambda name, gradient: gradient,
) -> ProofPass:
    """Run a model on the examples and return its results; the model is used up.

    keep: returns the part of a gradient to store, given the name of its parameter.
    """
    gradients: Gradients = {}
    for name, parameter in model.named_parameters():
        gradients[name] = None
        if parameter.requires_grad:
            keeper = _keeper(name, gradients, keep)
            parameter.register_post_accumulate_grad_hook(keeper)  # type: ignore[no-untyped-call]
    seed_generators(0, "proof", everything=True)
    evaluated: list[Tensor] = []
    with DeterministicDraws() as settled:
        result = loss(model.train()(examples.inputs))
        result.backward()  # type: ignore[no-untyped-call]
        if examples.evaluates:
            with torch.no_grad():
                outputs = model.eval()(examples.inputs)
                evaluated = [loss(outputs), *_tensors(outputs)]
    return ProofPass(result.detach(), gradients, evaluated, dict(model.named_buffers()), settled)


def _keeper(
    name: str, gradients: Gradients, keep: Callable[[str, Tensor], Tensor]
) -> Callable[[Tensor], None]:
    def kept(parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        own = keep(name, as_dense(parameter.grad))
        parameter.grad = None
        # A checkpointed part of a model may run a separate backward pass, and add a second term.
        before = gradients[name]
        gradients[name] = own if before is None else before + own

    return kept


def outputs_of(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """Return the output of each module of a model in training, in the order of completion.

    The keys are names; for repeated calls of a module, the name and the number of the call. The
    model is used up.
    """
    found: dict[str, Tensor] = {}
    times: Counter[str] = Counter()

    def note(name: str, output: Any) -> None:
        times[name] += 1
        own = _tensors(output)
        if own:
            key = name if times[name] == 1 else f"{name}, time {times[name]}"
            found[key] = own[0].detach().clone()

    for name, module in model.named_modules():
        if name:
            module.register_forward_hook(
                lambda module, inputs, output, name=name: note(name, output)
            )
    seed_generators(0, "proof", everything=True)
    with DeterministicDraws(), torch.no_grad():
        model.train()(inputs)
    return found


def _tensors(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, Tensor)]


class ModelCopies:
    """Copies of a model, each for a single use.

    If `make` is given, copies share the memory of the model's parameters. A forward pass may write
    into parameters; `make` then restores them.
    """

    def __init__(self, model: nn.Module, make: ModelFactory | None) -> None:
        self._model = model
        self._make = make
        self._share = make is not None
        self._before = _bits(model) if self._share else []
        self._one_number = _names_of_one_number(model)

    def one(self) -> nn.Module:
        """Return another copy. Raises ValueError if the model can neither be copied nor made."""
        twin = copy_of(self._model, same_parameters=self._share)
        if twin is None:
            twin = self._another()
        for name, parameter in twin.named_parameters():
            if name in self._one_number:
                parameter.data = _shaken(parameter.data, name)
        return twin

    def _another(self) -> nn.Module:
        if self._make is None:
            raise ValueError(
                f"this {type(self._model).__name__} cannot be copied, because a copy would share "
                "its content, such as a function created inside it: give make=, a function that "
                "creates the same model again"
            )
        made = self._make()
        _write(self._model, made)
        return made

    def put_back(self) -> bool:
        """Restore the model's parameters; return whether they had changed.

        Later copies do not share the memory of parameters.
        """
        if self._make is None or not self._share or _bits(self._model) == self._before:
            return False
        _write(self._make(), self._model)
        self._share = False
        return True


@torch.no_grad()
def _names_of_one_number(model: nn.Module) -> set[str]:
    """Return the names of the trainable parameters whose elements are all equal."""
    found = set()
    for name, parameter in model.named_parameters():
        if not (parameter.requires_grad and parameter.is_floating_point() and parameter.numel()):
            continue
        flat = parameter.detach().flatten()
        # The first elements suffice to exclude nearly all parameters.
        if all(bool((some == flat[0]).all()) for some in (flat[:16], flat)):
            found.add(name)
    return found


def _shaken(tensor: Tensor, name: str) -> Tensor:
    """Return a copy with small random noise added to each element."""
    # On the CPU, so that every rank and every copy gets the same noise.
    noise = torch.randn(tensor.shape, generator=generator(0, f"shaken {name}"))
    scale = PERTURBATION * max(1.0, float(tensor.flatten()[0].abs()))
    return tensor + scale * noise.to(tensor.device, tensor.dtype)


@torch.no_grad()
def _write(source: nn.Module, target: nn.Module) -> None:
    theirs = (*source.parameters(), *source.buffers())
    for mine, other in zip((*target.parameters(), *target.buffers()), theirs, strict=True):
        mine.copy_(other)


@torch.no_grad()
def _bits(model: nn.Module) -> list[int]:
    """Return a checksum for each parameter, which detects a changed element."""
    numbers = []
    for parameter in model.parameters():
        flat = element_bytes(parameter)
        # Integers are added without rounding, and the widest type is the fastest.
        wide = {0: torch.int64, 4: torch.int32}.get(len(flat) % 8, torch.uint8)
        numbers.append(int(flat.view(wide).sum(dtype=torch.int64)))
    return numbers


@contextmanager
def preserved_generators(model: nn.Module) -> Iterator[None]:
    """Context manager: restore the states of all generators afterwards."""
    before = generators_state()
    try:
        yield
    finally:
        restore_generators(before)
