"""C core: the collectives of a host in plain C on shared memory, without copies or the GIL."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Sequence
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dure.collectives.shared_memory.calls import (
    BEGUN_ALL_REDUCE,
    BEGUN_REDUCE_SCATTER,
    NUMBER_OF,
    SENSIBLE,
    SUM,
    CollectiveCall,
    mismatch,
    unequal,
)
from dure.collectives.shared_memory.host import ByteOffer, CallProgress, Host, HostMembers, PeerRead
from dure.collectives.shared_memory.pool import SharedMapping, SharedMemoryPool
from dure.collectives.shared_memory.work import CallQueue
from dure.machine.c_library import c_library

# As in core.h, which has more of each.
_DONE, _MISMATCH, _ABORTED, _GAVE_UP, _BAD_SIZES = range(5)
_STAGE = 1
_POOL = 2

UNDER_WAY = 4
"""Maximum number of split-phase calls in progress on a rank."""

# Up to the size of a slot, a copy and a sync are cheaper than cutting a tensor into parts. A stage
# has four windows of this size, small enough to stay in the caches.
SLOT_BYTES = 16 << 10
STAGE_BYTES = 256 << 10
CHANNEL_BYTES = 2 << 20
ALL_CHANNELS = 256 << 20
"""Limits in bytes: CHANNEL_BYTES for a channel, ALL_CHANNELS about for all channels of a group.

