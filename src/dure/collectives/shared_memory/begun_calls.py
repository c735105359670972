"""Calls that begin now and end later, in a sequence that all ranks know.

The sequence is a plan such as the order of layers in a backward pass.

    a single host, C core   split-phase: up to four calls in progress, without a wait in between;
                            ranks read each other's messages in place
    a host for each rank    planned: several calls in progress, sequential on the link
    otherwise               synchronous, and checked

In the first two cases no rank checks that the others begin the same call; see `begin_all_reduce`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from dure.collectives.shared_memory.arguments import (
    check_gathered,
    check_scattered,
    own_block,
    reducible,
)
from dure.collectives.shared_memory.calls import SUM, check_tensor
from dure.collectives.shared_memory.host import Host
from dure.collectives.shared_memory.overlap_checks import check_own_place
from dure.collectives.shared_memory.pool import empty_shared, pool
from dure.collectives.shared_memory.torch_collectives import TorchCollectives
from dure.collectives.shared_memory.two_hosts.inter_host import InterHostCollectives, PendingCall
from dure.collectives.shared_memory.work import CallQueue
from dure.collectives.transport import BegunCall
from dure.errors import CallError


class BegunCalls:
    """Begun calls of a rank.

    across: set if the group spans hosts. op: a number of `calls.OPERATIONS`.
    """

    def __init__(
        self,
        host: Host,
        across: InterHostCollectives | None,
        line: CallQueue,
        moves: TorchCollectives,
        rank: int,
        size: int,
    ) -> None:
        self._host = host
        self._across = across
        self._line = line
        self._moves = moves
        self._rank = rank
        self._size = size
        self._closed = False
        self._lent: deque[tuple[int, Tensor, list[object]]] = deque()
        """For each begun call: its number, the message that all ranks read, and other objects."""
        self._starting: list[object] = []
        """Objects that the last begun call uses: kept even if an interrupt comes before `_lend`."""

    @property
    def apart(self) -> bool:
        """Whether every rank has a separate host: planned calls then begin at once."""
        return self._across is not None and self._across.apart

    @property
    def split_phase(self) -> bool:
        """Whether begun calls end later; the same on all ranks."""
        return self._across is None and self._host.split_phase

    def close(self) -> list[Tensor]:
        """Refuse further calls; return the messages that other ranks may still read."""
        self._closed = True
        return [source for number, source, _ in self._lent if not self._host.is_read(number)]

    # All-reduce.

    def begin_all_reduce(self, tensor: Tensor, op: int = SUM) -> Callable[[], float]:
        """Begin an `all_reduce`; return a function that waits for its end and returns its time.

        All ranks begin it by a plan, for the same number of elements. The time is in seconds of
        `time.perf_counter`.

        If ranks share memory through the C core, the beginning does not wait. Up to four calls are
        in progress. A call that all ranks have begun is summed by ranks that begin later, or that
        wait for the end. All ranks end all calls together, and any other call ends them as well.

        If ranks are `apart`, the next call may begin before this call has ended. Ranks do not ask
        each other first, because that takes longer than a short sum. Ranks that begin different
        calls get a MismatchError when the data arrive, between two hosts with the C core; otherwise
        they wait until the group's timeout.

        In other cases the call is synchronous and checked.
        """
        across = self._across
        tensor = reducible(tensor, op)
        if self.split_phase and tensor.numel():
            return self.prepare_all_reduce(tensor, op)()
        if across is None or not self.apart or not tensor.is_contiguous():
            return self._at_once(lambda: self._moves.all_reduce(tensor, op))
        return self._planned(lambda: across.begin_all_reduce(tensor, op))

    def prepare_all_reduce(
        self, tensor: Tensor, op: int = SUM
    ) -> Callable[[], Callable[[], float]]:
        """Prepare a repeated `begin_all_reduce` of a tensor; the returned function begins it.

        All possible checks are made here. The call may begin when the previous call has ended. MPI
        calls this a persistent request.
        """
        tensor = reducible(tensor, op)
        # No preparation is needed, and memory without elements has no address in the pool.
        if not self.split_phase or not tensor.numel():
            return lambda: self.begin_all_reduce(tensor, op)
        # `post`, `end` and `begin` share the number of the last begun call: the next begins only
        # when the previous call has ended.
        host = self._host
        number = 0
        message = tensor
        if not tensor.is_contiguous() or pool().offset(tensor.data_ptr(), tensor.nbytes) is None:
            message = empty_shared(tensor.shape, dtype=tensor.dtype)  # where peers can read it

        start = host.prepare_all_reduce(message, op)

        def post() -> None:
            nonlocal number
            number = start()

        def end() -> float:
            self._line.promptly(lambda: host.end_call(number))
            if message is not tensor:
                with torch.inference_mode():  # as in queued calls: it may be a parameter
                    tensor.copy_(message)
            return time.perf_counter()

        def begin() -> Callable[[], float]:
            if message is not tensor:
                with torch.inference_mode():
                    message.copy_(tensor)
            # Kept until all ranks have read it, even if the caller drops its reference.
            self._line.promptly(post)
            self._lend(number, message, [])
            return end

        return begin

    # Reduce-scatter.

    def begin_reduce_scatter(
        self, output: Tensor, source: Tensor, op: int = SUM, own: Sequence[Tensor] = ()
    ) -> BegunCall:
        """Begin a `reduce_scatter_single` on all ranks, which ends later.

        No rank waits in between, and nothing is copied.

        output, source: contiguous. If ranks share memory through the C core, a source outside
        shared memory (`empty_shared`) is copied there first, and any other call ends the calls in
        progress. If ranks are `apart`, all have to begin it by a plan, as in `begin_all_reduce`;
        over gloo, another number of elements from a peer ends the process. In other cases the call
        is synchronous. own: contiguous tensors that together are this rank's own block, which no
        other rank reads, if the block is not in `source`; unchanged until the end.
        """
        return self.prepare_reduce_scatter(output, source, op)(own)

    def prepare_reduce_scatter(
        self, output: Tensor, source: Tensor, op: int = SUM
    ) -> Callable[[Sequence[Tensor]], BegunCall]:
        """Prepare a repeated `begin_reduce_scatter` of the same tensors.

        The returned function begins the call, and takes this rank's own block. It may be called
        when the previous message is read (`BegunCall.is_read`).
        """
        check_scattered(output, source, self._size)
        output = reducible(output, op)
        source = reducible(source, op)
        if not (output.is_contiguous() and source.is_contiguous()):
            raise CallError(
                "begin_reduce_scatter takes contiguous tensors: call contiguous() first"
            )
        check_own_place(output, source, self._rank)
        across = self._across
        if self.split_phase and source.numel():
            start = self._prepare_scatter(output, source, op)
        elif across is not None and self.apart and source.numel():
            begin = partial(across.begin_reduce_scatter, source, output, op)
            start = self._from_source(source, lambda: BegunCall(self._planned(begin), lambda: True))
        else:
            start = self._from_source(source, lambda: self._scatter_at_once(output, source, op))

        return lambda own: start(own_block(own, output, op))

    def _from_source(
        self, source: Tensor, begin: Callable[[], BegunCall]
    ) -> Callable[[Sequence[Tensor]], BegunCall]:
        """Return a function that copies the rank's own block into `source` and begins the call."""

        def begun(own: Sequence[Tensor]) -> BegunCall:
            if own and source.numel():
                block = source.view(self._size, -1)[self._rank]
                torch.cat([part.view(-1) for part in own], out=block)
            return begin()

        return begun

    def _scatter_at_once(self, output: Tensor, source: Tensor, op: int) -> BegunCall:
        """Run a synchronous reduce-scatter; the end only returns its time."""
        blocks = list(source.view(self._size, -1)) if output.numel() else [output] * self._size
        end = self._at_once(lambda: self._moves.reduce_scatter(output, blocks, op))
        return BegunCall(end, lambda: True)

    def _prepare_scatter(
        self, output: Tensor, source: Tensor, op: int
    ) -> Callable[[Sequence[Tensor]], BegunCall]:
        """Prepare a split-phase call in the C core; the returned function takes the own block."""
        message = source
        if pool().offset(source.data_ptr(), source.nbytes) is None:
            message = empty_shared(source.shape, dtype=source.dtype)  # where peers can read it
        start = self._host.prepare_reduce_scatter(message, output, op)
        number = 0  # of the call that was begun last
        block: Sequence[Tensor] = ()

        def post() -> None:
            nonlocal number
            number = start(block)

        def begin(own: Sequence[Tensor]) -> BegunCall:
            nonlocal block
            if message is not source:
                message.copy_(source)
            block = own
            # `start` is kept because it holds the list of own parts that C uses.
            used: list[object] = [output, own, start]
            # Before the call is posted: an interrupt may come after that and before `_lend`, and
            # C would write to memory that is gone.
            self._starting = used
            self._line.promptly(post)
            block = ()
            self._lend(number, message, used)
            return self._begun(number, used)

        return begin

    def _begun(self, number: int, used: list[object]) -> BegunCall:
        """Return a split-phase reduce-scatter in progress. used: objects needed until its end."""
        host = self._host

        def end() -> float:
            self._line.promptly(lambda: host.end_call(number))
            used.clear()  # other ranks read only the message
            return time.perf_counter()

        # `number` is an argument, because the closure's number may belong to a later call by then.
        return BegunCall(end, lambda: self._closed or host.is_read(number))

    # All-gather.

    def begin_all_gather(self, output: Tensor, source: Tensor) -> Callable[[], float]:
        """Begin an `all_gather_single` on all ranks.

        The returned function waits for the end and returns its time. output, source: contiguous;
        the source may be its own block in the output. If ranks are `apart`, all have to begin it by
        a plan, as in `begin_reduce_scatter`; in other cases the call is synchronous.
        """
        check_tensor(output)
        check_tensor(source)
        check_gathered(output, source, self._size)
        if not (output.is_contiguous() and source.is_contiguous()):
            raise CallError("begin_all_gather takes contiguous tensors: call contiguous() first")
        check_own_place(source, output, self._rank)
        across = self._across
        if across is not None and self.apart and source.numel():
            return self._planned(lambda: across.begin_all_gather(output, source))
        blocks = (
            list(output.view(-1).chunk(self._size)) if output.numel() else [source] * self._size
        )
        return self._at_once(lambda: self._moves.all_gather(blocks, source))

    # The three ways.

    def _lend(self, number: int, source: Tensor, used: list[object]) -> None:
        """Keep the memory of a begun call until no rank needs it.

        used: objects that only this rank uses.
        """
        lent = self._lent
        # Calls are read in the order of their numbers, so the first unread call ends the search.
        while lent and self._host.is_read(lent[0][0]):
            lent.popleft()
        lent.append((number, source, used))

    def _planned(self, call: Callable[[], PendingCall]) -> Callable[[], float]:
        """Begin a planned call; return a function that waits for its end and returns its time."""
        # `now` returns nothing, so the begun call is stored here.
        begun: list[PendingCall] = []
        self._line.now(lambda: begun.append(call()))
        (under_way,) = begun

        def end() -> float:
            self._line.now(under_way.finish)
            return under_way.ended() or time.perf_counter()  # it may not have been noted yet

        return end

    def _at_once(self, call: Callable[[], None]) -> Callable[[], float]:
        """Run the call now; return a function that returns the time of its end."""
        self._line.now(call)
        ended = time.perf_counter()
        return lambda: ended
