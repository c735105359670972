"""Connection between two hosts of a single rank each, in C (core/duplex.c).

Both ends begin the same calls, and send and receive for each. gloo supports any number of hosts and
is made for short messages: its thread wakes for every few packets, takes a core from the computing
thread, and an all-reduce crosses the link in two rounds. Between two hosts a single round suffices:
each sends its whole tensor to the other. That is the direct ("one-shot") all-reduce; S bytes each
way are, for N = 2, the 2(N-1)/N·S of a ring. A reduce-scatter or an all-gather sends half of that.
A call sends 64 bytes more.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from ctypes import Structure, addressof, c_double, c_uint64, c_void_p
from datetime import timedelta
from hmac import compare_digest
from typing import Any

import msgspec
from torch import Tensor

from dure.collectives.shared_memory.calls import CollectiveCall
from dure.collectives.shared_memory.native import PostedCall, library, posted_call
from dure.collectives.shared_memory.rendezvous import GroupRendezvous
from dure.errors import PeerLostError
from dure.machine.group_key import VARIABLE

_DONE, _MISMATCH, _ABORTED, _GAVE_UP = range(4)
_PATIENCE = 5.0  # seconds for two hosts to reach each other, or a quarter of the meeting's time
_STRANGER = 0.5  # seconds for a caller to authenticate
_MOST_CALLERS = 64  # unauthenticated callers; above this number the oldest is disconnected
_WORD = 16  # bytes of the word in the store, and of each end's nonce
_PROOF = 32  # bytes of the proof that an end knows word and key


class _Exchange(Structure):
    _fields_ = (
        ("call", PostedCall),
        ("out", c_void_p),
        ("own", c_void_p),
        ("into", c_void_p),
        ("next", c_void_p),
        ("sent", c_uint64),
        ("status", c_uint64),
        ("theirs", PostedCall),
        ("ended", c_double),
    )


class PeerCallMismatchError(Exception):
    """The other host's rank has begun another call: `theirs`."""

    def __init__(self, theirs: CollectiveCall) -> None:
        super().__init__(str(theirs))
        self.theirs = theirs


class DuplexExchange:
    """Begun call. It keeps the tensors until its end."""

    def __init__(self, end: int, posted: PostedCall, tensors: Sequence[Tensor | None]) -> None:
        out, own, into = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        self.tensors = tensors
        # C uses the address of this struct until the exchange has ended: it must stay in place.
        self._end = end
        self.inner = _Exchange(call=posted, out=out, own=own, into=into)

    def _status(self, seconds: float) -> int:
        """Return C's status after at most `seconds`."""
        core = library()
        assert core is not None
        return int(core.duplex_wait(self._end, addressof(self.inner), seconds))

    def is_completed(self) -> bool:
        """Return whether the exchange has ended, or is lost."""
        return self._status(0.0) != _GAVE_UP

    @property
    def is_over(self) -> bool:
        """Whether no thread uses the tensors any more.

        After a loss, threads may use them until they have ended.
        """
        return self._status(0.0) in (_DONE, _MISMATCH)

    def wait(self, limit: timedelta) -> None:
        """Wait until the exchange has ended.

        Raises RuntimeError after the timeout, or if the connection was lost; UnlikeCallsError if
        the other rank began another call.
        """
        status = self._status(limit.total_seconds())
        if status == _MISMATCH:
            raise PeerCallMismatchError(self.inner.theirs.call())
        if status != _DONE:
            raise RuntimeError("the connection was lost" if status == _ABORTED else "timed out")

    @property
    def ended(self) -> float:
        """Time of the end, in seconds of `time.perf_counter`; 0 before."""
        return float(self.inner.ended)


