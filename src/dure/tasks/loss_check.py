"""What is said of a loss before training.

    a loss of torch that is a sum, or a number an element    refused: a loss is a mean
    a loss of one's own, where targets may be ignored        a warning, unless it is a (sum, count)

The latter is weighed by examples where parts of a batch are computed apart, since nothing tells
what it counts: silently another path than that of one worker.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dure.contracts.strategy import examples_for
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.machine.devices import home_of, to_device
from dure.randomness.seeds import generators_state, restore_generators
from dure.tasks.known_losses import IGNORED, name_of, reduction_of, torch_loss


def check_loss(task: Task) -> None:
    """Raises ValueError for a loss of torch's that is known to be no mean."""
    found = torch_loss(task.loss)
    if found is None or reduction_of(found[1]) not in ("sum", "none"):
        return
    raise ValueError(
        f"the loss {name_of(task.loss)} has the reduction {reduction_of(found[1])!r}, but a loss "
        f"is the mean over its batch: let it be 'mean', or give a function that returns (sum, "
        f"count)"
    )


def warn_of_ignored_targets(task: Task, model: Callable[[], nn.Module], stacklevel: int) -> None:
    """Warns where the loss may ignore targets of the data, and does not say how many.

    model: gives one like the task's, which may be used up; called only where that is in doubt.
    stacklevel: of the line that the warning is about, as `warnings.warn` counts it for the caller.
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
        f"targets hold {ignored}, which the loss {name_of(task.loss)} may ignore, but it does not "
        f"say how many it counts, so that parts of a batch are weighed by their examples: let it "
        f"return (sum, count)",
        stacklevel=stacklevel + 1,
    )


def _ignored_by(loss: Any) -> int | None:
    """The target that a loss of one's own ignores, as far as it says so; None for no number."""
    keywords = loss.keywords if isinstance(loss, partial) else {}
    ignored = keywords.get("ignore_index", getattr(loss, "ignore_index", IGNORED))
    return ignored if type(ignored) is int else None


def _occurs(target: int, examples: Examples) -> bool:
    """Whether a target has this value; where they are not in memory, that of the first example."""
    try:
        in_memory = hasattr(examples, "targets")
        targets = examples.targets if in_memory else first_of(examples, 1)[1]
    except Exception:
        # What is wrong with it is said where it is learned from.
        return False
    return any(
        bool((leaf == target).any())
        for leaf in tree_leaves(targets)
        if isinstance(leaf, Tensor) and not leaf.is_floating_point() and leaf.dtype != torch.bool
    )


def _returns_pair(task: Task, model: nn.Module) -> bool:
    """Whether the loss of two examples is a pair; False where that cannot be found out."""
    before = generators_state()
    try:
        device = home_of(model)
        inputs, targets = to_device(first_of(examples_for(task)[0], 2), device)
        # In evaluation mode nothing draws, and batch norm takes what it gets.
        with torch.no_grad():
            return isinstance(task.on(device).loss(model.eval()(inputs), targets), tuple)
    except Exception:
        # What is wrong is said where it is learned from.
        return False
    finally:
        restore_generators(before)


def first_of(examples: Examples, count: int) -> tuple[Any, Any]:
    """Return the batch of the first examples.

    Reading them may draw random numbers; the generators go on as if it had not.
    """
    before = generators_state()
    try:
        some = torch.arange(min(count, len(examples)))
        return examples.batch(examples.first + some)
    finally:
        restore_generators(before)
