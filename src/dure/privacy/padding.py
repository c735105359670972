"""Rows of embeddings without gradients, which get no noise.

`nn.Embedding(padding_idx=p)` gives row p no gradient, for any data. With noise, the row would
change by noise alone, and the model's output for a text would depend on the length of its padding.
Such a row is released as if the row had not been trained, which is the same for all data, and so
reveals nothing.

A table that the model also uses in another way, such as the weights of its last layer, has
gradients in this row. Such a table is detected by its owners, and by a trial on the first examples;
all of its rows get noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dure.contracts.fresh_model import examples_for, unused_copy
from dure.contracts.task import Task
from dure.machine.devices import device_of_model, to_device
from dure.randomness.seeds import generators_state, restore_generators
from dure.tasks.loss_check import first_of
from dure.tasks.loss_shares import tensor_of
from dure.tasks.modes import perturbed

TRIED = 3
"""Number of examples of the trial."""


class PaddingRow(NamedTuple):
    """Row of a trained table. name: name of the table in the model."""

    name: str
    row: int


def padding_rows(task: Task, model: nn.Module) -> list[PaddingRow]:
    """Return the rows of trained tables that get no gradient from any example.

    model: unchanged. Without examples, as on a server whose clients have them, the owners of a
    table decide alone.
    """
    rows = list(_declared(model))
    if not rows or not len(task.train):
        return rows
    before = generators_state()
    try:
        return _without_gradient(
            task, perturbed(unused_copy(model, task, 0).eval(), "padding"), rows
        )
    except Exception:
        # Training raises the same error again.
        return []
    finally:
        restore_generators(before)


def clear(rows: Sequence[PaddingRow], tensors: dict[str, Tensor]) -> None:
    """Set the rows to zero. tensors: gradients, or changes, by the names of parameters."""
    for name, row in rows:
        if name in tensors:
            tensors[name][row].zero_()


def _declared(model: nn.Module) -> Iterator[PaddingRow]:
    """Yield the padding rows of embeddings whose table no other module has."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for name, module in model.named_modules():
        if type(module) is nn.Embedding and module.padding_idx is not None:
            table = module.weight
            if table.requires_grad and owners[id(table)] == 1:
                yield PaddingRow(f"{name}.weight" if name else "weight", module.padding_idx)


def _without_gradient(task: Task, model: nn.Module, rows: Sequence[PaddingRow]) -> list[PaddingRow]:
    device = device_of_model(model)
    inputs, targets = to_device(first_of(examples_for(task)[0], TRIED), device)
    loss = task.on(device).loss(model(inputs), targets)
    torch.autograd.backward(tensor_of(loss))
    named = dict(model.named_parameters())
    return [one for one in rows if not _reached(named[one.name].grad, one.row)]


def _reached(gradient: Tensor | None, row: int) -> bool:
    return gradient is not None and bool(gradient[row].any())