class Duplex:
    """Local end of the connection, which it takes over.

    first: whether this rank's numbers come first in a reduction.
    """

    def __init__(self, connection: socket.socket, first: bool) -> None:
        core = library()
        assert core is not None
        self._core = core
        self._descriptor = connection.detach()  # C closes it, not Python
        self._end = core.duplex_open(self._descriptor, int(first))
        if not self._end:
            os.close(self._descriptor)
            raise MemoryError("no connection to the other host could be opened: out of memory")
        # Exchanges that C still uses, even if no thread waits for them. The finalizer refers to
        # these and not to `self`: it runs when the group is gone, at the latest at process exit.
        self._lent: deque[DuplexExchange] = deque()
        self._close = weakref.finalize(self, _close, core, self._end, self._lent, os.getpid())

    def begin(
        self, call: CollectiveCall, out: Tensor, into: Tensor, own: Tensor | None = None
    ) -> DuplexExchange:
        """Send `out` and receive as many bytes.

        The received bytes are written to `into`, reduced with `own`, if given, by the call's dtype
        and operation. All are contiguous; `into` is `out`, or does not overlap with it.
        """
        if not self._close.alive:
            raise RuntimeError("this connection was closed")
        # Exchanges end in the order of their beginning.
        while self._lent and self._lent[0].is_over:
            self._lent.popleft()
        exchange = DuplexExchange(self._end, posted_call(call, out.nbytes), (out, own, into))
        self._lent.append(exchange)
        self._core.duplex_begin(self._end, addressof(exchange.inner))
        return exchange

    def close(self) -> None:
        """Close the connection; calls in progress fail at both ends."""
        self._close()

    def abandon(self) -> None:
        """Detach from the connection in a forked child: it belongs to the parent."""
        if (
            self._close.alive and self._descriptor >= 0
        ):  # otherwise the descriptor number may belong to another file by now
            os.close(self._descriptor)
        self._descriptor = -1


def _close(core: Any, end: int, lent: deque[DuplexExchange], process: int) -> None:
    """Close a local end, unless this is a forked child, and release its tensors."""
    # A forked child has no threads to end. After this no thread touches a tensor.
    if os.getpid() == process:
        core.duplex_close(end)
    lent.clear()


# Connection of two hosts: the first listens, the second connects, and the store has the address and
# the result. Both prove that they know the word, which is in the store, and the job's key, which is
# not; neither is sent over the connection.


def connection(
    meeting: GroupRendezvous, address: str | None, willing: bool, key: bytes | None = None
) -> socket.socket | None:
    """Return this host's end of a connection between two hosts.

    None, on both, if they do not reach each other or either is unwilling.

    Args:
        meeting: meeting of rank 0 and rank 1.
        address: address by which other hosts reach this host; None if unknown.
        willing: whether this host can use the connection.
        key: the job's key, the same on both hosts.

    Raises:
        PeerLostError: the other host does not arrive within the meeting's timeout, or, with a key,
            does
            not prove that it knows the key.
    """
    card = address, willing, key is not None
    meeting.store.set(f"duplex {meeting.rank}", msgspec.json.encode(card).decode())
    other = 1 - meeting.rank
    theirs, too, keyed = msgspec.json.decode(
        meeting.read(f"duplex {other}", other), type=tuple[str | None, bool, bool]
    )
    if keyed != (key is not None):
        which = "a key" if keyed else "no key"
        raise _unproved(
            meeting, f"has {which}, unlike this one: set {VARIABLE} to the same value on both hosts"
        )
    # Neither knows an address if the store is on this machine: then loopback suffices. If only one
    # host knows an address, they cannot connect.
    if not (willing and too) or (address is None) != (theirs is None):
        made = None
    elif meeting.rank == 0:
        made = _listening(meeting, address or "127.0.0.1", key or b"")
    else:
        made = _connected(meeting, key or b"")
    if made is None:
        # Without a key, gloo is the fallback. gloo does not authenticate: with a key, the fallback
        # would admit an attacker who prevents this connection.
        if key is not None:
            raise _unproved(
                meeting,
                f"has not proved that it has {VARIABLE}, or cannot reach this host, or lacks the "
                "C core",
            )
        return None
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # short calls leave at once
    made.settimeout(None)
    return made


def _unproved(meeting: GroupRendezvous, reason: str) -> PeerLostError:
    return PeerLostError(
        (meeting.names[1 - meeting.rank],), "the meeting of two hosts", "its start", reason
    )


def _listening(meeting: GroupRendezvous, address: str, key: bytes) -> socket.socket | None:
    """Return rank 0's end: listen, publish the address, and accept the authenticated peer."""
    made: socket.socket | None = None
    # Any host may connect to the port, so callers have to prove knowledge of the word.
    word = secrets.token_bytes(_WORD)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.create_server((address, 0), family=family) as server:
            door = address, server.getsockname()[1], word.hex()
            meeting.store.set("duplex door", msgspec.json.encode(door).decode())
            made = _accepted(server, word, key, _patience(meeting))
    except OSError:  # no listening port: the other host must not wait for it
        meeting.store.set("duplex door", "null")
    # The connecting end receives the last proof, so its verdict is valid for both.
    if meeting.read("duplex verdict", 1) == b"yes":
        return made
    if made is not None:
        made.close()
    return None