There is a channel from each rank to each. A message that fits is sent without a wait. The rest of a
longer message waits until the receiver has freed space, and until a thread gets a core.
"""


class PostedCall(Structure):
    """Call of a rank in C: `struct call` in core.h, field by field."""

    _fields_ = (
        ("number", c_uint64),
        ("bytes", c_uint64),
        ("count", c_uint64),
        ("extra", c_uint64),
        ("pool", c_uint64),
        ("kind", c_uint32),
        ("dtype", c_uint16),
        ("op", c_uint16),
        ("root", c_int32),
        ("place", c_uint32),
        ("begun_at", c_uint64),
    )

    def call(self) -> CollectiveCall:
        return CollectiveCall(
            kind=self.kind,
            dtype=self.dtype,
            op=self.op,
            root=self.root,
            count=self.count,
            extra=self.extra,
        )


class _Deal(Structure):
    _fields_ = (("offset", c_uint64), ("bytes", c_uint64), ("wanted", c_uint64))


class _Part(Structure):
    _fields_ = (("address", c_void_p), ("bytes", c_uint64))


class _Pull(Structure):
    _fields_ = (("offset", c_uint64), ("bytes", c_uint64), ("into", c_void_p))


_Tick = ctypes.CFUNCTYPE(c_int, c_double)


class _Interpreter(Structure):
    """Functions of Python with which the core runs signal handlers during a wait, for Ctrl-C."""

    _fields_ = (
        ("PyGILState_Ensure", c_void_p),
        ("PyErr_CheckSignals", c_void_p),
        ("PyErr_Fetch", c_void_p),
        ("PyGILState_Release", c_void_p),
        ("kind", c_void_p),
        ("value", c_void_p),
        ("traceback", c_void_p),
        ("goes_on", c_int),
    )

    @classmethod
    def this(cls) -> _Interpreter:
        """Return this interpreter's functions."""
        # By address, so that the library is built without Python's headers.
        names = ("PyGILState_Ensure", "PyErr_CheckSignals", "PyErr_Fetch", "PyGILState_Release")
        return cls(
            *(ctypes.cast(getattr(ctypes.pythonapi, name), c_void_p).value for name in names)
        )

    def take_error(self) -> BaseException | None:
        """Return and clear the exception of a signal handler, or None."""
        pointers = [getattr(self, name) for name in ("kind", "value", "traceback")]
        held = [
            ctypes.cast(pointer, ctypes.py_object).value if pointer else None
            for pointer in pointers
        ]
        for pointer in pointers:
            if pointer:
                ctypes.pythonapi.Py_DecRef(c_void_p(pointer))  # PyErr_Fetch gave a reference
        self.kind = self.value = self.traceback = None
        kind: Any = held[0]
        value: Any = held[1]
        # PyErr_Fetch may return an uninstantiated error: its class and its arguments.
        error = (
            value
            if kind is None or isinstance(value, BaseException)
            else kind(*([] if value is None else [value]))
        )
        return error if isinstance(error, BaseException) else None


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled core, or None if the package was installed without a C compiler."""
    core = c_library(Path(__file__).parent, "_core")
    return None if core is None else _declared(core)


def _declared(core: ctypes.CDLL) -> ctypes.CDLL:
    """Return the library, with the types of its functions as in core.h."""
    signatures: dict[str, tuple[type | None, tuple[type, ...]]] = {
        "core_segment_bytes": (c_uint64, (c_int, c_uint64, c_uint64, c_uint64)),
        "core_open": (
            c_void_p,
            (
                c_void_p,
                c_int,
                c_int,
                c_uint64,
                c_uint64,
                c_uint64,
                c_uint64,
                c_uint64,
                _Tick,
                POINTER(_Interpreter),
            ),
        ),
        "core_set_pool": (None, (c_void_p, c_int, c_void_p, c_uint64)),
        "core_close": (None, (c_void_p,)),
        "core_leave": (None, (c_void_p,)),
        "core_abort": (c_int, (c_void_p, c_char_p)),
        "core_aborted": (c_char_p, (c_void_p,)),
        "core_look": (c_uint64, (c_void_p, c_int, c_int)),
        "core_last_call": (None, (c_void_p, c_int, POINTER(PostedCall))),
        "core_this_call": (None, (c_void_p, c_int, POINTER(PostedCall))),
        "core_deal": (None, (c_void_p, c_int, c_int, POINTER(_Deal))),
        "core_instructions": (c_char_p, ()),
        "core_all_reduce": (
            c_int,
            (c_void_p, c_int, c_int, c_uint64, c_void_p),
        ),
        "core_reduce_scatter": (c_int, (c_void_p, POINTER(PostedCall), c_void_p, c_void_p)),
        "core_begin_reduce_scatter": (
            c_int,
            (c_void_p, POINTER(PostedCall), c_void_p, POINTER(_Part), c_int),
        ),
        "core_begin_all_reduce": (c_int, (c_void_p, POINTER(PostedCall))),
        "core_end": (c_int, (c_void_p, c_uint64)),
        "core_is_read": (c_int, (c_void_p, c_uint64)),
        "core_exchange": (
            c_int,
            (c_void_p, POINTER(PostedCall), c_void_p, c_int, c_void_p, c_void_p),
        ),
        "core_channel_write": (c_uint64, (c_void_p, c_int, c_char_p, c_uint64, c_void_p, c_uint64)),
        "core_channel_read": (c_uint64, (c_void_p, c_int, c_void_p, c_uint64)),
        "core_channel_take": (c_int, (c_void_p, c_int, c_char_p, c_uint64, c_void_p, c_uint64)),
        "core_bell": (c_uint32, (c_void_p,)),
        "core_bell_wait": (c_int, (c_void_p, c_uint32, c_uint64)),
        "core_ring": (None, (c_void_p, c_int)),
        "duplex_open": (c_void_p, (c_int, c_int)),
        "duplex_begin": (None, (c_void_p, c_void_p)),
        "duplex_wait": (c_int, (c_void_p, c_void_p, c_double)),
        "duplex_close": (None, (c_void_p,)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(core, name)
        function.restype = result
        function.argtypes = arguments
    return core


def _short_way() -> Callable[..., int] | None:
    """Return `core_all_reduce` without ctypes; None if installed without Python's headers."""
    try:
        module = importlib.import_module("dure.collectives.shared_memory._direct")
    except ImportError:
        return None
    return module.all_reduce  # type: ignore[no-any-return]


