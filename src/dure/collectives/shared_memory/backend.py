"""The torch.distributed backend `dure`: a process group of CPU tensors over shared memory.

Within a host everything goes through `Host`; between hosts through gloo, or a connection of our own
(`across`). Collectives run in the order of their issue: on the caller's thread when nothing is
under way, else on the group's own. Sends and receives do not wait for collectives, nor these for
them.
"""

# mypy: disable-error-code="override, assignment"
# torch's stubs list conveniences for single tensors beside what c10d itself calls, which is what is
# here.

from __future__ import annotations

import atexit
import contextlib
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from dure.collectives.shared_memory.arguments import (
    check_gathered,
    check_like,
    check_scattered,
    copy_back,
    dense_like,
    offers,
    own_block,
    reducible,
    single,
    split,
    unequal,
)
from dure.collectives.shared_memory.calls import (
    ALL_GATHER,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    GATHER,
    NUMBER_OF,
    REDUCE_SCATTER,
    SCATTER,
    SUM,
    Call,
    check_tensor,
    operation_of,
)
from dure.collectives.shared_memory.host import Collectives, Deal, Pull
from dure.collectives.shared_memory.mailbox import ANY, Mailbox
from dure.collectives.shared_memory.meeting import Core, meet
from dure.collectives.shared_memory.pool import empty_shared, pool
from dure.collectives.shared_memory.two_hosts.across import Across, UnderWay
from dure.collectives.shared_memory.work import FINISHED, Line, Work
from dure.errors import DureError

_groups: weakref.WeakSet[SharedMemoryGroup] = weakref.WeakSet()
_unread: list[Tensor] = []  # what peers of groups that this process has left may still read


@dataclass(frozen=True)
class Options:
    """What can be chosen for a group: pass it as `pg_options`.

    core: "c" is the compiled core; "torch" does without; "auto" is C if it was built. A host uses C
    only if all of its ranks do.
    """

    core: Core = "auto"


class Begun(NamedTuple):
    """A call under way. end: waits until the result is there, and tells since when, in seconds of
    `time.perf_counter`; is_read: whether the source may be written to again."""

    end: Callable[[], float]
    is_read: Callable[[], bool]


def create(backend_options: Any, options: Options | None = None) -> SharedMemoryGroup:
    """What torch.distributed calls to make a group; collective over its ranks."""
    size = backend_options.group_size
    names = list(backend_options.global_ranks_in_group) or list(range(size))
    return SharedMemoryGroup(
        backend_options.store,
        backend_options.group_rank,
        size,
        backend_options.timeout,
        names,
        options if isinstance(options, Options) else Options(),
    )


