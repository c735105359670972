"""Checks of a loss before training.

    a torch loss that is a sum, or a number an element       refused: a loss is a mean
    a user's own loss, if targets may be ignored             a warning, unless it is a (sum, count)

The latter is weighed by examples if parts of a batch are computed separately, since its count is
unknown: silently a different path than that of a single worker.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dure.contracts.fresh_model import examples_for
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.machine.devices import device_of_model, to_device
from dure.randomness.seeds import generators_state, restore_generators
from dure.tasks.known_losses import IGNORED, name_of, reduction_of, torch_loss


def check_loss(task: Task) -> None:
    """Raise ValueError for a torch loss whose reduction is not the mean."""
    found = torch_loss(task.loss)
    if found is None or reduction_of(found[1]) not in ("sum", "none"):
        return
    raise ValueError(
        f"the loss {name_of(task.loss)} has the reduction {reduction_of(found[1])!r}, but a loss "
        "has to be the mean over its batch: use 'mean', or give a function that returns (sum, "
        "count)"
    )


def warn_of_ignored_targets(task: Task, model: Callable[[], nn.Module], stacklevel: int) -> None:
    """Warn if the loss may ignore targets of the data without reporting their number.

    model: returns a model like the task's, which may be changed; called only in case of doubt.
    stacklevel: of the line for the warning, as `warnings.warn` counts it for the caller.
    """
    if torch_loss(task.loss) is not None:
        return
    ignored = _ignored_by(task.loss)
    data = [task.train] if task.test is None else [task.train, task.test]
    if ignored is None or not any(_occurs(ignored, examples) for examples in data):
        return
    if _returns_pair(task, model()):
        return
    warnings.warn(
        f"targets contain {ignored}, which the loss {name_of(task.loss)} may ignore, but it does "
        "not return how many targets it counts, so parts of a batch are weighted by their number "
        "of examples: return (sum, count)",
        stacklevel=stacklevel + 1,
    )


def _ignored_by(loss: Any) -> int | None:
    """Return the target that a user's own loss declares as ignored; None without an integer."""
    keywords = loss.keywords if isinstance(loss, partial) else {}
    ignored = keywords.get("ignore_index", getattr(loss, "ignore_index", IGNORED))
    return ignored if type(ignored) is int else None


def _occurs(target: int, examples: Examples) -> bool:
    """Return whether a target has this value; for data not in memory, only the first example's."""
    try:
        in_memory = hasattr(examples, "targets")
        targets = examples.targets if in_memory else first_of(examples, 1)[1]
    except Exception:
        # An error of the data is reported during training.
        return False
    return any(
        bool((leaf == target).any())
        for leaf in tree_leaves(targets)
        if isinstance(leaf, Tensor) and not leaf.is_floating_point() and leaf.dtype != torch.bool
    )


def _returns_pair(task: Task, model: nn.Module) -> bool:
    """Return whether the loss of two examples is a pair; False if that cannot be determined."""
    before = generators_state()
    try:
        device = device_of_model(model)
        inputs, targets = to_device(first_of(examples_for(task)[0], 2), device)
        # In evaluation mode nothing draws random numbers, and batch norm accepts any batch.
        with torch.no_grad():
            return isinstance(task.on(device).loss(model.eval()(inputs), targets), tuple)
    except Exception:
        # An error is reported during training.
        return False
    finally:
        restore_generators(before)


def first_of(examples: Examples, count: int) -> tuple[Any, Any]:
    """Return the batch of the first examples.

    The random generators are restored, since reading may draw from them.
    """
    before = generators_state()
    try:
        some = torch.arange(min(count, len(examples)))
        return examples.batch(examples.first + some)
    finally:
        restore_generators(before)
