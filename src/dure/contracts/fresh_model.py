"""The run's model: new under the run's seed, or an unused copy; and the examples in its dtype."""

from __future__ import annotations

from torch import nn

from dure.contracts.initial_weights import holds_adapters, load_initial_weights
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.data.validation_split import EvaluationExamples
from dure.machine.devices import device_of_model, in_use
from dure.memory.file_backed_init import in_files_like
from dure.randomness.seeds import generators_state, restore_generators, seed_generators
from dure.tensors.compiled import compile_in_place, unwrap_compiled
from dure.tensors.copies import copy_of
from dure.tensors.writable import make_writable


def seeded_model(task: Task, seed: int) -> nn.Module:
    """Return a new model under the run's seed, with equal weights on every rank and strategy."""
    # The factory draws under the run's seed; the caller's generators are restored afterwards.
    before = generators_state()
    used = in_use()
    try:
        seed_generators(seed, "model", everything=True)
        model = task.model()
        # The factory initialised the accelerator itself and drew before it was seeded.
        if in_use() and not used:
            seed_generators(seed, "model", everything=True)
            model = task.model()
    finally:
        restore_generators(before)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"the task's model function returned a {type(model).__name__}, not an nn.Module"
        )
    model = unwrap_compiled(model)
    make_writable(model)
    # Weights of an adapted model, such as a run's, have the names of its adapters.
    adapted = task.weights is not None and holds_adapters(task.weights)
    if adapted:
        _adapt(model, task, seed)
    if task.weights is not None:
        load_initial_weights(model, task.weights)
    if not adapted:
        _adapt(model, task, seed)
    return compile_in_place(model, task.compile)


def _adapt(model: nn.Module, task: Task, seed: int) -> None:
    """Add the task's adapters, if any, drawn under the run's seed."""
    if task.adapter is None:
        return
    before = generators_state()
    try:
        seed_generators(seed, "adapter")
        task.adapter.apply(model)
    finally:
        restore_generators(before)


def unused_copy(model: nn.Module, task: Task, seed: int) -> nn.Module:
    """Return a new unused model like the run's: a copy if possible.

    The task's factory, which may read its model from a disk, is called again only if the model
    cannot be copied. If the model is in files, so is the copy.
    """
    with in_files_like(model):
        twin = copy_of(model)
        # The copy is not compiled yet.
        if twin is not None:
            return compile_in_place(twin, task.compile)
        made = seeded_model(task, seed)
        home = device_of_model(model)
        return made if home == device_of_model(made) else made.to(home)


def examples_for(task: Task) -> tuple[Examples, Examples | None]:
    """Return (train, test) with inputs in `Task.dtype`; unchanged if the task has none.

    test: with the validation set, if the task has one.
    """
    test = task.test
    if isinstance(task.validation, Examples):
        # Both sets are always measured together.
        test = EvaluationExamples(test, task.validation)
    dtype = task.dtype
    if dtype is None:
        return task.train, test
    return task.train.to(dtype), None if test is None else test.to(dtype)