class SharedMemoryGroup(dist.ProcessGroup):
    """A process group of the backend `dure`. Users get it from init_process_group and new_group.

    Beside what every process group has: `all_reduce`, the shortest way to a sum, and
    `monitored_barrier`. Every call checks that all ranks have called the same, raises MismatchError
    on all ranks if not, and goes on working. A rank that dies, leaves, or does not come within the
    group's time-out raises PeerLostError on all others, which ends the group.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        names: Sequence[int],
        options: Options,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size = rank, size
        self._names = tuple(names)
        self._store = store
        self._process = os.getpid()
        self._group_name, self._description = "", ""
        store = PrefixStore(
            f"group {store.add(f'groups of {rank}', 1)}", store
        )  # keys of an earlier group may stand
        self.hosts, self._host = meet(store, rank, names, timeout.total_seconds(), options.core)
        self._across = (
            Across(store, rank, self.hosts, self._host, names) if len(self.hosts) > 1 else None
        )
        self._ranks: Collectives = self._across or self._host
        self._line = Line(f"dure group of {size}")
        if self._across is None:
            self.all_reduce = self._host.direct(self._line, self.all_reduce)
        self._mailbox = Mailbox(self._host, NUMBER_OF)
        self._here = next(host for host in self.hosts if rank in host)
        self._reduce = self._ranks.all_reduce
        self._closed = False
        self._lent: deque[tuple[int, Tensor, list[object]]] = (
            deque()
        )  # a call's number, what all read, what it uses
        self._starting: list[
            object
        ] = []  # what the call uses that was begun last, even if an interrupt came then
        _groups.add(self)

    # What torch asks of a group.

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return "dure"

    getRank, getSize, getBackendName, _get_backend_name = rank, size, name, name  # noqa: N815

    def getGroupName(self) -> str:  # noqa: N802
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._group_name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def get_group_store(self) -> Store:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self._host.timeout = timeout.total_seconds()

    # Reductions.

    def all_reduce(self, tensor: Tensor, op: int = SUM) -> None:
        """The reduction over all ranks, in place and at once; tensor: dense, on the CPU.

        op: a number of `calls.OPERATIONS`. This is what `allreduce` does, without torch's layers
        around it.
        """
        tensor = reducible(tensor, op)
        self._line.now(
            self._telling(lambda: self._in_place(tensor, lambda dense: self._reduce(dense, op)))
        )

    def begin_all_reduce(self, tensor: Tensor, op: int = SUM) -> Callable[[], float]:
        """`all_reduce`, where all ranks know that all of them begin it, for as many elements, as by
        a plan.

        What is returned waits for its end, and tells when that was, in seconds of
        `time.perf_counter`. Where ranks share memory by the C core nobody waits in between: up to
        four are under way, what all have begun is summed by ranks that begin last or have come to
        the end, and all are ended together, by all ranks alike; any other call ends them. Where
        ranks are `apart` the next one may be begun before, and nobody asks the others first, which
        takes longer than a short sum: between two hosts with the core in C ranks that begin
        different things are told when these have come, and otherwise they wait until the group's
        time-out is over. Elsewhere it is done at once, and checked.
        """
        across, tensor = self._across, reducible(tensor, op)
        if self.split_phase and tensor.numel():
            return self.prepare_all_reduce(tensor, op)()
        if across is None or not self.apart or not tensor.is_contiguous():
            self.all_reduce(tensor, op)
            ended = time.perf_counter()
            return lambda: ended
        return self._begin(lambda: across.begin_all_reduce(tensor, op))

    def prepare_all_reduce(
        self, tensor: Tensor, op: int = SUM
    ) -> Callable[[], Callable[[], float]]:
        """`begin_all_reduce` of one tensor, for those who begin it again and again: all that can be
        is looked at here.

        It is begun by calling what is returned, when the one before has ended. MPI calls it a
        persistent request.
        """
        tensor = reducible(tensor, op)
        if not self.split_phase or not tensor.numel():
            return lambda: self.begin_all_reduce(tensor, op)
        message, host, number = tensor, self._host, 0
        if not tensor.is_contiguous() or pool().offset(tensor.data_ptr(), tensor.nbytes) is None:
            message = empty_shared(tensor.shape, dtype=tensor.dtype)  # where peers can read it

        start = host.prepare_all_reduce(message, op)

        def post() -> None:
            nonlocal number
            number = start()

        beginning, ending = self._telling(post), self._telling(lambda: host.end_call(number))

        def end() -> float:
            self._promptly(ending)
            if message is not tensor:
                with torch.inference_mode():  # as in line: it may be a parameter
                    tensor.copy_(message)
            return time.perf_counter()

        def begin() -> Callable[[], float]:
            if message is not tensor:
                with torch.inference_mode():
                    message.copy_(tensor)
            self._promptly(beginning)
            self._lend(number, message, [])
            return end

        return begin

    def _lend(self, number: int, source: Tensor, used: list[object]) -> None:
        """Keeps what a call that was begun reads and writes until no rank needs it; `used`: what
        only this one does."""
        lent, host = self._lent, self._host
        while lent and host.is_read(lent[0][0]):
            lent.popleft()
        lent.append((number, source, used))

    @property
    def apart(self) -> bool:
        """Whether every rank has a host of its own, so that what all begin by a plan is begun at
        once."""
        return self._across is not None and len(self.hosts) == self._size

    @property
    def sends_ahead(self) -> bool:
        """Whether what is begun by a plan travels before the other rank has begun it."""
        return self._across is not None and self._across.sends_ahead

    def _begin(self, call: Callable[[], UnderWay]) -> Callable[[], float]:
        """Begins what is planned; what is returned waits for its end, and tells when that was."""
        begun: list[UnderWay] = []
        self._line.now(self._telling(lambda: begun.append(call())))
        (under_way,) = begun

        def end() -> float:
            self._line.now(self._telling(under_way.finish))
            return under_way.ended() or time.perf_counter()  # it may not have been noted yet

        return end

    @staticmethod
    def _in_place(tensor: Tensor, call: Callable[[Tensor], None]) -> None:
        if tensor.is_contiguous():
            call(tensor)
        else:
            dense = tensor.contiguous()
            call(dense)
            tensor.copy_(dense)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        if len(tensors) == 1 and not getattr(opts, "asyncOp", True):
            self.all_reduce(tensors[0], operation_of(opts.reduceOp))
            return FINISHED  # type: ignore[return-value]
        return self.allreduce_coalesced(tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        op = operation_of(opts.reduceOp) if opts is not None else SUM
        tensors = [reducible(tensor, op) for tensor in tensors]

        def run() -> None:
            for tensor in tensors:
                self._in_place(tensor, lambda dense: self._reduce(dense, op))

        return self._issue(run, opts, tensors)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        op, root = operation_of(opts.reduceOp), opts.rootRank
        tensor = reducible(single(tensors), op)

        def run() -> None:
            dense = tensor if tensor.is_contiguous() else tensor.contiguous()
            self._reduce(dense, op, root)
            if root == self._rank and dense is not tensor:
                tensor.copy_(dense)

        return self._issue(run, opts, [tensor])

    def _checked_blocks(
        self, output: Tensor, blocks: Sequence[Tensor], op: int
    ) -> tuple[Tensor, list[Tensor]]:
        output, blocks = reducible(output, op), [reducible(block, op) for block in blocks]
        if len(blocks) != self._size:
            raise ValueError(
                f"reduce_scatter among {self._size} ranks takes as many inputs, not {len(blocks)}"
            )
        own = blocks[self._rank].numel()
        if own != output.numel():
            raise ValueError(
                f"reduce_scatter into {output.numel()} elements, but the input for rank "
                f"{self._rank} has {own}"
            )
        if any(block.dtype != output.dtype for block in blocks):
            raise ValueError(
                f"reduce_scatter into {output.dtype} of inputs that are not all {output.dtype}"
            )
        return output, blocks

    def _reduce_blocks(self, output: Tensor, blocks: Sequence[Tensor], op: int) -> None:
        """`output` becomes the reduction of all ranks' blocks[rank]."""
        dense = [block.contiguous() for block in blocks]
        sizes = [block.numel() for block in dense]
        call = Call(REDUCE_SCATTER, NUMBER_OF[output.dtype], op, -1, sum(sizes), unequal(sizes))
        out = dense_like(output)
        self._ranks.reduce_scatter(dense, out, op, call)
        copy_back([out], [output])

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> Work:
        op = operation_of(opts.reduceOp) if opts is not None else SUM
        output, blocks = single(outputs), single(inputs)
        output, blocks = self._checked_blocks(output, blocks, op)
        return self._issue(lambda: self._reduce_blocks(output, blocks, op), opts, [output])

    @property
    def split_phase(self) -> bool:
        """Whether what is begun is ended later; the same on all ranks."""
        return self._across is None and self._host.split_phase

    def begin_reduce_scatter(
        self, output: Tensor, source: Tensor, op: int = SUM, own: Sequence[Tensor] = ()
    ) -> Begun:
        """`reduce_scatter_single`, begun on all ranks and ended later: nobody waits in between,
        nothing is copied.

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
        """`begin_reduce_scatter` of the same tensors again and again: what is returned begins it,
        when the message of the one before is read (`Begun.is_read`), and is given what is this
        rank's own."""
        check_scattered(output, source, self._size)
        output, source = reducible(output, op), reducible(source, op)
        if not (output.is_contiguous() and source.is_contiguous()):
            raise ValueError(
                "begin_reduce_scatter takes contiguous tensors: call contiguous() first"
            )
        across = self._across
        if self.split_phase and source.numel():
            start = self._prepare_scatter(output, source, op)
        elif across is not None and self.apart and source.numel():
            begin = partial(across.begin_reduce_scatter, source, output, op)
            start = self._from_source(source, lambda: Begun(self._begin(begin), lambda: True))
        else:
            start = self._from_source(source, lambda: self._scatter_at_once(output, source, op))

        return lambda own: start(own_block(own, output, op))

    def _from_source(
        self, source: Tensor, begin: Callable[[], Begun]
    ) -> Callable[[Sequence[Tensor]], Begun]:
        """Begins after the rank's own block was copied to where it belongs."""

        def begun(own: Sequence[Tensor]) -> Begun:
            if own and source.numel():
                torch.cat(
                    [part.view(-1) for part in own], out=source.view(self._size, -1)[self._rank]
                )
            return begin()

        return begun

    def _scatter_at_once(self, output: Tensor, source: Tensor, op: int) -> Begun:
        blocks = list(source.view(self._size, -1)) if output.numel() else [output] * self._size
        self._line.now(self._telling(lambda: self._reduce_blocks(output, blocks, op)))
        ended = time.perf_counter()
        return Begun(lambda: ended, lambda: True)

    def _prepare_scatter(
        self, output: Tensor, source: Tensor, op: int
    ) -> Callable[[Sequence[Tensor]], Begun]:
        message, host = source, self._host
        if pool().offset(source.data_ptr(), source.nbytes) is None:
            message = empty_shared(source.shape, dtype=source.dtype)  # where peers can read it
        start = host.prepare_reduce_scatter(message, output, op)
        number, block = 0, ()  # of the call that was begun last

        def post() -> None:
            nonlocal number
            number = start(block)

        beginning = self._telling(post)

        def begin(own: Sequence[Tensor]) -> Begun:
            nonlocal block
            if message is not source:
                message.copy_(source)
            block = own
            used = self._starting = [
                output,
                own,
                start,
            ]  # and what `start` keeps: the list that C has of what is own
            self._promptly(beginning)
            block = ()
            self._lend(number, message, used)
            return self._begun(number, used)

        return begin

    def _begun(self, number: int, used: list[object]) -> Begun:
        host = self._host
        ending = self._telling(lambda: host.end_call(number))

        def end() -> float:
            self._promptly(ending)
            used.clear()  # others read the message alone
            return time.perf_counter()

        return Begun(end, lambda: self._closed or host.is_read(number))

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        op = operation_of(opts.reduceOp) if opts is not None else SUM
        for output, source in zip(outputs, inputs, strict=True):
            check_scattered(output, source, self._size)
        pairs = [
            (reducible(output, op), reducible(source, op))
            for output, source in zip(outputs, inputs, strict=True)
        ]

        def run() -> None:
            for output, source in pairs:
                blocks = split(
                    source.contiguous().view(-1), [output.numel()] * self._size, self._size
                )
                self._reduce_blocks(output, blocks, op)

        return self._issue(run, opts, outputs)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Copies.

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        root = opts.rootRank
        for tensor in tensors:
            check_tensor(tensor)

        def run() -> None:
            for tensor in tensors:
                self._in_place(tensor, lambda dense: self._broadcast(dense, root))

        return self._issue(run, opts, tensors)

    def _broadcast(self, dense: Tensor, root: int) -> None:
        call = Call(BROADCAST, NUMBER_OF[dense.dtype], 0, root, dense.numel())
        if root == self._rank:
            self._ranks.exchange(call, [dense], {})
        else:
            self._ranks.exchange(call, [], {root: Pull(0, dense)})

    def _check_gathered(self, outputs: Sequence[Tensor], source: Tensor) -> None:
        for tensor in (source, *outputs):
            check_tensor(tensor)
        if len(outputs) != self._size:
            raise ValueError(
                f"all_gather among {self._size} ranks takes as many outputs, not {len(outputs)}"
            )
        own = outputs[self._rank]
        if own.numel() != source.numel() or any(output.dtype != source.dtype for output in outputs):
            raise ValueError(
                f"all_gather of {source.numel()} elements of {source.dtype}, but the output for "
                f"rank {self._rank} has "
                f"{own.numel()} of {own.dtype}"
            )

    def _gather_all(self, outputs: Sequence[Tensor], source: Tensor) -> None:
        """outputs[i]: what rank i gives; dense. The sizes may differ between ranks, but are known
        to all."""
        sizes = [output.numel() for output in outputs]
        extra = unequal(sizes)
        call = Call(
            ALL_GATHER,
            NUMBER_OF[source.dtype],
            0,
            -1,
            sum(sizes) if extra else source.numel(),
            extra,
        )
        dense = source.contiguous()
        pulls = {rank: Pull(0, output) for rank, output in enumerate(outputs) if rank != self._rank}
        self._ranks.exchange(call, [dense], pulls)
        own = outputs[self._rank]
        if own.data_ptr() != dense.data_ptr():
            own.view(-1).copy_(dense.view(-1))

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        source, targets = single(inputs), single(outputs)
        self._check_gathered(targets, source)

        def run() -> None:
            dense = [dense_like(target) for target in targets]
            self._gather_all(dense, source)
            copy_back(dense, targets)

        return self._issue(run, opts, targets)

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """output_lists[rank][k]: what `rank` gives as inputs[k]."""
        gathers = [
            ([outputs[index] for outputs in output_lists], source)
            for index, source in enumerate(inputs)
        ]
        for targets, source in gathers:
            self._check_gathered(targets, source)

        def run() -> None:
            for targets, source in gathers:
                dense = [dense_like(target) for target in targets]
                self._gather_all(dense, source)
                copy_back(dense, targets)

        return self._issue(run, opts, [tensor for outputs in output_lists for tensor in outputs])

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [source], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        for output, source in zip(outputs, inputs, strict=True):
            check_tensor(output)
            check_tensor(source)
            check_gathered(output, source, self._size)

        def run() -> None:
            for output, source in zip(outputs, inputs, strict=True):
                dense = dense_like(output)
                self._gather_all(
                    dense.view(-1).chunk(self._size) if dense.numel() else [source] * self._size,
                    source,
                )
                copy_back([dense], [output])

        return self._issue(run, opts, outputs)

    def begin_all_gather(self, output: Tensor, source: Tensor) -> Callable[[], float]:
        """`all_gather_single`, begun on all ranks and ended by what is returned, which tells when
        it had ended.

        output, source: contiguous; the source may be its place in the output. Where ranks are
        `apart`, all must know that all begin it, as with `begin_reduce_scatter`; elsewhere it is
        done at once.
        """
        check_tensor(output)
        check_tensor(source)
        check_gathered(output, source, self._size)
        if not (output.is_contiguous() and source.is_contiguous()):
            raise ValueError("begin_all_gather takes contiguous tensors: call contiguous() first")
        across = self._across
        if across is not None and self.apart and source.numel():
            return self._begin(lambda: across.begin_all_gather(output, source))
        blocks = (
            list(output.view(-1).chunk(self._size)) if output.numel() else [source] * self._size
        )
        self._line.now(self._telling(lambda: self._gather_all(blocks, source)))
        ended = time.perf_counter()
        return lambda: ended

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        source, root = single(inputs), opts.rootRank
        targets = single(outputs) if outputs else []
        for tensor in (source, *targets):
            check_like(tensor, source)
        if root == self._rank and len(targets) != self._size:
            raise ValueError(
                f"gather among {self._size} ranks takes as many outputs, not {len(targets)}"
            )

        def run() -> None:
            dense = [dense_like(target) for target in targets]
            pulls = {
                rank: Pull(0, target) for rank, target in enumerate(dense) if rank != self._rank
            }
            deals = [
                Deal(0, source.nbytes if rank == root else 0, dense[rank].nbytes if dense else 0)
                for rank in range(self._size)
            ]
            self._exchange(GATHER, root, source.dtype, [source.contiguous()], pulls, deals)
            if dense:
                dense[self._rank].copy_(source)
            copy_back(dense, targets)

        return self._issue(run, opts, targets)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        output, root = single(outputs), opts.rootRank
        sources = single(inputs) if inputs else []
        for tensor in (output, *sources):
            check_like(tensor, output)
        if root == self._rank and len(sources) != self._size:
            raise ValueError(
                f"scatter among {self._size} ranks takes as many inputs, not {len(sources)}"
            )

        def run() -> None:
            parts = [source.contiguous() for source in sources]
            dense = dense_like(output)
            given = offers(parts) if parts else [(0, 0)] * self._size
            deals = [
                Deal(offset, nbytes, dense.nbytes if rank == root else 0)
                for rank, (offset, nbytes) in enumerate(given)
            ]
            pulls = {} if root == self._rank else {root: Pull(0, dense)}
            self._exchange(SCATTER, root, output.dtype, parts, pulls, deals)
            if parts:
                dense.copy_(parts[self._rank])
            copy_back([dense], [output])

        return self._issue(run, opts, [output])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        if len(outputs) != self._size or len(inputs) != self._size:
            raise ValueError(
                f"all_to_all among {self._size} ranks takes as many inputs and outputs, not "
                f"{len(inputs)} and "
                f"{len(outputs)}"
            )
        for tensor in (*outputs, *inputs):
            check_like(tensor, outputs[0])

        def run() -> None:
            dense = [dense_like(output) for output in outputs]
            self._to_all(dense, [source.contiguous() for source in inputs])
            copy_back(dense, outputs)

        return self._issue(run, opts, outputs)

    def _to_all(self, outputs: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        deals = [
            Deal(offset, nbytes, output.nbytes)
            for (offset, nbytes), output in zip(offers(parts), outputs, strict=True)
        ]
        pulls = {rank: Pull(0, output) for rank, output in enumerate(outputs) if rank != self._rank}
        self._exchange(ALL_TO_ALL, -1, outputs[0].dtype, parts, pulls, deals)
        outputs[self._rank].view(-1).copy_(parts[self._rank].view(-1))

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> Work:
        check_like(output, output)
        check_like(source, output)
        if self._size > 1 and not (output.dim() and source.dim()):
            raise ValueError(
                "all_to_all splits tensors along their first dimension, and a single number has "
                "none"
            )
        for name, tensor, splits in (
            ("output", output, output_splits),
            ("input", source, input_splits),
        ):
            rows = tensor.shape[0] if tensor.dim() else 0
            if splits and (sum(splits) != rows or len(splits) != self._size):
                raise ValueError(
                    f"all_to_all: {name}s split as {splits} do not make up {rows} rows"
                )
            if not splits and rows % self._size:
                raise ValueError(
                    f"all_to_all: {rows} rows of the {name} do not divide by {self._size} ranks"
                )

        def run() -> None:
            dense = dense_like(output)
            self._to_all(
                split(dense, output_splits, self._size),
                split(source.contiguous(), input_splits, self._size),
            )
            copy_back([dense], [output])

        return self._issue(run, opts, [output])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Work:
        return self._issue(lambda: self._ranks.exchange(Call(BARRIER), [], {}), opts, [])

    def meet(self) -> None:
        """What `barrier` does, at once, without torch's layers around it."""
        self._line.now(self._telling(lambda: self._ranks.exchange(Call(BARRIER), [], {})))

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier with a time-out of its own, whose error names the ranks that did not come.

        wait_all_ranks: accepted as torch has it; the error names all missing ranks in any case.
        """

        def run() -> None:
            before = self._host.timeout
            self._host.timeout = timeout.total_seconds() if timeout is not None else before
            try:
                self._ranks.exchange(Call(BARRIER), [], {})
            finally:
                self._host.timeout = before

        self._line.now(run)

    def _exchange(
        self,
        kind: int,
        root: int,
        dtype: torch.dtype,
        parts: Sequence[Tensor],
        pulls: dict[int, Pull],
        deals: Sequence[Deal],
    ) -> None:
        """An exchange in which ranks know only their own sizes. What a rank keeps for itself does
        not take part."""
        count = sum(part.numel() for part in parts)
        self._ranks.exchange(Call(kind, NUMBER_OF[dtype], 0, root, count), parts, pulls, deals)

    # Messages.

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Work:
        tensor = single(tensors)
        check_tensor(tensor)
        if self._across is not None and to not in self._here:
            return self._across.send(tensor, to, tag)
        return self._mailbox.send(tensor, self._here.index(to), tag)

    @property
    def held(self) -> int:
        """Bytes, headers among them, that leave at once and lie with their receiver until it asks,
        from each rank."""
        return 0 if self._across is not None else self._host.channel_bytes

    def post(self, tensor: Tensor, to: int) -> dist.Work:
        """`send` of a contiguous tensor without torch's layers around it; what has left at once is
        done."""
        check_tensor(tensor)
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor  # as torch sends it
        if self._across is not None and to not in self._here:
            return self._across.send(tensor, to, 0)
        return self._mailbox.post(tensor, self._here.index(to), 0) or FINISHED

    def expect(self, tensor: Tensor, source: int) -> dist.Work:
        """`recv` into a contiguous tensor without torch's layers around it."""
        return self.recv([torch.view_as_real(tensor) if tensor.is_complex() else tensor], source)

    def fetch(self, tensor: Tensor, source: int) -> None:
        """`recv` into a contiguous tensor, waited for, without torch's layers around it."""
        check_tensor(tensor)
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if self._across is not None and source not in self._here:
            self._across.receive(tensor, source, 0).wait()
        else:
            self._mailbox.fetch(tensor, self._here.index(source), 0)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Work:
        tensor = single(tensors)
        check_tensor(tensor)
        if self._across is not None and source not in self._here:
            return self._across.receive(tensor, source, tag)
        return self._mailbox.receive(tensor, self._here.index(source), tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        tensor = single(tensors)
        check_tensor(tensor)
        if self._across is not None:
            raise ValueError(
                f"recv needs to know its source in a group that spans {len(self.hosts)} hosts: "
                f"pass src"
            )
        return self._mailbox.receive(tensor, ANY, tag)

    # The order of calls, and the end.

    def _issue(self, run: Callable[[], None], opts: Any, tensors: Sequence[Tensor]) -> Work:
        """Runs a call at once where the caller waits for it anyway; else in line.

        Arguments have been checked, so that what fails now is a surprise: the others are told, and
        do not wait.
        """
        run = self._telling(run)
        if not getattr(opts, "asyncOp", True):
            self._line.now(run)
            return FINISHED  # type: ignore[return-value]
        return self._line.later(run, tensors)

    def _promptly(self, run: Callable[[], None]) -> None:
        """A call of microseconds of the C core, which knows nothing of torch's modes: at once, if
        nobody is before."""
        if not self._line.begin():
            self._line.now(run)
            return
        try:
            run()
        finally:
            self._line.end()

    def _telling(self, run: Callable[[], None]) -> Callable[[], None]:
        def told() -> None:
            try:
                run()
            except DureError:  # which the others get as well
                raise
            except Exception as error:
                self._host.end(f"failed ({type(error).__name__}: {error})")
                raise

        return told

    def _start_coalescing(self, device: torch.device) -> None:
        """Nothing to do: calls run in the order of their issue in any case."""

    def _end_coalescing(self, device: torch.device) -> Work:
        return self._line.later(lambda: None, [])

    def abort(self) -> None:
        """Ends the group for all ranks at once; what is under way raises PeerLostError
        everywhere."""
        if not self._closed:
            self._host.end("aborted the group")

    def shutdown(self, timeout: timedelta | None = None) -> None:
        """Leaves the group: destroy_process_group calls it. Calls in line end first, or the group
        is aborted."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        seconds = timeout.total_seconds() if timeout is not None else self._host.timeout
        ended = self._line.close(seconds)
        if not self._line.turn.acquire(blocking=False):  # it stays taken: nothing begins any more
            self._host.end("left the group with calls under way")
            ended = self._line.turn.acquire(timeout=1) and self._line.close(1)
        self._host.leave()
        if self._across is not None:
            self._across.close()
        _unread.extend(source for number, source, _ in self._lent if not self._host.is_read(number))
        for name in (
            "all_reduce",
            "reduce_scatter",
            "exchange",
            "prepare_reduce_scatter",
            "prepare_all_reduce",
            "begin_reduce_scatter",
            "begin_all_reduce",
            "end_call",
        ):
            setattr(self._ranks, name, _destroyed)
        self._reduce = self.all_reduce = _destroyed
        if (
            self._mailbox.close() and ended
        ):  # else somebody still uses what would go: a few hundred bytes stay
            self._host.close()


@atexit.register
def leave_all() -> None:
    """A process that ends without destroying its groups leaves them, so that no peer waits for
    it."""
    for group in list(_groups):
        with contextlib.suppress(Exception):
            if not group._closed and os.getpid() == group._process:
                group._host.leave()


def _abandon_all() -> None:
    for group in list(_groups):
        group._line.abandon()
        if group._across is not None:
            group._across.abandon()


os.register_at_fork(after_in_child=_abandon_all)


def _destroyed(*_: Any) -> None:
    raise RuntimeError("this process group was destroyed: make a new one")
