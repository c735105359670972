"""The backend's own collectives: gloo, NCCL, MPI, or dure's shared memory.

The backend does not report its traffic, so the meter counts an optimum: for an all-reduce
2(N-1)/N·n elements each way, which a ring reaches, as a single message; for other collectives the
traffic of their direct or linear algorithm. The backend also determines the supported dtypes and
operations, the comparison of NaN and the rounding of half-precision numbers. bool travels as bytes.
Tensors of a device that no backend of the group reaches travel through the CPU's memory.
An average is a sum that is divided here if the backend has no average.

Source: the documentation of torch.distributed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from dure.collectives.algorithms.algorithm import AllReduce
from dure.collectives.group import Group
from dure.collectives.operation import SUM, Reduction, in_torch
from dure.machine.devices import pinned_like


def is_staged(tensor: Tensor, group: Group) -> bool:
    """Return whether a tensor of a device travels through the CPU's memory.

    No backend of the group has access to the device's memory, as where ranks share a device.
    """
    return not tensor.is_cpu and not group.backend(tensor.device)


@contextmanager
def staged(
    read: Sequence[Tensor], written: Sequence[Tensor]
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Context manager: give copies of tensors in the CPU's memory; copy them back afterwards.

    A tensor may be both read and written; its copy is then the same. Copies are in pinned memory.
    """
    copies = {id(tensor): pinned_like(tensor) for tensor in (*read, *written)}
    for tensor in read:
        copies[id(tensor)].copy_(tensor)
    yield [copies[id(tensor)] for tensor in read], [copies[id(tensor)] for tensor in written]
    for tensor in written:
        tensor.copy_(copies[id(tensor)], non_blocking=True)


def _carried(tensor: Tensor) -> Tensor:
    """Return the tensor as backends accept it: bool as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def all_reduce(flat: Tensor, group: Group, reduction: Reduction = SUM) -> None:
    """Reduce over all ranks, in place on every rank. flat: contiguous, of one dimension."""
    if is_staged(flat, group):
        with staged([flat], [flat]) as ((host,), _):
            all_reduce(host, group, reduction)
        return
    # A backend that divides on the way saves a pass over the tensor.
    averages = reduction.op == "avg" and group.transport.averages(flat.device)
    operation = dist.ReduceOp.AVG if averages else in_torch(reduction, flat.dtype)
    dist.all_reduce(_carried(flat), operation, group=group.process_group_of(flat))
    if not averages:
        reduction.finish(flat)
    _count_all_reduce(flat, group)


def is_planned(group: Group) -> bool:
    """Return whether the backend itself runs several planned calls of all ranks at once."""
    return group.transport.apart


def is_split_phase(group: Group) -> bool:
    """Return whether ranks in shared memory end a call later than they begin it, without a wait."""
    return group.transport.split_phase


def prepare_all_reduce(
    flat: Tensor, group: Group, reduction: Reduction = SUM
) -> Callable[[], Callable[[], float]]:
    """Prepare repeated all-reduces of a tensor, in a sequence that all ranks know.

    Returns a function that begins the all-reduce. That function returns a function that waits for
    the end, and returns the time of the end in seconds of `time.perf_counter`. Backends other than
    dure's complete the all-reduce at its beginning.
    """
    if not (group.transport.begins_reductions and flat.is_cpu):
        return prepare_at_once(flat, group, reduction)
    operation = dist.ReduceOp.AVG if reduction.op == "avg" else in_torch(reduction, flat.dtype)
    begin = group.transport.prepare_all_reduce(_carried(flat), operation)

    def begun() -> Callable[[], float]:
        end = begin()
        _count_all_reduce(flat, group)
        return end

    return begun


def prepare_at_once(
    flat: Tensor, group: Group, reduction: Reduction = SUM
) -> Callable[[], Callable[[], float]]:
    """Return the interface of `prepare_all_reduce` for an all-reduce that ends when it begins."""

    def done() -> Callable[[], float]:
        all_reduce(flat, group, reduction)
        ended = time.perf_counter()
        return lambda: ended

    return done


def _count_all_reduce(flat: Tensor, group: Group) -> None:
    """Count a message each way on the meter, with the length of a ring's messages together."""
    nbytes = elements_sent(flat.numel(), group.size, group.rank) * flat.itemsize
    group.meter.sent(nbytes)
    group.meter.received(nbytes)


def reduce(flat: Tensor, group: Group, reduction: Reduction = SUM, root: int = 0) -> None:
    """Reduce over all ranks, in place on `root`; other ranks' tensors are undefined afterwards."""
    if is_staged(flat, group):
        with staged([flat], [flat]) as ((host,), _):
            reduce(host, group, reduction, root)
        return
    operation = in_torch(reduction, flat.dtype)
    dist.reduce(
        _carried(flat), group.global_rank(root), operation, group=group.process_group_of(flat)
    )
    if group.rank == root:
        reduction.finish(flat)
    _count_to(root, flat, group)


def broadcast(flat: Tensor, group: Group, root: int = 0) -> None:
    """Copy the root's tensor into every rank's tensor, in place."""
    if is_staged(flat, group):
        with staged([flat], [flat]) as ((host,), _):
            broadcast(host, group, root)
        return
    dist.broadcast(_carried(flat), group.global_rank(root), group=group.process_group_of(flat))
    _count_from(root, flat, group)


