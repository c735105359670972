"""torch core: the same collectives without a C compiler.

It gives the same results, more slowly; tests compare the C core with it.

Tensors pass through shared memory, and torch adds them. The kernel orders memory: a rank that has
written sends a notice through a pipe to each peer, and a peer reads only data announced by a
notice. Messages between two ranks pass through pipes altogether. Every collective begins and ends
with a synchronisation, so no second buffer is needed:

    post the call, copy in | sync | compare the calls, sum or pull | sync | copy the results of
    others out
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dure.collectives.shared_memory.calls import (
    ALL_REDUCE,
    AVG,
    BAND,
    BOR,
    BXOR,
    GATHER,
    MAX,
    MIN,
    NUMBER_OF,
    PRODUCT,
    REDUCE,
    SUM,
    CollectiveCall,
    bytes_of,
    mismatch,
    unequal,
)
from dure.collectives.shared_memory.host import (
    TICK,
    ByteOffer,
    CallProgress,
    Host,
    HostMembers,
    PeerRead,
)
from dure.collectives.shared_memory.pool import SharedMapping, open_of

_REASON_BYTES = 4096
_STAGE_BYTES = 4 << 20
_SEAT = 16  # numbers that each rank publishes about itself
_BEGUN = 0
_FINISHED = 1
_LEFT = 2
_BYTES = 3
_CALL = 4
_SAID = struct.Struct("<qq")  # rank, number of syncs
_LONGEST_WRITE = 1 << 20  # maximum bytes of a body for a write; a pipe takes less anyway


def _smaller(one: Tensor, other: Tensor) -> Tensor:
    """Return the minimum by the C core's definition.

    torch.minimum of 0.0 and -0.0 is either, depending on their position in the tensor.
    """
    return torch.where((one < other) | (one != one), one, other)


def _larger(one: Tensor, other: Tensor) -> Tensor:
    return torch.where((one > other) | (one != one), one, other)


_FOLDS: dict[int, Callable[[Tensor, Tensor], Tensor]] = {
    SUM: torch.add,
    PRODUCT: torch.mul,
    MIN: _smaller,
    MAX: _larger,
    BAND: torch.bitwise_and,
    BOR: torch.bitwise_or,
    BXOR: torch.bitwise_xor,
    AVG: torch.add,
}
_FOLDS_OF_BOOLS = {**_FOLDS, SUM: torch.logical_or, PRODUCT: torch.logical_and}


def reduced(tensors: Sequence[Tensor], op: int) -> Tensor:
    """Return tensors[0] op tensors[1] op …, in this order.

    Half precision is reduced in float32 and rounded once.
    """
    total = folded(tensors, op)
    if op == AVG:
        total = total / len(tensors)
    return total.to(tensors[0].dtype)


def folded(tensors: Sequence[Tensor], op: int) -> Tensor:
    """Return the reduction without its last rounding, and without the division of an average."""
    dtype = tensors[0].dtype
    halves = dtype in (torch.float16, torch.bfloat16)
    fold = (_FOLDS_OF_BOOLS if dtype == torch.bool else _FOLDS)[op]
    total = tensors[0].float() if halves else tensors[0]
    for tensor in tensors[1:]:
        total = fold(total, tensor.float() if halves else tensor)
    return total


@dataclass(frozen=True)
class RankPipes:
    """Pipes of a rank: a pipe for the syncs of its peers, and a pipe for each peer's messages."""

    syncs: tuple[int, int]
    messages: tuple[tuple[int, int], ...]
    wake: tuple[int, int]

    @classmethod
    def made(cls, size: int) -> RankPipes:
        def pipe() -> tuple[int, int]:
            # Nonblocking, because a wait in the kernel would not notice the death of a peer.
            return os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

        return cls(pipe(), tuple(pipe() for _ in range(size)), pipe())

    @property
    def addresses(self) -> list[int]:
        """Descriptors for peers: the write end for syncs, then those for messages, by sender."""
        return [self.syncs[1], *(write for _, write in self.messages)]

    def close(self) -> None:
        for read, write in (self.syncs, *self.messages, self.wake):
            os.close(read)
            os.close(write)


def segment_bytes(size: int) -> int:
    """Return the bytes of the segment of a group of `size` ranks."""
    return _REASON_BYTES + 8 * size * (_SEAT + 3 * size) + 2 * size * _STAGE_BYTES


