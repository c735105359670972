"""What ranks that have a host each begin by a plan: at once, with several calls under way.

Nobody asks the others first whether they begin the same. Two hosts have a connection of their own
(`duplex`), where both cores are C; more hosts, and the core in torch, have gloo. Both are handed
tensors that are contiguous and stay as they are until the call is over.
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
    Call,
    bytes_of,
)
from dure.collectives.shared_memory.portable import reduced
from dure.collectives.shared_memory.two_hosts.duplex import Duplex

_REDUCE_OPS = [getattr(dist.ReduceOp, name.upper()) for name in OPERATIONS]


class Carried(NamedTuple):
    """What is on its way.

    work: `wait(timedelta)` raises RuntimeError if it has not come by then, or never will;
    `is_completed()` tells whether one of these is certain. then: makes the result of what has come.
    ended: when it came, in seconds of `time.perf_counter`; 0 as long as that is not known.
    """

    work: Any
    then: Callable[[], None]
    ended: Callable[[], float]


class Planned(Protocol):
    """Begins the calls. op: a number of `calls.OPERATIONS`."""

    def all_reduce(self, call: Call, tensor: Tensor, op: int) -> Carried: ...

    def reduce_scatter(self, call: Call, source: Tensor, out: Tensor, op: int) -> Carried:
        """source: a block a rank; out: this rank's."""

    def all_gather(self, call: Call, whole: Tensor, own: Tensor) -> Carried:
        """whole: a block a rank; own: this rank's, maybe its place in `whole`."""

    def close(self) -> None: ...

    def abandon(self) -> None:
        """In a child that was forked."""


class OverDuplex:
    """Two hosts. here: which of them this is, 0 or 1. Sums are formed in the order of hosts."""

    def __init__(self, duplex: Duplex, here: int) -> None:
        self._duplex = duplex
        self._here = here
        self._there = 1 - here
        self.close = duplex.close
        self.abandon = duplex.abandon

    def all_reduce(self, call: Call, tensor: Tensor, op: int) -> Carried:
        return self._begun(call, tensor, tensor, tensor)

    def reduce_scatter(self, call: Call, source: Tensor, out: Tensor, op: int) -> Carried:
        # The other's block leaves; what comes is its part of the own one.
        blocks = source.view(2, -1)
        return self._begun(call, blocks[self._there], out, blocks[self._here])

    def all_gather(self, call: Call, whole: Tensor, own: Tensor) -> Carried:
        blocks = whole.view(2, -1)
        # Only the other's block travels into `whole`; the own one is copied, unless it is there.
        if own.data_ptr() != blocks[self._here].data_ptr():
            blocks[self._here].copy_(own.view(-1))
        return self._begun(call, own, blocks[self._there])

    def _begun(self, call: Call, out: Tensor, into: Tensor, own: Tensor | None = None) -> Carried:
        exchange = self._duplex.begin(call, out, into, own)
        return Carried(exchange, lambda: None, lambda: exchange.ended)


class OverGloo:
    """Any number of hosts. group: gloo's, with a rank a host."""

    def __init__(self, group: Any, size: int) -> None:
        self._group = group
        self._size = size

    def all_reduce(self, call: Call, tensor: Tensor, op: int) -> Carried:
        work, operation = workable(tensor, op)
        return _noted(
            self._group.allreduce([work], reduce_options(operation)),
            lambda: settle(work, op, tensor, self._size),
        )

    def reduce_scatter(self, call: Call, source: Tensor, out: Tensor, op: int) -> Carried:
        # Blocks are exchanged, and reduced here in the order of hosts: half of what an all-reduce
        # sends.
        work, operation = workable(source.view(-1), op)
        arriving = torch.empty_like(work)
        blocks = list(arriving.view(self._size, -1))
        return _noted(
            self._group.alltoall_base(arriving, work, [], [], dist.AllToAllOptions()),
            lambda: settle(reduced(blocks, operation), op, out.view(-1), self._size),
        )

    def all_gather(self, call: Call, whole: Tensor, own: Tensor) -> Carried:
        return _noted(
            self._group._allgather_base(bytes_of(whole), bytes_of(own), AllgatherOptions()),
            lambda: None,
        )

    def close(self) -> None:
        pass  # gloo closes its connections itself

    def abandon(self) -> None:
        pass


def _noted(work: Any, then: Callable[[], None]) -> Carried:
    """A work of gloo, with the time of its end."""
    # gloo does not say when a call has ended: a callback looks at the clock, on gloo's thread.
    moments: list[float] = []
    work.get_future().add_done_callback(lambda _: moments.append(time.perf_counter()))
    return Carried(work, then, lambda: moments[0] if moments else 0.0)


# What gloo can reduce.


def workable(tensor: Tensor, op: int) -> tuple[Tensor, int]:
    """The values in a dtype in which gloo reduces, and the operation on them.

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
    """gloo's options for an all-reduce. op: a number of `calls.OPERATIONS`."""
    options = dist.AllreduceOptions()
    options.reduceOp = _REDUCE_OPS[op]
    return options


def settle(total: Tensor, op: int, into: Tensor, size: int) -> None:
    """The reduction of `size` ranks, as gloo left it, where it belongs."""
    # The division writes where the result belongs: a pass over the tensor less.
    if op == AVG and total.dtype == into.dtype:
        torch.div(total, size, out=into)
        return
    if op == AVG:
        total.div_(size)
    if total is not into:
        into.copy_(total)