def _patience(meeting: GroupRendezvous) -> float:
    return min(_PATIENCE, meeting.timeout / 4)


def _accepted(
    server: socket.socket, word: bytes, key: bytes, patience: float
) -> socket.socket | None:
    """Return the connection of the peer that knows the word and the key.

    Callers are handled concurrently, so that silent strangers delay no other caller.
    """
    until = time.monotonic() + patience
    callers: deque[_Caller] = deque()
    made: socket.socket | None = None
    server.setblocking(False)
    with selectors.DefaultSelector() as ready:
        ready.register(server, selectors.EVENT_READ)
        while made is None and (now := time.monotonic()) < until:
            while callers and (len(callers) > _MOST_CALLERS or callers[0].until < now):
                _hang_up(ready, callers.popleft())
            for found, _ in ready.select(min(until - now, _STRANGER)):
                if found.data is None:
                    _answer_call(server, ready, callers)
                elif found.data in callers:
                    made = _heard(found.data, word, key)
                    if made is None and found.data.ended:
                        callers.remove(found.data)
                        _hang_up(ready, found.data)
                if made is not None:
                    break
    for caller in callers:
        if caller.connection is not made:
            caller.connection.close()
    return made


class _Caller:
    """Caller that is not authenticated yet. until: deadline of its proof."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.until = time.monotonic() + _STRANGER
        self.own = secrets.token_bytes(_WORD)
        self.said = b""
        self.ended = False
        connection.setblocking(False)
        connection.send(self.own)  # a new connection has room for it


def _answer_call(
    server: socket.socket, ready: selectors.DefaultSelector, callers: deque[_Caller]
) -> None:
    with suppress(OSError):
        caller = _Caller(server.accept()[0])
        callers.append(caller)
        ready.register(caller.connection, selectors.EVENT_READ, caller)


def _heard(caller: _Caller, word: bytes, key: bytes) -> socket.socket | None:
    """Return the caller's connection, once it has proved that it knows word and key; answer it."""
    try:
        more = caller.connection.recv(_WORD + _PROOF - len(caller.said))
    except BlockingIOError:
        return None
    except OSError:
        more = b""
    caller.said += more
    caller.ended = not more
    theirs, proof = caller.said[:_WORD], caller.said[_WORD:]
    if len(proof) < _PROOF:
        return None
    # The caller proves its knowledge first, so that a stranger gets no value derived from the key.
    caller.ended = not compare_digest(proof, _proof(key, b"1", word, caller.own, theirs))
    if caller.ended:
        return None
    caller.connection.setblocking(True)
    try:
        caller.connection.sendall(_proof(key, b"0", word, caller.own, theirs))
    except OSError:
        caller.ended = True
        return None
    return caller.connection


def _hang_up(ready: selectors.DefaultSelector, caller: _Caller) -> None:
    ready.unregister(caller.connection)
    caller.connection.close()


def _connected(meeting: GroupRendezvous, key: bytes) -> socket.socket | None:
    """Return rank 1's end: connect, authenticate both ends, and publish the result."""
    door = msgspec.json.decode(meeting.read("duplex door", 0), type=tuple[str, int, str] | None)
    made: socket.socket | None = None
    proved = False
    if door is not None:
        word = bytes.fromhex(door[2])
        with suppress(OSError):
            made = socket.create_connection(door[:2], timeout=_patience(meeting))
            own = secrets.token_bytes(_WORD)
            theirs = _received(made, _WORD)
            made.sendall(own + _proof(key, b"1", word, theirs, own))
            proved = compare_digest(_received(made, _PROOF), _proof(key, b"0", word, theirs, own))
    if made is not None and not proved:
        made.close()
        made = None
    meeting.store.set("duplex verdict", "no" if made is None else "yes")
    return made


def _proof(key: bytes, rank: bytes, word: bytes, nonce_of_0: bytes, nonce_of_1: bytes) -> bytes:
    """Return a proof of the knowledge of key and word, for this connection alone."""
    return hmac.digest(key, b"dure two hosts" + rank + word + nonce_of_0 + nonce_of_1, "sha256")


def _received(connection: socket.socket, nbytes: int) -> bytes:
    """Return `nbytes` bytes; fewer, which are never a valid proof, if the other end closes."""
    return connection.recv(nbytes, socket.MSG_WAITALL)