class PortableHost(Host):
    """Host over torch.

    segment: the group's shared memory, all zeros at first; descriptor: its file, closed by `close`.
    doors: this rank's pipes; addresses: addresses of each rank's `RankPipes`.
    """

    def __init__(
        self,
        members: HostMembers,
        timeout: float,
        segment: SharedMapping,
        descriptor: int,
        doors: RankPipes,
        addresses: Sequence[Sequence[int]],
    ) -> None:
        super().__init__(members, timeout)
        self._doors = doors
        self._descriptor = descriptor
        size = members.size
        rank = members.rank
        memory = segment.tensor()
        # The segment: the reason of the end, numbers of each rank (`_SEAT` each), deals (offset,
        # offered, wanted), stages.
        numbers = memory[_REASON_BYTES:][: 8 * size * (_SEAT + 3 * size)].view(torch.int64)
        self._reason = memory[:_REASON_BYTES]
        self._seats = numbers[: size * _SEAT].view(size, _SEAT)
        self._deals = numbers[size * _SEAT :].view(size, size, 3)
        stages = memory[segment_bytes(size) - 2 * size * _STAGE_BYTES :][: 2 * size * _STAGE_BYTES]
        self._stages = stages.view(size, 2, _STAGE_BYTES)  # of each rank: its input, its result
        self._arrived = [0] * size
        self._syncs = self._number = 0
        self._inbox = b""  # a message about a sync that has come in part
        self._writers = [-1] * size
        self._letters = [-1] * size
        for peer in range(size):
            if peer != rank:
                self._writers[peer] = _opened(members.processes[peer], addresses[peer][0])
                self._letters[peer] = _opened(members.processes[peer], addresses[peer][1 + rank])
        # Peers whose pipe was full: `bell_wait` wakes when one of them takes bytes again.
        self._blocked: set[int] = set()
        self._bell = self._waiters = 0

    # Synchronisation.

    def _sync(self) -> None:
        """Notify all ranks that this rank has arrived, and wait until all have."""
        self._syncs += 1
        self._arrived[self.members.rank] = self._syncs
        said = _SAID.pack(self.members.rank, self._syncs)
        for writer in self._writers:
            if writer >= 0:
                _write_whole(writer, said)
        try:
            self._await()
        except KeyboardInterrupt as error:  # `failure` notifies the others
            self._error = error
            raise self.failure() from None

    def _await(self) -> None:
        """Wait until all ranks have arrived."""
        start = time.monotonic()
        while True:
            ended = self.aborted()
            if ended is not None:
                raise ended
            if not self.missing():
                return
            # Peers are checked only after a tick without notices.
            if not self._hear(TICK) and self.missing() and self.tick(time.monotonic() - start):
                raise self.failure()

    def _hear(self, seconds: float) -> bool:
        """Read the notices of peers; return whether there were any."""
        reader = self._doors.syncs[0]
        if not select.select([reader], [], [], seconds)[0]:
            return False
        self._inbox += os.read(reader, 1 << 16)
        whole = len(self._inbox) // _SAID.size * _SAID.size
        for who, syncs in _SAID.iter_unpack(self._inbox[:whole]):
            # `_ring_all` sends 0, which only wakes.
            self._arrived[who] = max(self._arrived[who], syncs)
        self._inbox = self._inbox[whole:]
        return True

    def _begin(self, call: CollectiveCall, nbytes: int) -> None:
        """Post a call, before its first sync. nbytes: bytes of this rank's input."""
        self._number += 1
        own = self._seats[self.members.rank]
        # In the order of `progress`; `extra` is cut to fit a signed number.
        words = [
            nbytes,
            call.kind,
            call.dtype,
            call.op,
            call.root,
            call.count,
            call.extra & (1 << 62) - 1,
        ]
        own[_BYTES : _BYTES + len(words)] = torch.tensor(words)
        own[_BEGUN] = self._number

    def _compare(self, deals: bool) -> None:
        """Raise the same error on every rank, after the first sync, unless all calls agree."""
        calls = [self.progress(rank).last for rank in range(self.members.size)]
        same = [(call.kind, call.dtype, call.op, call.root, call.extra) for call in calls]
        # From GATHER on, ranks may give unequal sizes, which their deals compare.
        counts = [call.count for call in calls if call.kind < GATHER]
        error = None
        if len(set(same)) > 1 or len(set(counts)) > 1:
            error = mismatch(self._number, calls, self.members.names)
        elif deals and not torch.equal(self._deals[:, :, 1], self._deals[:, :, 2].T):
            error = unequal(self._number, calls[0], self._deal, self.members.names)
        if error is not None:
            self._sync()  # no rank posts its next call before all have read this call
            self._finish()
            raise error

    def _deal(self, rank: int, peer: int) -> tuple[int, int]:
        return int(self._deals[rank, peer, 1]), int(self._deals[rank, peer, 2])

    def _finish(self) -> None:
        self._seats[self.members.rank, _FINISHED] = self._number

    # Collectives.

    def all_reduce(self, tensor: Tensor, op: int, root: int = -1) -> None:
        flat = tensor.view(-1)
        call = CollectiveCall(
            kind=ALL_REDUCE if root < 0 else REDUCE,
            dtype=NUMBER_OF[tensor.dtype],
            op=op,
            root=root,
            count=flat.numel(),
        )
        self._begin(call, flat.nbytes)
        most = _STAGE_BYTES // flat.itemsize
        size = self.members.size
        for start in range(0, max(1, flat.numel()), most):
            window = flat[start : start + most]
            stages = [_as(self._stages[rank, 0], window) for rank in range(size)]
            results = [
                _as(self._stages[rank, 1], window).tensor_split(size)[rank] for rank in range(size)
            ]
            # Every rank sums its N-th part of the window. A rank that is early with the next window
            # writes only its input, since others may still read results until the next sync.
            stages[self.members.rank].copy_(window)
            self._sync()
            if start == 0:
                self._compare(deals=False)
            own = [stage.tensor_split(size)[self.members.rank] for stage in stages]
            results[self.members.rank].copy_(reduced(own, op))
            self._sync()
            if root < 0 or root == self.members.rank:
                for part, result in zip(window.tensor_split(size), results, strict=True):
                    part.copy_(result)
        self._finish()

    def reduce_scatter(
        self, blocks: Sequence[Tensor], out: Tensor, op: int, call: CollectiveCall
    ) -> None:
        size = self.members.size
        rank = self.members.rank
        self._begin(call, sum(block.nbytes for block in blocks))
        flat = [block.view(-1) for block in blocks]
        target = out.view(-1)
        # A stage has a share for each block, of whole numbers of 8 bytes, so that any dtype fits.
        most = _STAGE_BYTES // size // 8 * 8 // out.itemsize
        longest = max(1, *(block.numel() for block in flat))
        for start in range(0, longest, most):
            for peer, block in enumerate(flat):
                self._share(rank, peer, block[start : start + most]).copy_(
                    block[start : start + most]
                )
            self._sync()
            if start == 0:
                self._compare(deals=False)
            # Blocks of other ranks may be longer than this rank's, which then only syncs.
            window = target[start : start + most]
            if window.numel():
                window.copy_(reduced([self._share(peer, rank, window) for peer in range(size)], op))
            self._sync()
        self._finish()

    def _share(self, rank: int, block: int, like: Tensor) -> Tensor:
        """Return the memory of a window of a block in a rank's stage."""
        share = _STAGE_BYTES // self.members.size // 8 * 8
        return _as(self._stages[rank, 0][block * share :], like)

    def exchange(
        self,
        call: CollectiveCall,
        parts: Sequence[Tensor],
        pulls: dict[int, PeerRead],
        deals: Sequence[ByteOffer] | None = None,
    ) -> None:
        rank = self.members.rank
        given = [bytes_of(part) for part in parts]
        # Contiguous input, copied only if there are several parts; the empty tensor allows none.
        mine = (
            given[0] if len(given) == 1 else torch.cat([torch.empty(0, dtype=torch.uint8), *given])
        )
        self._begin(call, mine.numel())
        if deals:
            words = [[deal.offset, deal.nbytes, deal.wanted] for deal in deals]
            self._deals[rank] = torch.tensor(words, dtype=torch.int64)
        start = 0
        longest = 1  # until the first sync, after which all know the longest input
        while start < longest:
            window = mine[start : start + _STAGE_BYTES]
            self._stages[rank, 0, : window.numel()].copy_(window)
            self._sync()
            if start == 0:
                self._compare(deals=deals is not None)
                longest = int(self._seats[:, _BYTES].max())
            for peer, pull in pulls.items():
                offset = int(self._deals[peer, rank, 0]) if deals else pull.offset
                self._take(peer, start, offset, bytes_of(pull.into))
            self._sync()
            start += _STAGE_BYTES
        self._finish()

    def _take(self, peer: int, start: int, offset: int, into: Tensor) -> None:
        """Copy the window's part of the peer's bytes [offset, offset + len(into)).

        start: position in the peer's bytes at which the window begins.
        """
        low = max(offset, start)
        high = min(offset + into.numel(), start + _STAGE_BYTES)
        if low < high:
            into[low - offset : high - offset].copy_(
                self._stages[peer, 0, low - start : high - start]
            )

    # Messages.

    def channel_write(self, to: int, header: bytes, address: int, nbytes: int) -> int:
        # The memory of a tensor as a buffer, without a copy.
        body = (ctypes.c_char * min(nbytes, _LONGEST_WRITE)).from_address(address)
        if not header and not nbytes:
            return 0
        try:
            written = os.writev(self._letters[to], [header, body])
        except BlockingIOError:
            written = 0
        except BrokenPipeError:  # a thread that waits for this message detects the peer's end
            return 0
        (self._blocked.discard if written == len(header) + nbytes else self._blocked.add)(to)
        return written

    def channel_read(self, source: int, address: int, nbytes: int) -> int:
        if nbytes == 0:
            return 0
        memory = (ctypes.c_char * min(nbytes, _LONGEST_WRITE)).from_address(address)
        try:
            return os.readv(self._doors.messages[source][0], [memory])
        except BlockingIOError:
            return 0

    def bell(self) -> int:
        return self._bell

    def bell_wait(self, seen: int, seconds: float) -> None:
        self._waiters += 1
        try:
            if self._bell != seen:
                return
            readers = [read for read, _ in self._doors.messages] + [self._doors.wake[0]]
            writers = [self._letters[peer] for peer in tuple(self._blocked)]
            poll = select.poll()
            for reader in readers:
                poll.register(reader, select.POLLIN)
            for writer in writers:
                poll.register(writer, select.POLLOUT)
            poll.poll(1000 * seconds)
        finally:
            # `ring` has written a byte for each waiting thread: this thread consumes its byte.
            self._waiters -= 1
            with contextlib.suppress(BlockingIOError):
                os.read(self._doors.wake[0], 1)

    def ring(self, rank: int) -> None:
        if rank == self.members.rank:
            self._bell += 1
            with contextlib.suppress(BlockingIOError):
                os.write(self._doors.wake[1], b"!" * self._waiters)

    # What is known of each other.

    def progress(self, rank: int) -> CallProgress:
        begun, finished, left, _, kind, dtype, op, root, count, extra = self._seats[
            rank, :10
        ].tolist()
        return CallProgress(
            begun,
            finished,
            CollectiveCall(kind=kind, dtype=dtype, op=op, root=root, count=count, extra=extra),
            bool(left),
        )

    def current(self) -> tuple[int, CollectiveCall]:
        return self._number, self.progress(self.members.rank).last

    def missing(self) -> list[int]:
        return [rank for rank, syncs in enumerate(self._arrived) if syncs < self._syncs]

    def _publish_loss(self, text: bytes) -> None:
        # The first reason stays. A file lock, because the kernel frees it if its holder dies.
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            if not self._reason[0]:
                padded = text[: _REASON_BYTES - 1].ljust(_REASON_BYTES, b"\0")
                self._reason.copy_(torch.frombuffer(bytearray(padded), dtype=torch.uint8))
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._ring_all()

    def _ring_all(self) -> None:
        """Wake all ranks that wait for a sync, so that they check again."""
        said = _SAID.pack(self.members.rank, 0)
        for writer in self._writers:
            if writer >= 0:
                with contextlib.suppress(BlockingIOError, BrokenPipeError):
                    os.write(writer, said)
        self.ring(self.members.rank)

    def _published_loss(self) -> bytes | None:
        if not self._reason[0]:
            return None
        return self._reason.numpy().tobytes().rstrip(b"\0")

    def leave(self) -> None:
        self._seats[self.members.rank, _LEFT] = 1
        self._ring_all()

    def close(self) -> None:
        super().close()
        for writer in (*self._writers, *self._letters):
            if writer >= 0:
                os.close(writer)
        os.close(self._descriptor)
        self._doors.close()


def _opened(process: int, descriptor: int) -> int:
    """Open the write end of a peer's pipe."""
    return open_of(process, descriptor, os.O_WRONLY | os.O_NONBLOCK)


def _write_whole(descriptor: int, message: bytes) -> None:
    """Write a message, waiting while the pipe is full; a closed pipe is ignored here."""
    while True:
        try:
            os.write(descriptor, message)  # all or nothing: it is shorter than PIPE_BUF
            return
        except BlockingIOError:
            select.select([], [descriptor], [], TICK)
        except BrokenPipeError:
            return


def _as(memory: Tensor, like: Tensor) -> Tensor:
    """Return as much memory as `like` has, viewed as its dtype."""
    return memory[: like.nbytes].view(like.dtype)
