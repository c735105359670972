"""Calls that are begun now and ended later, where all ranks know that all of them begin them.

They know it as by a plan, such as the order of layers in a backward pass.

    one host, the C core    split-phase: up to four are under way, nobody waits in between, and
                            ranks read each other's messages where they lie
    a host for each rank    apart: several are under way, one after another on the link
    otherwise               at once, and checked

In the first two ways nobody asks the others whether they begin the same; see `begin_all_reduce`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from dure.collectives.shared_memory.aliases import check_own_place
from dure.collectives.shared_memory.arguments import (
    check_gathered,
    check_scattered,
    own_block,
    reducible,
)
from dure.collectives.shared_memory.calls import SUM, check_tensor
from dure.collectives.shared_memory.host import Host
from dure.collectives.shared_memory.moves import Moves
from dure.collectives.shared_memory.pool import empty_shared, pool
from dure.collectives.shared_memory.two_hosts.across import Across, UnderWay
from dure.collectives.shared_memory.work import Line
from dure.collectives.transport import Begun
from dure.errors import CallError


class BegunCalls:
    """The begun calls of one rank.

    across: where the group spans hosts. op: a number of `calls.OPERATIONS`.
    """

    def __init__(
        self, host: Host, across: Across | None, line: Line, moves: Moves, rank: int, size: int
    ) -> None:
        self._host = host
        self._across = across
        self._line = line
        self._moves = moves
        self._rank = rank
        self._size = size
        self._closed = False
        self._lent: deque[tuple[int, Tensor, list[object]]] = deque()
        """Of each begun call its number, what all ranks read, and what else the call uses."""
        self._starting: list[object] = []
        """What the last begun call uses: kept even if an interrupt comes before `_lend`."""

    @property
    def apart(self) -> bool:
        """Whether every rank has a host of its own: what all begin by a plan is begun at once."""
        return self._across is not None and self._across.apart

    @property
    def split_phase(self) -> bool:
        """Whether what is begun is ended later; the same on all ranks."""
        return self._across is None and self._host.split_phase

    def close(self) -> list[Tensor]:
        """No more calls; returns what other ranks may still read."""
        self._closed = True
        return [source for number, source, _ in self._lent if not self._host.is_read(number)]

    # All-reduce.

    def begin_all_reduce(self, tensor: Tensor, op: int = SUM) -> Callable[[], float]:
        """`all_reduce` that is begun now and ended later.

        All ranks know that all of them begin it, for as many elements, as by a plan. What is
        returned waits for its end, and tells when that was, in seconds of `time.perf_counter`.

        Where ranks share memory by the C core, nobody waits in between. Up to four are under way.
        What all have begun is summed by ranks that begin last, or that have come to the end. All
        are ended together, by all ranks alike, and any other call ends them as well.

        Where ranks are `apart`, the next one may be begun before this one has ended. Nobody asks
        the others first, because that takes longer than a short sum. Ranks that begin different
        things get a MismatchError when these have come, between two hosts with the core in C;
        otherwise they wait until the group's time-out is over.

        Elsewhere it is done at once, and checked.
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
        """`begin_all_reduce` of one tensor, for callers that begin it again and again.

        All that can be looked at ahead is looked at here.

        It is begun by calling what is returned, when the one before has ended. MPI calls it a
        persistent request.
        """
        tensor = reducible(tensor, op)
        # Nothing to prepare; and memory without elements has no address in the pool.
        if not self.split_phase or not tensor.numel():
            return lambda: self.begin_all_reduce(tensor, op)
        # `post`, `end` and `begin` share the number of the call that was begun last: it is begun
        # again only when the one before has ended.
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
                with torch.inference_mode():  # as in line: it may be a parameter
                    tensor.copy_(message)
            return time.perf_counter()

        def begin() -> Callable[[], float]:
            if message is not tensor:
                with torch.inference_mode():
                    message.copy_(tensor)
            # Kept until all ranks are through with it, even if the caller drops what it has.
            self._line.promptly(post)
            self._lend(number, message, [])
            return end

        return begin

    # Reduce-scatter.

    def begin_reduce_scatter(
        self, output: Tensor, source: Tensor, op: int = SUM, own: Sequence[Tensor] = ()
    ) -> Begun:
        """`reduce_scatter_single`, begun on all ranks and ended later.

        Nobody waits in between, and nothing is copied.

        output, source: contiguous. Where ranks share memory by the C core a source that is not in
        shared memory (`empty_shared`) is copied there first, and any other call ends those that are
        under way. Where ranks are `apart`, all must know that all begin it, as with
        `begin_all_reduce`; where gloo carries it, it ends a process that was sent another number of
        elements. Elsewhere it is done at once.

        own: contiguous tensors that together are this rank's own block, which nobody else reads, if
        it does not lie in `source`; left alone until the end.
        """
        return self.prepare_reduce_scatter(output, source, op)(own)

    def prepare_reduce_scatter(
        self, output: Tensor, source: Tensor, op: int = SUM
    ) -> Callable[[Sequence[Tensor]], Begun]:
        """`begin_reduce_scatter` of the same tensors again and again.

        What is returned begins it, and is given what is this rank's own. It is called when the
        message of the one before is read (`Begun.is_read`).
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
            start = self._from_source(source, lambda: Begun(self._planned(begin), lambda: True))
        else:
            start = self._from_source(source, lambda: self._scatter_at_once(output, source, op))

        return lambda own: start(own_block(own, output, op))

    def _from_source(
        self, source: Tensor, begin: Callable[[], Begun]
    ) -> Callable[[Sequence[Tensor]], Begun]:
        """Begins after the rank's own block was copied to where it belongs."""

        def begun(own: Sequence[Tensor]) -> Begun:
            if own and source.numel():
                block = source.view(self._size, -1)[self._rank]
                torch.cat([part.view(-1) for part in own], out=block)
            return begin()

        return begun

    def _scatter_at_once(self, output: Tensor, source: Tensor, op: int) -> Begun:
        """Where nothing can be begun: the end only tells when it was."""
        blocks = list(source.view(self._size, -1)) if output.numel() else [output] * self._size
        end = self._at_once(lambda: self._moves.reduce_scatter(output, blocks, op))
        return Begun(end, lambda: True)

    def _prepare_scatter(
        self, output: Tensor, source: Tensor, op: int
    ) -> Callable[[Sequence[Tensor]], Begun]:
        """Split-phase, by the C core; what is returned begins it with what is this rank's own."""
        message = source
        if pool().offset(source.data_ptr(), source.nbytes) is None:
            message = empty_shared(source.shape, dtype=source.dtype)  # where peers can read it
        start = self._host.prepare_reduce_scatter(message, output, op)
        number = 0  # of the call that was begun last
        block: Sequence[Tensor] = ()

        def post() -> None:
            nonlocal number
            number = start(block)

        def begin(own: Sequence[Tensor]) -> Begun:
            nonlocal block
            if message is not source:
                message.copy_(source)
            block = own
            # `start` is kept for what it keeps: the list that C has of what is own
            used: list[object] = [output, own, start]
            # Before the call is posted: an interrupt may come after that and before `_lend`, and
            # C would write to memory that is gone.
            self._starting = used
            self._line.promptly(post)
            block = ()
            self._lend(number, message, used)
            return self._begun(number, used)

        return begin

    def _begun(self, number: int, used: list[object]) -> Begun:
        """A split-phase reduce-scatter under way. used: what is needed until its end."""
        host = self._host

        def end() -> float:
            self._line.promptly(lambda: host.end_call(number))
            used.clear()  # others read the message alone
            return time.perf_counter()

        # `number` is this call's, an argument: by then the closure's may be that of a later one.
        return Begun(end, lambda: self._closed or host.is_read(number))

    # All-gather.

    def begin_all_gather(self, output: Tensor, source: Tensor) -> Callable[[], float]:
        """`all_gather_single`, begun on all ranks.

        What is returned ends it, and tells when it had ended.

        output, source: contiguous; the source may be its place in the output. Where ranks are
        `apart`, all must know that all begin it, as with `begin_reduce_scatter`; elsewhere it is
        done at once.
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
        """Keeps what a begun call reads and writes until no rank needs it.

        used: what only this rank uses.
        """
        lent = self._lent
        # Calls are read in the order of their numbers, so the first that is not read ends the
        # search.
        while lent and self._host.is_read(lent[0][0]):
            lent.popleft()
        lent.append((number, source, used))

    def _planned(self, call: Callable[[], UnderWay]) -> Callable[[], float]:
        """Begins what is planned; what is returned waits for its end, and tells when that was."""
        # `now` returns nothing, so the call leaves here what it has begun.
        begun: list[UnderWay] = []
        self._line.now(lambda: begun.append(call()))
        (under_way,) = begun

        def end() -> float:
            self._line.now(under_way.finish)
            return under_way.ended() or time.perf_counter()  # it may not have been noted yet

        return end

    def _at_once(self, call: Callable[[], None]) -> Callable[[], float]:
        """Does it here; what is returned tells when that was."""
        self._line.now(call)
        ended = time.perf_counter()
        return lambda: ended
