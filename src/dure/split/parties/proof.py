"""Check that the parts compute the same values as the undivided model, on one batch."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dure.contracts.fresh_model import examples_for, unused_copy
from dure.contracts.learner import Proof
from dure.contracts.task import Task
from dure.data.examples import reader_on
from dure.machine.devices import device_of_model
from dure.randomness.seeds import generators_state, restore_generators, seed_generators
from dure.split.parties.model import Columns, divide
from dure.tasks.loss_shares import CountedLoss

_ROUNDINGS = 1e4
"""Tolerance in roundings of the largest value, as sums are added in another order."""


def prove(
    task: Task, model: nn.Module, features: Sequence[Columns], parties: int | None, examples: int
) -> Proof | None:
    """Compare the parts with the undivided model in one forward and backward pass.

    Args:
        task: the task.
        model: the model, which is not changed.
        features: columns of each party; empty for the model's own.
        parties: expected number of parties; None for no expectation.
        examples: number of examples of the trial.

    Returns:
        The proof; None if the task returns the same model object each time, so that there is no
        copy to compare with.

    Raises:
        ValueError: the two differ.
    """
    started = time.perf_counter()
    whole = unused_copy(model, task, 0)
    parted = unused_copy(model, task, 0)
    if whole is parted or whole is model:
        return None
    before = generators_state()
    try:
        _compare(task, whole.train(), parted.train(), features, parties, examples)
    finally:
        restore_generators(before)
    what = "the parts compute what the undivided model computes"
    return Proof(what, time.perf_counter() - started)


def _compare(
    task: Task,
    whole: nn.Module,
    parted: nn.Module,
    features: Sequence[Columns],
    parties: int | None,
    examples: int,
) -> None:
    train, _ = examples_for(task)
    device = device_of_model(whole)
    inputs, targets = reader_on(train, device)(torch.arange(min(examples, len(train))))
    losses = CountedLoss(task.on(device).loss, train)
    division = divide(parted, inputs, features, parties)
    # Both draw the same random numbers, in the same order of operations.
    found: list[list[Tensor]] = []
    for forward in (whole, division.forward):
        seed_generators(0, "proof")
        outputs = forward(inputs)
        losses.mean(outputs, targets, len(inputs)).loss.backward()  # type: ignore[no-untyped-call]
        found.append([leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)])
    for one, other in zip(*found, strict=True):
        _check_alike("outputs", one, other)
    names = {id(twin): name for name, twin in parted.named_parameters()}
    wanted = dict(whole.named_parameters())
    for part in (*division.heads, division.tail):
        for piece in part.pieces:
            name = names[id(piece.there)]
            gradient = wanted[name].grad
            own = piece.here.grad
            if (gradient is None) != (own is None):
                raise ValueError(f"{name} has a gradient in the model or in its parts alone")
            if gradient is not None and own is not None:
                _check_alike(f"the gradients of {name}", piece.cut(gradient), own)


def _check_alike(what: str, one: Tensor, other: Tensor) -> None:
    if one.shape != other.shape:
        raise ValueError(f"{what} of the parts have another shape than those of the model")
    one = one.detach().to_dense()
    other = other.detach().to_dense()
    if not one.numel() or not (one.is_floating_point() or one.is_complex()):
        return
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()):
        raise ValueError(
            f"{what} are not finite in the model or in its parts alone: the model does more than "
            "its heads, their join and its tail"
        )
    # NaN in both: data or model are at fault, and the first step reports the error.
    one = one.where(finite, 0)
    other = other.where(finite, 0)
    apart = float((one - other).abs().max())
    bound = _ROUNDINGS * torch.finfo(one.dtype).eps * max(float(one.abs().max()), 1.0)
    if apart > bound:
        raise ValueError(
            f"{what} of the parts differ by {apart:.2g} from those of the undivided model: the "
            "model does more than its heads, their join and its tail"
        )