def instructions() -> str:
    """Return the instruction set of the sums: plain, avx2 or avx512; torch without the C core."""
    core = library()
    return core.core_instructions().decode().removeprefix("with_") if core is not None else "torch"


def segment_bytes(size: int) -> int:
    """Return the bytes of a segment for `size` ranks; untouched pages take no memory."""
    core = library()
    assert core is not None
    return int(core.core_segment_bytes(size, SLOT_BYTES, STAGE_BYTES, _channel_bytes(size)))


def _channel_bytes(size: int) -> int:
    # A channel for each ordered pair of ranks, in whole pages.
    return max(STAGE_BYTES, min(CHANNEL_BYTES, ALL_CHANNELS // size**2 // 4096 * 4096))


class NativeHost(Host):
    """Host over the C core.

    segment: the group's shared memory, all zeros at first. pool: this process's pool; peers: the
    other ranks' pools, mapped here. patience: seconds to spin, and then to yield the core, before
    sleeping.
    """

    in_c = True

    def __init__(
        self,
        members: HostMembers,
        timeout: float,
        segment: SharedMapping,
        pool: SharedMemoryPool,
        peers: Sequence[SharedMapping],
        patience: tuple[float, float],
    ) -> None:
        super().__init__(members, timeout)
        self.channel_bytes = _channel_bytes(members.size)
        core = library()
        assert core is not None
        self._c = core
        self._segment = segment
        self._pool = pool
        self._peers = list(peers)
        # C stores addresses of these: they live as long as the host, like segment, pool and peers.
        self._tick = _Tick(self._tick_for_c)
        self._interpreter = _Interpreter.this()
        spin, give = (int(1e9 * seconds) for seconds in patience)
        self._core = core.core_open(
            segment.address,
            members.rank,
            members.size,
            SLOT_BYTES,
            STAGE_BYTES,
            self.channel_bytes,
            spin,
            give,
            self._tick,
            self._interpreter,
        )
        if not self._core:
            raise MemoryError("the C core could not be opened: out of memory")
        for rank, mapping in enumerate(self._peers):
            core.core_set_pool(self._core, rank, mapping.address, mapping.nbytes)
        self._all_reduce = core.core_all_reduce  # looked up once, for the most frequent call

    def _tick_for_c(self, waited: float) -> int:
        """Return whether to continue waiting, in `goes_on` as well: see core.h."""
        if self.tick(waited):
            return 0
        # Last: if a signal handler raises anywhere above, `goes_on` stays 0 and the wait
        # ends. ctypes drops the handler's exception and ignores the return value.
        self._interpreter.goes_on = 1
        return 1

    def all_reduce(self, tensor: Tensor, op: int, root: int = -1) -> None:
        # dtype and operation are encoded in a number, because each argument costs ctypes time.
        code = NUMBER_OF[tensor.dtype] + 256 * op
        status = self._all_reduce(self._core, code, root, tensor.numel(), tensor.data_ptr())
        if status:
            raise self._failed(status)

    def direct(
        self, line: CallQueue, otherwise: Callable[[Tensor, int], None]
    ) -> Callable[..., None]:
        # All lookups are done once: a sum of a few kilobytes takes no longer than a few attribute
        # lookups in Python.
        reduce = _short_way() or self._by_ctypes
        core = self._core
        function = ctypes.cast(self._all_reduce, c_void_p).value or 0
        take_turn = line.turn.acquire
        give_turn = line.turn.release
        strided = torch.strided
        failed = self._failed
        code_of = {(dtype, op): NUMBER_OF[dtype] + 256 * op for dtype, op in SENSIBLE}.get

        def all_reduce(tensor: Tensor, op: int = SUM) -> None:
            code = code_of((tensor.dtype, op))
            dense = (
                tensor.layout is strided
                and tensor.is_cpu
                and tensor.is_contiguous()
                and not tensor.is_neg()
            )
            # With queued calls, or a call in progress, the slow path joins the queue. The slow path
            # also reports invalid tensors.
            if code is None or not dense or line.ahead or not take_turn(False):
                return otherwise(tensor, op)
            try:
                status = reduce(function, core, code, tensor.numel(), tensor.data_ptr())
                if status:
                    raise failed(status)
            finally:
                give_turn()

        return all_reduce

    def _by_ctypes(self, function: int, core: int, code: int, count: int, address: int) -> int:
        return int(self._all_reduce(core, code, -1, count, address))

    def reduce_scatter(
        self, blocks: Sequence[Tensor], out: Tensor, op: int, call: CollectiveCall
    ) -> None:
        parts = (_Part * len(blocks))(*(_Part(block.data_ptr(), block.nbytes) for block in blocks))
        posted = posted_call(call, sum(block.nbytes for block in blocks))
        status = self._c.core_reduce_scatter(self._core, posted, parts, out.data_ptr())
        if status:
            raise self._failed(status)

    @property
    def split_phase(self) -> bool:
        return True

    def prepare_reduce_scatter(
        self, message: Tensor, out: Tensor, op: int
    ) -> Callable[[Sequence[Tensor]], int]:
        start = self._c.core_begin_reduce_scatter
        posted = self._posted_in_pool(BEGUN_REDUCE_SCATTER, message, op)
        into = out.data_ptr()  # `out` and `message` are kept by the caller (`BegunCalls._lend`)
        parts = (_Part * 0)()

        def begin(own: Sequence[Tensor]) -> int:
            nonlocal parts  # which C reads until the end
            # Reused, since the previous call has ended.
            parts = parts if len(parts) == len(own) else (_Part * len(own))()
            for part, tensor in zip(parts, own, strict=True):
                part.address = tensor.data_ptr()
                part.bytes = tensor.nbytes
            return self._number_of(start(self._core, posted, into, parts, len(parts)), posted)

        return begin

    def prepare_all_reduce(self, message: Tensor, op: int) -> Callable[[], int]:
        begin = self._c.core_begin_all_reduce
        posted = self._posted_in_pool(BEGUN_ALL_REDUCE, message, op)
        return lambda: self._number_of(begin(self._core, posted), posted)

    def _number_of(self, status: int, posted: PostedCall) -> int:
        """Return the number of a begun call; raise the error of its status."""
        if status:
            raise self._failed(status)
        return int(posted.number)

    def _posted_in_pool(self, kind: int, message: Tensor, op: int) -> PostedCall:
        """Return a call whose message is in this process's pool."""
        # An offset, because every rank has mapped the pool at a different address.
        offset = self._pool.offset(message.data_ptr(), message.nbytes)
        assert offset is not None
        posted = posted_call(
            CollectiveCall(
                kind=kind, dtype=NUMBER_OF[message.dtype], op=op, root=-1, count=message.numel()
            ),
            message.nbytes,
        )
        posted.pool = offset
        return posted

    def end_call(self, number: int) -> None:
        if status := self._c.core_end(self._core, number):
            raise self._failed(status)

    def is_read(self, number: int) -> bool:
        return bool(self._c.core_is_read(self._core, number))

    def exchange(
        self,
        call: CollectiveCall,
        parts: Sequence[Tensor],
        pulls: dict[int, PeerRead],
        deals: Sequence[ByteOffer] | None = None,
    ) -> None:
        size = self.members.size
        given = (_Part * max(1, len(parts)))(
            *(_Part(part.data_ptr(), part.nbytes) for part in parts)
        )
        pulled = (_Pull * size)()
        for rank, pull in pulls.items():
            pulled[rank] = _Pull(pull.offset, pull.into.nbytes, pull.into.data_ptr())
        posted = posted_call(call, sum(part.nbytes for part in parts))
        # Peers read a single part in the pool directly, without the stage.
        if (
            len(parts) == 1
            and (offset := self._pool.offset(parts[0].data_ptr(), parts[0].nbytes)) is not None
        ):
            posted.place = _POOL
            posted.pool = offset
        # NULL for C if the offers of each rank follow from the call.
        dealt = (
            (_Deal * size)(*(_Deal(deal.offset, deal.nbytes, deal.wanted) for deal in deals))
            if deals
            else None
        )
        status = self._c.core_exchange(self._core, posted, given, len(parts), dealt, pulled)
        if status:
            raise self._failed(status)

    def _failed(self, status: int) -> BaseException:
        """Return the error for a nonzero status."""
        # A peer may still be writing a sum to this rank's pool.
        if status in (_GAVE_UP, _ABORTED):
            self._pool.pin()
        if status == _GAVE_UP:
            # Without an error from `tick`, a signal handler has raised, perhaps around `tick`.
            self._error = self._error or self._interpreter.take_error() or KeyboardInterrupt()
            return self.failure()
        if status == _ABORTED:
            return self.aborted() or AssertionError("aborted without a reason")
        number, call = self.current()
        if status == _MISMATCH:
            return mismatch(
                number,
                [self._this_call(rank).call() for rank in range(self.members.size)],
                self.members.names,
            )
        assert status == _BAD_SIZES
        return unequal(number, call, self._deal, self.members.names)

    def _this_call(self, rank: int) -> PostedCall:
        """Return the current call of a rank, as posted."""
        call = PostedCall()
        self._c.core_this_call(self._core, rank, call)
        return call

    def _deal(self, rank: int, peer: int) -> tuple[int, int]:
        """Return the bytes that a rank offers to a peer, and the bytes that it wants."""
        deal = _Deal()
        self._c.core_deal(self._core, rank, peer, deal)
        return deal.bytes, deal.wanted

    def channel_write(self, to: int, header: bytes, address: int, nbytes: int) -> int:
        return int(self._c.core_channel_write(self._core, to, header, len(header), address, nbytes))

    def channel_read(self, source: int, address: int, nbytes: int) -> int:
        return int(self._c.core_channel_read(self._core, source, address, nbytes))

    def channel_take(self, source: int, header: bytes, address: int, nbytes: int) -> bool:
        return bool(
            self._c.core_channel_take(self._core, source, header, len(header), address, nbytes)
        )

    def bell(self) -> int:
        return int(self._c.core_bell(self._core))

    def bell_wait(self, seen: int, seconds: float) -> None:
        self._c.core_bell_wait(self._core, seen, int(1e9 * seconds))

    def ring(self, rank: int) -> None:
        self._c.core_ring(self._core, rank)

    def progress(self, rank: int) -> CallProgress:
        call = PostedCall()
        self._c.core_last_call(self._core, rank, call)
        # The numbers of `core_look` in life.c, here and below.
        begun, finished, left = (
            int(self._c.core_look(self._core, rank, what)) for what in (1, 2, 3)
        )
        return CallProgress(begun, finished, call.call(), bool(left))

    def current(self) -> tuple[int, CollectiveCall]:
        return int(self._c.core_look(self._core, 0, 5)), self._this_call(self.members.rank).call()

    def missing(self) -> list[int]:
        own = int(self._c.core_look(self._core, 0, 4))
        return [
            rank
            for rank in range(self.members.size)
            if self._c.core_look(self._core, rank, 0) < own
        ]

    def _publish_loss(self, text: bytes) -> None:
        self._c.core_abort(self._core, text)

    def _published_loss(self) -> bytes | None:
        reason: bytes | None = self._c.core_aborted(self._core)
        return reason

    def is_over(self) -> bool:
        return self._c.core_aborted(self._core) is not None

    def leave(self) -> None:
        self._c.core_leave(self._core)

    def close(self) -> None:
        # After this a call would pass NULL to C; the group prevents further calls (`_OF_RANKS`).
        super().close()
        self._c.core_close(self._core)
        self._core = None


def posted_call(call: CollectiveCall, nbytes: int) -> PostedCall:
    return PostedCall(
        bytes=nbytes,
        count=call.count,
        extra=call.extra,
        kind=call.kind,
        dtype=call.dtype,
        op=call.op,
        root=call.root,
        place=_STAGE,
    )
