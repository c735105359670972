"""Synchronisation of replicated tensors on a mesh: gradients, their norm, and buffers.

stages       the gradient of a parameter that several stages use is the sum of the stages' gradients
data groups  the gradient of every parameter is the sum over the group; buffers that a step changes
             are taken from the first group
norm         of the whole gradient: tensors that several ranks have count once
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dure.collectives.all_reduce import all_reduce
from dure.collectives.group import Group
from dure.parallel.gradients import as_dense
from dure.parallel.mesh.rank_state import RankState
from dure.parallel.mesh.zero import account, names_of
from dure.parallel.tensor.state import divisions
from dure.parallel.zero.partitioned_parameters import gradient_of, set_gradient


@torch.no_grad()
def sum_tied(rank_state: RankState) -> None:
    """Sum gradients of parameters that several stages use; each of these stages gets the sum.

    Each rank with such a parameter sends its gradient to the other ranks with that parameter.
    """
    group = rank_state.groups.pipeline
    for name in rank_state.tied:
        parameter = rank_state.parameters[name]
        ranks = rank_state.keepers[name]
        found = gradient_of(parameter)
        mine = as_dense(found) if found is not None else torch.zeros_like(parameter)
        others = [rank for rank in ranks if rank != group.rank]
        arrived = {rank: torch.empty_like(mine) for rank in others}
        # Begin sends and receives together: two ranks that both send first could deadlock.
        end = group.begin_transfer(
            f"sum of the gradients of {name}",
            [(mine.contiguous(), rank) for rank in others],
            [(arrived[rank], rank) for rank in others],
        )
        end()
        # All ranks add in the order of stages, so that their sums have equal bits.
        total = arrived.get(ranks[0], mine).clone()
        for rank in ranks[1:]:
            total += arrived.get(rank, mine)
        set_gradient(parameter, total)


@torch.no_grad()
def sum_over_replicas(rank_state: RankState) -> None:
    """Sum gradients over the data group; with ZeRO each rank gets the sums of its part."""
    group = rank_state.groups.data
    if group.size == 1 or not rank_state.parameters:
        return
    if rank_state.zero is not None:
        # Only stage 1 sends here: in stages 2 and 3 gradients were reduced during backward.
        rank_state.zero.reduce()
        account(rank_state, computing=False)
        return
    started = time.perf_counter()
    parameters = list(rank_state.parameters.values())
    # A parameter that no rank of the group has used gets no gradient, as on a single worker.
    used = [float(parameter.grad is not None) for parameter in parameters]
    counts = [sum(column) for column in zip(*group.all_gather_values(used), strict=True)]
    summed = [parameter for parameter, count in zip(parameters, counts, strict=True) if count]
    for dtype, device in dict.fromkeys((one.dtype, one.device) for one in summed):
        _sum_flat([p for p in summed if (p.dtype, p.device) == (dtype, device)], group)
    rank_state.group.meter.communication(
        "all-reduce of gradients", started, time.perf_counter(), rank_state.step + 1
    )


def _sum_flat(parameters: Sequence[Tensor], group: Group) -> None:
    """Sum the gradients of parameters of equal dtype and device, in a single message."""
    gradients = [
        as_dense(p.grad) if p.grad is not None else torch.zeros_like(p) for p in parameters
    ]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    all_reduce(flat, algorithm="native", group=group)
    pieces = torch.split(flat, [parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        # a view of the message, whose memory is freed with its last gradient
        parameter.grad = piece.view(parameter.shape)


def share_buffers(rank_state: RankState) -> None:
    """Copy buffers that a step changes, such as running statistics, from the first data group.

    All data groups then have equal buffers, although they have seen different examples.
    """
    group = rank_state.groups.data
    if group.size == 1 or not rank_state.written:
        return
    started = time.perf_counter()
    if rank_state.buffer_sync is not None:
        # Without a trace the written buffers are unknown, so the first rank sends which ones have
        # changed.
        changed = [float(one) for one in rank_state.buffer_sync.changed()]
        flags = group.all_gather_values(changed, "changed buffers")
        rank_state.buffer_sync.take(group, [flag > 0 for flag in flags[0]])
    else:
        buffers = dict(rank_state.model.named_buffers())
        group.broadcast_values([buffers[name] for name in rank_state.written])
    rank_state.group.meter.communication(
        "broadcast of buffers", started, time.perf_counter(), rank_state.step + 1
    )


def clip(rank_state: RankState, largest: float) -> None:
    """Scale the gradient so that its norm over the whole model is at most `largest`.

    Gradients that several stages or tensor neighbours share count once.
    """
    divided = divisions(rank_state.model)
    for parameter in rank_state.parameters.values() if rank_state.zero is None else ():
        if parameter.grad is not None and parameter.grad.is_sparse:
            # Repeated indices must be summed before squaring.
            parameter.grad = parameter.grad.coalesce()
    squares = [
        _square(gradient.values() if gradient.is_sparse else gradient)
        for name, gradient in summed_gradients(rank_state)
        # The first stage or tensor neighbour counts a gradient that several of them share.
        if rank_state.is_first(name) and (name in divided or rank_state.at.tensor == 0)
    ]
    # A number from each rank of the mesh; in float64, because many squares are summed.
    rows = rank_state.group.all_gather_values([sum(squares)], "the norm of the gradient")
    # Without ZeRO every replica has the whole gradient, and contributes its square.
    alike = 1 if rank_state.zero is not None else rank_state.mesh.data
    total = sum(row[0] for row in rows) / alike
    scale = min(1.0, largest / (math.sqrt(total) + 1e-6))
    if scale < 1:
        for _, gradient in summed_gradients(rank_state):
            gradient *= scale


def _square(gradient: Tensor) -> float:
    return float((gradient.abs() if gradient.is_complex() else gradient).double().square().sum())


def summed_gradients(rank_state: RankState) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradients for the optimizer here, by name: with ZeRO this rank's parts."""
    if rank_state.zero is None:
        for name, parameter in rank_state.parameters.items():
            if parameter.grad is not None:
                yield name, parameter.grad
        return
    names = names_of(rank_state)
    for share in rank_state.zero.trained:
        for part in share.held:
            if part.part.grad is not None:
                yield names[share.block.names[part.place]], part.part.grad
