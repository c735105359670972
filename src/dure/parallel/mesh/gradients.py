"""What ranks of a mesh hold alike, and how it stays alike: gradients of shared parameters, norms,
buffers.

stages       a parameter that several of them use: its gradient is the sum of theirs, on each
data groups  the gradient of every parameter is the sum over the group; buffers that a step changes
are the first's
norm         of the whole gradient: what several ranks hold alike counts once
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dure.collectives.all_reduce import all_reduce
from dure.parallel.gradients import as_dense
from dure.parallel.mesh import zero as mesh_zero
from dure.parallel.tensor.state import divisions
from dure.parallel.zero.away import gradient_of, set_gradient

if TYPE_CHECKING:
    from dure.parallel.mesh.strategy import ParallelLearner


@torch.no_grad()
def sum_tied(learner: ParallelLearner) -> None:
    """Parameters that several stages use: the gradient is the sum of theirs, in order of stages, on
    each."""
    group = learner.groups.pipeline
    for name in learner.tied:
        parameter, ranks = learner.parameters[name], learner.keepers[name]
        found = gradient_of(parameter)
        mine = as_dense(found) if found is not None else torch.zeros_like(parameter)
        others = [rank for rank in ranks if rank != group.rank]
        arrived = {rank: torch.empty_like(mine) for rank in others}
        end = group.begin_transfer(
            f"sum of the gradients of {name}",
            [(mine.contiguous(), rank) for rank in others],
            [(arrived[rank], rank) for rank in others],
        )
        end()
        total = sum(
            (arrived.get(rank, mine) for rank in ranks[1:]),
            start=arrived.get(ranks[0], mine).clone(),
        )
        set_gradient(parameter, total)


@torch.no_grad()
def sum_over_replicas(learner: ParallelLearner) -> None:
    """Gradients are the sums over the data group; with ZeRO each rank is left with those of its
    part."""
    group = learner.groups.data
    if group.size == 1 or not learner.parameters:
        return
    if learner.zero is not None:
        learner.zero.reduce()
        mesh_zero.account(learner, computing=False)
        return
    started = time.perf_counter()
    parameters = list(learner.parameters.values())
    used = [float(parameter.grad is not None) for parameter in parameters]
    alike = [sum(column) for column in zip(*group.all_gather_values(used), strict=True)]
    summed = [parameter for parameter, count in zip(parameters, alike, strict=True) if count]
    for alike_type in dict.fromkeys((parameter.dtype, parameter.device) for parameter in summed):
        same = [
            parameter for parameter in summed if (parameter.dtype, parameter.device) == alike_type
        ]
        gradients = [as_dense(p.grad) if p.grad is not None else torch.zeros_like(p) for p in same]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        all_reduce(flat, algorithm="native", group=group)
        for parameter, piece in zip(
            same, torch.split(flat, [p.numel() for p in same]), strict=True
        ):
            parameter.grad = piece.view(parameter.shape)
    learner.group.meter.communication(
        "all-reduce of gradients", started, time.perf_counter(), learner.step + 1
    )


def share_buffers(learner: ParallelLearner) -> None:
    """Buffers that a step changes, as running statistics, are everywhere those of the first data
    group."""
    group = learner.groups.data
    if group.size == 1 or not learner.written:
        return
    started = time.perf_counter()
    if (
        learner.speaking is not None
    ):  # nobody has looked into the model: those that forward passes have changed
        flags = group.all_gather_values(
            [float(changed) for changed in learner.speaking.changed()], "changed buffers"
        )
        learner.speaking.take(group, [flag > 0 for flag in flags[0]])
    else:
        buffers = dict(learner.model.named_buffers())
        group.broadcast_values([buffers[name] for name in learner.written])
    learner.group.meter.communication(
        "broadcast of buffers", started, time.perf_counter(), learner.step + 1
    )


def clip(learner: ParallelLearner, largest: float) -> None:
    """Scales the gradient so that its norm over the whole model is at most `largest`.

    What several stages or tensor neighbours hold alike counts once.
    """
    divided = divisions(learner.model)
    for parameter in learner.parameters.values() if learner.zero is None else ():
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = (
                parameter.grad.coalesce()
            )  # an element that is there several times is one
    squares = [
        _square(gradient.values() if gradient.is_sparse else gradient)
        for name, gradient in summed_gradients(learner)
        if learner.keepers[name][0] == learner.at.pipeline
        and (name in divided or learner.at.tensor == 0)
    ]
    rows = learner.group.all_gather_values([sum(squares)], "the norm of the gradient")
    alike = (
        1 if learner.zero is not None else learner.strategy.mesh.data
    )  # else each replica has the whole
    total = sum(row[0] for row in rows) / alike
    scale = min(1.0, largest / (math.sqrt(total) + 1e-6))
    for _, gradient in summed_gradients(learner):
        if scale < 1:
            gradient *= scale


def _square(gradient: Tensor) -> float:
    return float((gradient.abs() if gradient.is_complex() else gradient).double().square().sum())


def summed_gradients(learner: ParallelLearner) -> Iterator[tuple[str, Tensor]]:
    """What the optimizer will use here: gradients, or with ZeRO this rank's parts of them, by
    name."""
    if learner.zero is None:
        yield from ((name, p.grad) for name, p in learner.parameters.items() if p.grad is not None)
        return
    names = mesh_zero.names_of(learner)
    for share in learner.zero.trained:
        for held in share.held:
            if held.part.grad is not None:
                yield names[share.block.names[held.place]], held.part.grad
