"""Recomputation of activations in backward, by a strategy's fields `recompute` and `memory`.

    recompute    the modules of these names; or `all`: the choice with the smallest peak of a step
    memory       as few modules as possible such that a step needs at most this memory:

                 weights + gradients + optimizer state + other memory of a step <= memory

The first three terms are the worker's parts (`dure.memory.formula`); the last term is measured on
tensors without data (`dure.memory.recompute_choice`), for the part of the batch that a worker
computes at once. The memory of Python and torch themselves is not included.

Before the first step a few examples are tried: passes with recomputation must have the gradients
and buffers of passes without, bit for bit. A module whose passes change Python state each time,
such as a counter, would change the state twice: it is not chosen, and refused if it is named.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dure.contracts.fresh_model import examples_for, unused_copy
from dure.contracts.learner import Proof
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.machine.compiler import deferred_compiler
from dure.machine.devices import to_device
from dure.memory.formula import WHOLE, MemoryShares, TrainingMemory, training_memory_of
from dure.memory.recomputation import recompute_modules
from dure.memory.recompute_choice import RecomputeChoice, RecomputeChooser
from dure.memory.recompute_setting import Recompute
from dure.randomness.seeds import generators_state, restore_generators, seed_generators
from dure.settings import read_bytes
from dure.tasks.loss_shares import tensor_of
from dure.tasks.modes import in_mode
from dure.tensors.elements import element_bytes
from dure.tensors.python_state import changes, python_state_of

NO_RECOMPUTE = Recompute()

TRIED = 2
"""Largest number of examples in the trial: more than 1, for batch norm."""


class RecomputeRequest(NamedTuple):
    """Recomputation that the fields of a strategy ask for.

    examples: examples that a worker computes at once. shares: the worker's shares of the model.
    """

    recompute: Recompute
    memory: str | None
    examples: int
    shares: MemoryShares = WHOLE

    def __bool__(self) -> bool:
        return bool(self.recompute) or self.memory is not None


NO_RECOMPUTE_REQUEST = RecomputeRequest(NO_RECOMPUTE, None, 0)


def check_recompute(
    recompute: Recompute, memory: str | None, who: str, private: bool = False
) -> None:
    """Check the fields `recompute` and `memory` of a strategy.

    who: the strategy's name. private: whether it computes per-example gradients (DP-SGD).

    Raises ValueError if both fields are given, if `memory` is no positive size, or with `private`.
    """
    if not recompute and memory is None:
        return
    if private:
        field = "recompute" if recompute else "memory"
        raise ValueError(
            f"{who} with dp-sgd cannot use {field}, because it computes gradients differently: "
            "leave one of the two out"
        )
    if recompute and memory is not None:
        raise ValueError(
            f"recompute {recompute} sets what is recomputed, but memory {memory} lets dure "
            "choose: give one of the two"
        )
    if memory is not None and read_bytes(memory) < 1:
        raise ValueError(f"memory is {memory}, but it has to be greater than 0")


@dataclass(frozen=True)
class RecomputePlan:
    """Modules that are recomputed, and the memory that a worker needs with them.

    need: bytes of weights, gradients and state. budget: bytes; None without a budget.
    """

    choice: RecomputeChoice
    need: TrainingMemory
    budget: int | None

    def facts(self) -> dict[str, Any]:
        """Return the entries for the summary and the report."""
        return {
            "recomputed": list(self.choice.names),
            "recomputed_flops": self.choice.extra,
            "predicted_bytes": self.need.weights + self.need.state + self.choice.peak,
        }


def recompute_plan_for(
    asked: RecomputeRequest, task: Task, model: nn.Module, check: bool
) -> RecomputePlan | None:
    """Return the modules of a new model to recompute; None if nothing was asked for.

    The choice follows from shapes, and so is the same on every rank. check: whether to exclude
    modules whose passes change Python state. The model is not changed.

    Raises ValueError for unknown module names, and for a budget that is too small; the message has
    the smallest sufficient budget.
    """
    if not asked:
        return None
    train, _ = examples_for(task)
    batch = to_device(_first(train, asked.examples), _device_of(model))
    left = _Trial(task, model, train).left() if check and not _is_named(asked) else []
    with in_mode(model, training=True):
        chooser = _chooser(task, model, batch, left)
        return _chosen_by(chooser, asked, task, model)


def _chooser(task: Task, model: nn.Module, batch: Any, left: Sequence[str]) -> RecomputeChooser:
    """Return a chooser of modules. left: names of Python state that passes change.

    A module that contains such state is not chosen.
    """

    def make(model: nn.Module, spare: bool) -> RecomputeChooser:
        return RecomputeChooser(
            model,
            batch,
            lambda outputs, targets: _loss(task, outputs, targets),
            may=lambda name: not any(_lies_in(each, name) for each in left),
            spare=spare,
        )

    try:
        return make(model, spare=False)
    # A model that cannot be copied: use up a new model instead.
    except ValueError:
        return make(unused_copy(model, task, 0).train(), spare=True)


def _chosen_by(
    chooser: RecomputeChooser, asked: RecomputeRequest, task: Task, model: nn.Module
) -> RecomputePlan:
    need = training_memory_of(model, task.optimizer)
    if _is_named(asked):
        return RecomputePlan(chooser.of(asked.recompute.names(model)), need, None)
    if asked.memory is None:
        return RecomputePlan(chooser.least(), need, None)
    held = need.of(asked.shares)
    budget = read_bytes(asked.memory)
    # The trial has all gradients; this worker may have only a part of them.
    besides = held.weights + held.state + held.gradients - need.gradients
    choice = chooser.within(budget - besides) if held.total <= budget else None
    if choice is None:
        least = max(chooser.least().peak + besides, held.total)
        raise ValueError(
            f"memory {asked.memory}: a step needs at least {_size(least)} with any recomputation "
            f"(weights {_size(held.weights)}, gradients {_size(held.gradients)}, optimizer's "
            f"state {_size(held.state)}, the rest activations or the update)"
        )
    return RecomputePlan(choice, held, budget)


def _is_named(asked: RecomputeRequest) -> bool:
    return bool(asked.recompute) and not asked.recompute.all


def install_recompute(
    asked: RecomputeRequest, task: Task, model: nn.Module, check: bool
) -> RecomputePlan | None:
    """Choose modules and make the model recompute them; None if nothing was asked for."""
    found = recompute_plan_for(asked, task, model, check)
    if found is not None:
        recompute_modules(model, found.choice.names)
    return found


def prove_recompute(asked: RecomputeRequest, task: Task, model: nn.Module) -> Proof | None:
    """Compare passes with and without recomputation; None if nothing was asked for.

    The model is not changed. Raises ValueError if bits differ, or if a module has side effects.
    """
    if not asked:
        return None
    started = time.perf_counter()
    found = recompute_plan_for(asked, task, model, check=True)
    assert found is not None
    names = found.choice.names
    if names:
        _Trial(task, model, examples_for(task)[0]).prove(names)
    modules = f"{len(names)} module{'' if len(names) == 1 else 's'}"
    what = f"{modules} recomputed: gradients and buffers are the same"
    return Proof(what, time.perf_counter() - started)


class _Trial:
    """Passes of copies of a model over a few examples, with the same random numbers."""

    def __init__(self, task: Task, model: nn.Module, train: Examples) -> None:
        self.task = task
        self._model = model
        self._batch = to_device(_first(train, min(TRIED, len(train))), _device_of(model))

    def left(self) -> list[str]:
        """Return the names of Python state that each pass changes."""
        return self._plain()[1]

    def prove(self, names: tuple[str, ...]) -> None:
        """Check that passes that recompute these modules agree.

        Raises ValueError if they differ.
        """
        right, left = self._plain()
        for name in names:
            kept = next((each for each in left if _lies_in(each, name)), None)
            if kept is not None:
                raise ValueError(
                    f"recompute: each forward pass of {name} changes {kept}, which would happen "
                    "twice: keep it in a buffer, or leave the module out"
                )
        twin = self._twin()
        recompute_modules(twin, names)
        tried = self._pass(twin)
        for what, digest in right.items():
            if tried[what] != digest:
                raise ValueError(
                    f"recompute: {what} changes when modules are recomputed, because they depend "
                    "on more than inputs, buffers and torch's random numbers: leave such modules "
                    "out"
                )

    def _plain(self) -> tuple[Mapping[str, bytes], list[str]]:
        """Return digests of a plain pass, and the Python state that a second pass changes."""
        twin = self._twin()
        known = [name for name, _ in twin.named_buffers(remove_duplicate=False)]
        # The first pass may fill caches, which is no change of every pass.
        given = self._pass(twin)
        before = python_state_of(twin, known)
        self._pass(twin)
        return given, list(changes(before, python_state_of(twin, known)))

    def _twin(self) -> nn.Module:
        return unused_copy(self._model, self.task, 0).train()

    def _pass(self, model: nn.Module) -> dict[str, bytes]:
        """Return digests of the gradients and buffers after a pass, by a phrase that names each."""
        before = generators_state()
        try:
            seed_generators(0, "recompute", everything=True)
            inputs, targets = self._batch
            with deferred_compiler(), torch.enable_grad():
                _loss(self.task, model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        finally:
            restore_generators(before)
        found = {
            f"the gradient of {name}": _digest(parameter.grad)
            for name, parameter in model.named_parameters()
        }
        found |= {f"the buffer {name}": _digest(buffer) for name, buffer in model.named_buffers()}
        model.zero_grad(set_to_none=True)
        return found


def _loss(task: Task, outputs: Any, targets: Any) -> Tensor:
    return tensor_of(task.loss(outputs, targets))


def _digest(tensor: Tensor | None) -> bytes:
    if tensor is None:
        return b""
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    flat = element_bytes(dense.cpu())
    return hashlib.blake2b(flat.numpy().data, digest_size=16).digest()


def _lies_in(name: str, module: str) -> bool:
    return name.startswith(f"{module}.")


def _first(examples: Examples, count: int) -> tuple[Any, Any]:
    """Return the first `count` examples; random generators are not advanced."""
    before = generators_state()
    batch = examples.batch(torch.arange(count) % len(examples))
    restore_generators(before)
    return batch


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _size(nbytes: int) -> str:
    """Return a size as text, rounded up, so that a budget of this text is sufficient."""
    return f"{-(-nbytes // 100_000) / 10:g} MB"
