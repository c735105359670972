"""Refusal of data whose dtype the model or the loss does not support.

    inputs     are passed to the model unchanged, or in `Task.dtype`
    targets    are passed to the loss unchanged

Two dtypes are no error by themselves: a model may cast its inputs, and torch promotes the operands
of many losses. Two examples are therefore tried, forward and backward, but only if floating-point
data have another dtype than the model: data that fail unchanged, and succeed in the model's dtype,
are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dure.contracts.fresh_model import examples_for
from dure.contracts.task import Task
from dure.data.examples import Examples, as_dtype, cast_floating
from dure.machine.devices import device_of_model, to_device
from dure.randomness.seeds import generators_state, restore_generators
from dure.tasks.gradient_transforms import forward_context
from dure.tasks.loss_check import first_of
from dure.tasks.loss_shares import tensor_of


def check_dtypes(task: Task, model: nn.Module, another: Callable[[], nn.Module]) -> None:
    """Raise ValueError for inputs or targets in a dtype that the model or the loss does not take.

    another: makes a model like `model`, which may be changed; called only for data of another dtype
    than the model's.
    """
    trained = [one.dtype for one in model.parameters() if one.requires_grad]
    floating = [dtype for dtype in trained if dtype.is_floating_point]
    if not floating:
        return
    own = {one.dtype for one in model.parameters() if one.is_floating_point()}
    for name, examples in _sets(task):
        batch = _two(examples)
        given = _dtypes(batch)
        if given and len(own | given) > 1:
            _Trial(task, another, name, floating[0]).check(*batch)


def _sets(task: Task) -> Iterator[tuple[str, Examples]]:
    train, test = examples_for(task)
    yield "training", train
    if test is not None:
        yield from test.sets().items()


def _two(examples: Examples) -> tuple[Any, Any]:
    """Return the first two examples; a pair of None if they cannot be read."""
    try:
        return first_of(examples, 2) if len(examples) else (None, None)
    except Exception:
        # The error is raised again, with its place, during training.
        return None, None


def _dtypes(tree: Any) -> set[torch.dtype]:
    leaves = tree_leaves(tree)
    return {one.dtype for one in leaves if isinstance(one, Tensor) and one.is_floating_point()}


@dataclass
class _Trial:
    """A trial of two examples through model and loss.

    name: of their set. dtype: of the first parameter that the model trains.
    """

    task: Task
    another: Callable[[], nn.Module]
    name: str
    dtype: torch.dtype

    def check(self, inputs: Any, targets: Any) -> None:
        """Raise ValueError for a batch that fails unchanged, and succeeds in another dtype."""
        place, outputs = self._fails(inputs, targets)
        if place == "model" and self._fails(as_dtype(inputs, self.dtype), targets)[0] != "model":
            raise ValueError(
                f"the {self.name} inputs are {_named(inputs)} and the model is {self.dtype}, "
                f"which torch cannot combine: cast the inputs with Task(dtype={self.dtype}), or "
                f"convert the model to {_named(inputs)}"
            )
        if place != "loss" or outputs is None:
            return
        if self._fails(inputs, cast_floating(targets, outputs))[0] is None:
            raise ValueError(
                f"the {self.name} targets are {_named(targets)} and the model's outputs "
                f"{outputs}, which the loss cannot combine: give targets in {outputs}, or cast "
                "one of them in the loss"
            )

    def _fails(self, inputs: Any, targets: Any) -> tuple[str | None, torch.dtype | None]:
        """Return the failing part, model or loss, and the dtype of the outputs.

        None if neither fails, or if there are no outputs.
        """
        before = generators_state()
        training = self.name == "training"
        dtype = None
        try:
            model = self.another().train(training)
            device = device_of_model(model)
            task = self.task.on(device)
            inputs, targets = to_device((inputs, targets), device)
            with torch.set_grad_enabled(training), forward_context(task, device):
                outputs = model(inputs)
                dtype = next(iter(_dtypes(outputs)), None)
                loss = task.loss(outputs, targets)
            if training:
                torch.autograd.backward(tensor_of(loss))
        except Exception:
            return "model" if dtype is None else "loss", dtype
        finally:
            restore_generators(before)
        return None, dtype


def _named(tree: Any) -> str:
    return ", ".join(sorted(map(str, _dtypes(tree))))