def gather(tensor: Tensor, parts: list[Tensor] | None, group: Group, root: int = 0) -> None:
    """Gather every rank's tensor into the root's `parts`, in order of rank."""
    if is_staged(tensor, group):
        with staged([tensor], parts or []) as ((host,), hosts):
            gather(host, None if parts is None else hosts, group, root)
        return
    into = [_carried(part) for part in parts] if parts is not None else None
    dist.gather(
        _carried(tensor), into, group.global_rank(root), group=group.process_group_of(tensor)
    )
    _count_to(root, tensor, group)


def scatter(tensor: Tensor, parts: list[Tensor] | None, group: Group, root: int = 0) -> None:
    """Send the root's `parts`, in order of rank, into every rank's tensor."""
    if is_staged(tensor, group):
        with staged(parts or [], [tensor]) as (hosts, (host,)):
            scatter(host, None if parts is None else hosts, group, root)
        return
    source = [_carried(part) for part in parts] if parts is not None else None
    dist.scatter(
        _carried(tensor), source, group.global_rank(root), group=group.process_group_of(tensor)
    )
    _count_from(root, tensor, group)


def _count_to(root: int, tensor: Tensor, group: Group) -> None:
    """Count a message of every other rank to the root."""
    if group.rank == root:
        group.meter.received((group.size - 1) * tensor.nbytes)
    else:
        group.meter.sent(tensor.nbytes)


def _count_from(root: int, tensor: Tensor, group: Group) -> None:
    """Count a message of the root to every other rank."""
    if group.rank != root:
        group.meter.received(tensor.nbytes)
        return
    for _ in range(group.size - 1):
        group.meter.sent(tensor.nbytes)


def all_gather(chunks: list[Tensor], group: Group) -> None:
    """Fill all `chunks` in place; on rank r chunk r is complete at the beginning.

    Unequal chunks travel padded.
    """
    if is_staged(chunks[group.rank], group):
        with staged([chunks[group.rank]], chunks) as (_, hosts):
            all_gather(hosts, group)
        return
    # torch needs tensors of equal size, so the rows of a padded matrix are filled.
    mine = chunks[group.rank]
    longest = max(map(Tensor.numel, chunks))
    if all(chunk.numel() == longest for chunk in chunks):
        dist.all_gather(
            [_carried(chunk) for chunk in chunks],
            _carried(mine),
            group=group.process_group_of(mine),
        )
    else:
        padded = mine.new_zeros(group.size, longest)
        padded[group.rank, : mine.numel()] = mine
        dist.all_gather(
            list(_carried(padded)),
            _carried(padded[group.rank]),
            group=group.process_group_of(mine),
        )
        for chunk, row in zip(chunks, padded, strict=True):
            chunk.copy_(row[: chunk.numel()])
    for rank, chunk in enumerate(chunks):
        if rank != group.rank:
            _meter(group, mine, chunk)


def reduce_scatter(
    chunks: list[Tensor], group: Group, reduction: Reduction = SUM, into: Tensor | None = None
) -> None:
    """Reduce the ranks' `chunks`; rank r gets chunk r in `into`, or in the chunk's place.

    Unequal chunks travel padded.
    """
    mine = chunks[group.rank]
    into = mine if into is None else into
    if is_staged(mine, group):
        with staged(chunks, [into]) as (hosts, (host,)):
            reduce_scatter(hosts, group, reduction, host)
        return
    longest = max(map(Tensor.numel, chunks))
    padded = mine.new_zeros(group.size, longest)
    for chunk, row in zip(chunks, padded, strict=True):
        row[: chunk.numel()] = chunk
    # A tensor apart from `into`, which may be shorter than the padded result.
    whole = torch.empty_like(padded[0])
    operation = in_torch(reduction, mine.dtype)
    dist.reduce_scatter(
        _carried(whole), list(_carried(padded)), operation, group=group.process_group_of(mine)
    )
    into.copy_(whole[: into.numel()])
    reduction.finish(into)
    for rank, chunk in enumerate(chunks):
        if rank != group.rank:
            _meter(group, chunk, mine)


def all_to_all(source: Tensor, target: Tensor, group: Group) -> None:
    """Send part j of the flat `source` to rank j; receive part j of `target` from rank j."""
    if is_staged(source, group):
        with staged([source], [target]) as ((from_host,), (to_host,)):
            all_to_all(from_host, to_host, group)
        return
    dist.all_to_all_single(_carried(target), _carried(source), group=group.process_group_of(source))
    part = source[: source.numel() // group.size]
    for _ in range(group.size - 1):
        _meter(group, part, part)


def _meter(group: Group, sent: Tensor, received: Tensor) -> None:
    """Count a message each way; an empty message is not sent."""
    if sent.numel():
        group.meter.sent(sent.nbytes)
    group.meter.received(received.nbytes)


def elements_sent(n: int, size: int, rank: int) -> int:
    """Return the elements that are counted for the all-reduce: 2(N-1)/N·n, rounded down."""
    return 2 * (size - 1) * n // size


def messages_sent(n: int, size: int, rank: int) -> int:
    """Return the messages that are counted for the all-reduce: 1."""
    return 1 if size > 1 and n else 0


def rounds(size: int) -> int:
    """Return the sequential transfers, as in a ring: 2(N-1)."""
    return 2 * (size - 1)


ALL_REDUCE = AllReduce(
    name="native",
    all_reduce=all_reduce,
    elements_sent=elements_sent,
    messages_sent=messages_sent,
    rounds=rounds,
)
