"""Check that a separate head and tail compute the same step as the undivided model, on one batch.

Loss, gradients of all parameters, and the buffers after the step are compared. Both draw the same
random numbers: in the undivided model, each part is seeded with its seed in the separate run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dure.contracts.fresh_model import examples_for, unused_copy
from dure.contracts.learner import Proof
from dure.data.examples import reader_on
from dure.errors import first_line
from dure.machine.devices import device_of_model
from dure.parallel.pipeline.stage import Microbatch
from dure.parallel.tensor_comparison import first_difference, tolerance_same_operations
from dure.randomness.seeds import generators_state, restore_generators
from dure.split.separate_models.sides import SeparateDividedModel
from dure.split.separate_models.stage import seed_part
from dure.split.sides import SideRunner
from dure.tasks.loss_shares import CountedLoss, LossShare
from dure.tasks.parts import JoinedTask, ModelParts

_WHAT = "head and tail apart give the loss and gradients of the model undivided"


class SplitStepResult(NamedTuple):
    """Results of a step: loss, gradients by name, and buffers after the step."""

    loss: Tensor
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]


def prove(task: JoinedTask, model: nn.Module, examples: int) -> Proof | None:
    """Compare a step of the parts with a step of the undivided model; the model is unchanged.

    Returns None without a reference: the task returns the same model object each time, or the
    undivided model raises an error, as it does if a tail writes into a value that its head needs.

    Raises ValueError if the two differ.
    """
    started = time.perf_counter()
    one, other = unused_copy(model, task, 0), unused_copy(model, task, 0)
    if one is other or model in (one, other):
        return None
    assert isinstance(one, ModelParts)
    assert isinstance(other, ModelParts)
    train, _ = examples_for(task)
    device = device_of_model(model)
    task = task.on(device)
    before = generators_state()
    try:
        indices = torch.arange(examples) % len(train)
        inputs, targets = reader_on(train, device)(indices)
        batch = Microbatch(examples, LossShare(1.0, 1.0), lambda: (inputs, targets))
        apart = SeparateDividedModel(task, other, train, examples, seed=0)
        right = _together(one.train(), batch, CountedLoss(task.loss, train))
        found = None if right is None else _found(right, apart, batch)
    finally:
        restore_generators(before)
    if right is None:
        return None
    if found is not None:
        raise ValueError(
            f"head and tail apart {found}, so something besides the head's output passes from one "
            "to the other: let the head return it"
        )
    return Proof(_WHAT, time.perf_counter() - started)


def _together(model: ModelParts, batch: Microbatch, losses: CountedLoss) -> SplitStepResult | None:
    for place, part in model.there.items():
        part.register_forward_pre_hook(partial(_seeded, place))
    try:
        with torch.enable_grad():
            outputs = model(batch.content[0])
            found = losses.mean(outputs, batch.targets, batch.examples)
            found.loss.backward()  # type: ignore[no-untyped-call]
    except Exception:
        return None
    gradients = {name: one.grad for name, one in model.named_parameters()}
    return SplitStepResult(found.loss.detach(), gradients, dict(model.named_buffers()))


def _seeded(place: int, module: nn.Module, given: Any) -> None:
    seed_part(0, place, step=0, number=0)


def _found(right: SplitStepResult, apart: SeparateDividedModel, batch: Microbatch) -> str | None:
    """Return the difference of the parts from the undivided model, in words; None if they agree."""
    try:
        tried = _apart(apart, batch)
    except Exception as error:
        said = f"{type(error).__name__}: {first_line(error)}"
        return f"fail although the undivided model does not ({said})"
    found = _difference(right, tried)
    return None if found is None else f"give {found} than the model undivided"


def _apart(apart: SeparateDividedModel, batch: Microbatch) -> SplitStepResult:
    """Compute a step as client and server do, without the optimizers."""
    head = SideRunner(apart.heads, apart.heads.own(), 0)
    tail = SideRunner(apart.tails, apart.tails.own(), 0)
    values = tail.forward(1, 0, batch, head.forward(0, 0, batch, []))
    missed = 0
    if apart.server.leaving is None:
        back = tail.backward(1, [])
        missed_before = tail.missed(1, batch.examples)
        loss, _ = tail.loss(1)
    else:
        head.forward(2, 0, batch, values)
        at_end = head.backward(2, [])
        loss, _ = head.loss(2)
        missed = head.missed(2, batch.examples)
        back = tail.backward(1, at_end)
        missed_before = tail.passed_on(1, missed)
    head.backward(0, back)
    gradients: dict[str, Tensor | None] = {}
    buffers: dict[str, Tensor] = {}
    for party, lost in ((head, missed_before), (tail, missed)):
        gradients.update(zip(party.side.parameters, party.gradients(lost), strict=True))
        buffers.update(zip(party.side.written, party.side.buffers(), strict=True))
    return SplitStepResult(torch.tensor(loss, dtype=torch.float64), gradients, buffers)


def _difference(right: SplitStepResult, tried: SplitStepResult) -> str | None:
    """Return the first difference, in words; None if there is none."""
    pairs = (
        ("loss", {"": right.loss}, {"": tried.loss.to(right.loss.dtype)}),
        ("gradient of ", right.gradients, tried.gradients),
        ("buffer ", right.buffers, tried.buffers),
    )
    for what, one, other in pairs:
        found = first_difference(one, other, tolerance=tolerance_same_operations)
        if found is not None:
            return f"another {what}{found.name} (by {found.share:.0e} of its largest value)"
    for name, gradient in right.gradients.items():
        if (gradient is None) != (tried.gradients.get(name) is None):
            return f"another gradient of {name}, which is none in one of the two,"
    return None
