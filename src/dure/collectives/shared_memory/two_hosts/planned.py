"""Planned calls of ranks on separate hosts: begun at once, with several calls in progress.

Ranks do not check first that the others begin the same call. Two hosts use dure's own connection
(`duplex`) if both have the C core; more hosts, and the torch core, use gloo. Both take tensors that
are contiguous and stay unchanged until the end of the call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from dure.collectives.shared_memory.calls import (
    AVG,
    BAND,
    BOR,
    MAX,
    MIN,
    OPERATIONS,
    PRODUCT,
    SUM,
    CollectiveCall,
    bytes_of,
)
from dure.collectives.shared_memory.portable import reduced
from dure.collectives.shared_memory.two_hosts.duplex import Duplex

_REDUCE_OPS = [getattr(dist.ReduceOp, name.upper()) for name in OPERATIONS]


class PlannedCall(NamedTuple):
    """Call in progress.

    work: `wait(timedelta)` raises RuntimeError after the timeout or a failure; `is_completed()`
    returns whether the work has ended or failed. then: computes the result from the received data.
    ended: time of arrival, in seconds of `time.perf_counter`; 0 while unknown.
    """

    work: Any
    then: Callable[[], None]
    ended: Callable[[], float]


class PlannedCollectives(Protocol):
    """Carrier of planned calls. op: a number of `calls.OPERATIONS`."""

    def all_reduce(self, call: CollectiveCall, tensor: Tensor, op: int) -> PlannedCall: ...

    def reduce_scatter(
        self, call: CollectiveCall, source: Tensor, out: Tensor, op: int
    ) -> PlannedCall:
        """Begin a reduce-scatter. source: a block for each rank; out: this rank's result."""

    def all_gather(self, call: CollectiveCall, whole: Tensor, own: Tensor) -> PlannedCall:
        """Begin an all-gather.

        whole: a block for each rank; own: this rank's tensor, possibly its block in `whole`.
        """

    def close(self) -> None: ...

    def abandon(self) -> None:
        """Detach from the connections in a forked child."""


class PlannedOverDuplex:
    """Carrier between two hosts. here: this host, 0 or 1. Sums are formed in the order of hosts."""

    def __init__(self, duplex: Duplex, here: int) -> None:
        self._duplex = duplex
        self._here = here
        self._there = 1 - here
        self.close = duplex.close
        self.abandon = duplex.abandon

    def all_reduce(self, call: CollectiveCall, tensor: Tensor, op: int) -> PlannedCall:
        return self._begun(call, tensor, tensor, tensor)

    def reduce_scatter(
        self, call: CollectiveCall, source: Tensor, out: Tensor, op: int
    ) -> PlannedCall:
        # Sends the other host's block, and receives the other host's part of the own block.
        blocks = source.view(2, -1)
        return self._begun(call, blocks[self._there], out, blocks[self._here])

    def all_gather(self, call: CollectiveCall, whole: Tensor, own: Tensor) -> PlannedCall:
        blocks = whole.view(2, -1)
        # Only the other host's block is received; the own block is copied unless already in place.
        if own.data_ptr() != blocks[self._here].data_ptr():
            blocks[self._here].copy_(own.view(-1))
        return self._begun(call, own, blocks[self._there])

    def _begun(
        self, call: CollectiveCall, out: Tensor, into: Tensor, own: Tensor | None = None
    ) -> PlannedCall:
        exchange = self._duplex.begin(call, out, into, own)
        return PlannedCall(exchange, lambda: None, lambda: exchange.ended)


class PlannedOverGloo:
    """Carrier between any number of hosts. group: gloo's group, with a rank for each host."""

    def __init__(self, group: Any, size: int) -> None:
        self._group = group
        self._size = size

    def all_reduce(self, call: CollectiveCall, tensor: Tensor, op: int) -> PlannedCall:
        work, operation = workable(tensor, op)
        return _noted(
            self._group.allreduce([work], reduce_options(operation)),
            lambda: settle(work, op, tensor, self._size),
        )

    def reduce_scatter(
        self, call: CollectiveCall, source: Tensor, out: Tensor, op: int
    ) -> PlannedCall:
        # Blocks are exchanged and reduced here, in the order of hosts: half of the bytes of an
        # all-reduce.
        work, operation = workable(source.view(-1), op)
        arriving = torch.empty_like(work)
        blocks = list(arriving.view(self._size, -1))
        return _noted(
            self._group.alltoall_base(arriving, work, [], [], dist.AllToAllOptions()),
            lambda: settle(reduced(blocks, operation), op, out.view(-1), self._size),
        )

    def all_gather(self, call: CollectiveCall, whole: Tensor, own: Tensor) -> PlannedCall:
        return _noted(
            self._group._allgather_base(bytes_of(whole), bytes_of(own), AllgatherOptions()),
            lambda: None,
        )

    def close(self) -> None:
        pass  # gloo closes its connections itself

    def abandon(self) -> None:
        pass


def _noted(work: Any, then: Callable[[], None]) -> PlannedCall:
    """Return a work of gloo, with the time of its end."""
    # gloo does not report the end time: a callback reads the clock, on gloo's thread.
    moments: list[float] = []
    work.get_future().add_done_callback(lambda _: moments.append(time.perf_counter()))
    return PlannedCall(work, then, lambda: moments[0] if moments else 0.0)


# What gloo can reduce.


def workable(tensor: Tensor, op: int) -> tuple[Tensor, int]:
    """Return the values in a dtype that gloo reduces, and the operation on them.

    Averages are sums here, and are divided at the end.
    """
    operation = SUM if op == AVG else op
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return tensor.float(), operation
    if tensor.dtype == torch.int16:
        return tensor.int(), operation
    # Bools are bytes of 0 and 1, so `or` is their maximum and `and` their minimum.
    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8), {SUM: MAX, BOR: MAX, PRODUCT: MIN, BAND: MIN}.get(
            operation, operation
        )
    return tensor, operation


def reduce_options(op: int) -> Any:
    """Return gloo's options for an all-reduce. op: a number of `calls.OPERATIONS`."""
    options = dist.AllreduceOptions()
    options.reduceOp = _REDUCE_OPS[op]
    return options


def settle(total: Tensor, op: int, into: Tensor, size: int) -> None:
    """Write gloo's reduction of `size` ranks to its destination."""
    # The division writes directly to the destination, which saves a pass over the tensor.
    if op == AVG and total.dtype == into.dtype:
        torch.div(total, size, out=into)
        return
    if op == AVG:
        total.div_(size)
    if total is not into:
        into.copy_(total)
