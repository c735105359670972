"""Messages between ranks of a host, matched by source and tag in the order of sending.

A message is a header and its bytes, streamed through the channel from its sender to its receiver; a
message without a matching receive is buffered. A thread that waits for a send or receive makes
progress on all; without such a thread, the mailbox's own thread does. So a rank that computes, or
is in a collective, delays no other rank.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from ctypes import addressof, c_char
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dure.collectives.shared_memory.calls import bytes_of
from dure.collectives.shared_memory.host import TICK, Host
from dure.collectives.shared_memory.work import CallHandle
from dure.errors import MismatchError, PeerLostError

_HEADER = struct.Struct("<qqq")  # bytes, tag, dtype
HEADER_BYTES = _HEADER.size
ANY = -1
_SOON = 0.001
"""Seconds after which the mailbox's thread takes over messages for which no thread waits."""
_ASIDE_BYTES = 64 << 20
"""Maximum bytes of buffered messages of a source; with more, the source has to wait."""
_QUIET_ROUNDS = 50
"""Rounds of `_SOON` seconds without messages in progress after which the thread sleeps."""


class PendingMessage:
    """Send or receive in progress.

    peer: its other end, or ANY; name: its name in errors. Only a thread with the mailbox's lock may
    finish it; any thread may read `done`.
    """

    def __init__(self, mailbox: Mailbox, tensor: Tensor, peer: int, tag: int, name: str) -> None:
        self.mailbox = mailbox
        self.tensor = tensor
        # Channels transfer contiguous bytes: a strided tensor is sent from a contiguous copy, and
        # received into a copy.
        self.dense = tensor if tensor.is_contiguous() else tensor.contiguous()
        self.peer = peer
        self.tag = tag
        self.name = name
        self.moved = 0  # bytes of header and body that have left, for a send
        self.header = b""
        self.done = False
        self.error: BaseException | None = None
        self.receipt: MessageWork | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the send or receive as done, or failed."""
        self.error = error
        self.done = True  # last: a thread that sees it without the lock may read the other fields
        if self.receipt is not None:
            self.receipt.finish(error)

    def delivered(self, source: int) -> None:
        """Complete a receive with data from `source`; the lock is held."""
        # In inference mode, as in queued calls: the tensor may be a parameter.
        if self.dense is not self.tensor:
            with torch.inference_mode():
                self.tensor.copy_(self.dense)
        if self.receipt is not None:
            self.receipt.source = source
        self.finish()


class MessageWork(CallHandle):
    """Handle of a letter for torch and for asynchronous callers.

    `wait` makes progress on the letter itself.
    """

    def __init__(self, pending: PendingMessage) -> None:
        super().__init__([pending.tensor])
        self._letter = pending

    def _await(self, seconds: float | None) -> bool:
        return self._letter.mailbox.carry_until(self._letter, seconds)


@dataclass
class _Stream:
    """Incoming data of a source: a header, then a body, for a receive or to buffer."""

    header: Any = field(default_factory=lambda: (c_char * _HEADER.size)())
    read: int = 0  # bytes, of the header or of the body
    length: int = -1  # of the body; -1 while the header is not complete
    kind: int = 0
    body: Tensor | None = None
    letter: PendingMessage | None = None
    fits: bool = False  # whether the body is received directly into the letter's tensor
    aside: _Aside | None = None


@dataclass
class _Aside:
    source: int
    tag: int
    kind: int
    body: Tensor
    complete: bool = False
    letter: PendingMessage | None = None  # a receive that came while the body was coming in


class Mailbox:
    """All sends and receives of a rank with the ranks of its host.

    number_of: dtype to the number that identifies it on both ends. A single lock guards all
    messages in progress. Any thread that waits for a letter makes progress on all letters, so its
    own letter is moved by any thread that holds the lock.
    """

    def __init__(self, host: Host, number_of: dict[torch.dtype, int]) -> None:
        self._host = host
        self._number_of = number_of
        self._own = host.members.rank
        self._others = [rank for rank in range(host.members.size) if rank != self._own]
        self._lock = threading.RLock()
        # Sends by receiver, in the order of sending; and the receives without a message yet.
        self._leaving: dict[int, deque[PendingMessage]] = {}
        self._wanted: list[PendingMessage] = []
        self._streams = [_Stream() for _ in range(host.members.size)]
        self._aside: list[_Aside] = []
        self._thread: threading.Thread | None = None
        self._work_to_do = threading.Event()
        self._closed = False
        # Both are written with the lock held, and read without it where stale values are harmless.
        self._moves = 0  # steps with progress; a change shows that another thread makes progress
        self._carriers = 0  # threads that make progress on letters now

    def send(self, tensor: Tensor, to: int, tag: int) -> CallHandle:
        """Begin to send; the tensor may be changed when the work is done."""
        letter = self._letter_to(tensor, to, tag)
        receipt = letter.receipt = MessageWork(letter)
        with self._lock:
            self._raise_if_over()
            # A message to this rank itself never meets a channel: a copy is put aside at once.
            if to == self._own:
                kind = self._number_of[tensor.dtype]
                self._arrived(_Aside(to, tag, kind, bytes_of(letter.dense.clone()), complete=True))
                letter.finish()
            else:
                self._leaving.setdefault(to, deque()).append(letter)
                self._step(self._carriers)  # this thread is not counted
        self._care_for(letter)
        return receipt

    def _letter_to(self, tensor: Tensor, to: int, tag: int) -> PendingMessage:
        name = f"send(to rank {self._host.members.names[to]}, tag {tag})"
        letter = PendingMessage(mailbox=self, tensor=tensor, peer=to, tag=tag, name=name)
        letter.header = _HEADER.pack(letter.dense.nbytes, tag, self._number_of[tensor.dtype])
        return letter

    def post(self, tensor: Tensor, to: int, tag: int) -> CallHandle | None:
        """Do `send` for a contiguous tensor by a faster path; None if the send is complete."""
        if to == self._own:
            return self.send(tensor, to, tag)
        nbytes = tensor.nbytes
        header = _HEADER.pack(nbytes, tag, self._number_of[tensor.dtype])
        with self._lock:
            self._raise_if_over()
            went = 0
            # Directly into the channel, unless earlier messages wait: between two ranks messages
            # keep their order.
            if not self._leaving.get(to):
                went = self._host.channel_write(to, header, tensor.data_ptr(), nbytes)
                if went == _HEADER.size + nbytes:
                    return None
            # The rest is sent like any other letter, from the byte at which it stopped.
            letter = self._letter_to(tensor, to, tag)
            letter.moved = went
            receipt = letter.receipt = MessageWork(letter)
            self._leaving.setdefault(to, deque()).append(letter)
        self._care_for(letter)
        return receipt

    def receive(self, tensor: Tensor, source: int, tag: int) -> CallHandle:
        """Begin to receive from `source`, or from ANY; the work's `source` is the sender."""
        letter = self._letter_from(tensor, source, tag)
        receipt = letter.receipt = MessageWork(letter)
        with self._lock:
            self._raise_if_over()
            self._ask(letter)
            self._step(self._carriers)
        self._care_for(letter)
        return receipt

    def _letter_from(self, tensor: Tensor, source: int, tag: int) -> PendingMessage:
        whom = "any rank" if source == ANY else f"rank {self._host.members.names[source]}"
        return PendingMessage(
            mailbox=self, tensor=tensor, peer=source, tag=tag, name=f"recv(from {whom}, tag {tag})"
        )

    def fetch(self, tensor: Tensor, source: int, tag: int) -> None:
        """Receive and wait, without waking the mailbox's thread, which would interfere."""
        stream = self._streams[source]
        with self._lock:
            self._raise_if_over()
            # Whether this message is the next in the channel: no earlier receive waits, nothing is
            # buffered, and no message has arrived in part.
            is_next = not (self._wanted or self._aside or stream.length >= 0 or stream.read)
            if is_next and source != self._own and tensor.is_contiguous():
                nbytes = tensor.nbytes
                header = _HEADER.pack(nbytes, tag, self._number_of[tensor.dtype])
                if self._host.channel_take(source, header, tensor.data_ptr(), nbytes):
                    return
            letter = self._letter_from(tensor, source, tag)
            self._ask(letter)
        self.carry_until(letter, None)
        if letter.error is not None:
            raise letter.error

    def _ask(self, pending: PendingMessage) -> None:
        """Match a receive with buffered messages, or register it; the lock is held."""
        # In the order of arrival, so that of two messages with the same tag the first is taken
        # first. An incomplete message matches too, and is handed over when it is complete.
        for aside in self._aside:
            wanted = pending.tag == aside.tag and pending.peer in (ANY, aside.source)
            if wanted and aside.letter is None:
                aside.letter = pending
                if aside.complete:
                    self._hand_over(aside)
                return
        self._wanted.append(pending)

    def carry_until(self, pending: PendingMessage, seconds: float | None) -> bool:
        """Make progress on all messages until this letter is done; False after `seconds`."""
        start = looked = time.monotonic()
        # From now on `close` waits for this thread, because it uses the channels.
        with self._lock:
            self._carriers += 1
        try:
            while not pending.done:
                # The bell is read before the channels: later data ring again, so none is missed.
                seen = self._host.bell()
                with self._lock:
                    moved = self._step(self._carriers - 1)
                if pending.done:
                    break
                now = time.monotonic()
                if seconds is not None and now - start >= seconds:
                    return False
                # By the clock: other peers may keep sending while this letter's peer is lost.
                if now - looked >= TICK:
                    looked = now
                    if (loss := self._look_around(pending, now - start)) is not None:
                        self._end(self._host.abort(loss))
                # At most a tick, so that a lost peer, which cannot ring, is detected.
                if not moved:
                    self._host.bell_wait(seen, TICK)
        finally:
            with self._lock:
                self._carriers -= 1
        return True

    def close(self) -> bool:
        """Refuse further messages; messages in progress fail.

        Returns whether no thread uses the host's channels any more.
        """
        self._closed = True
        self._end(self._left())
        # Wakes the mailbox's thread and all threads that wait for the bell, so that they check.
        self._work_to_do.set()
        self._host.ring(self._own)
        # With a timeout: a rank that leaves must not hang. Memory still in use then stays.
        if self._thread is not None:
            self._thread.join(1)
        until = time.monotonic() + 1
        while self._carriers and time.monotonic() < until:
            time.sleep(_SOON)
        return not self._carriers and (self._thread is None or not self._thread.is_alive())

    def _left(self) -> PeerLostError:
        return PeerLostError((self._name(),), "send or recv", "this group", "left the group")

    # Progress; the lock is held.

    def _step(self, others: int) -> bool:
        """Move all messages that can be moved; return whether any was.

        others: number of other threads that make progress, and may wait for a letter moved here.
        """
        moved = False
        for to, letters in self._leaving.items():
            # Sequentially, because the bytes of a letter are contiguous in the channel.
            while letters and self._push(to, letters[0]):
                moved = True
                if letters[0].moved < len(letters[0].header) + letters[0].dense.nbytes:
                    break
                letters.popleft().finish()
        for source in self._others:
            if self._pull(source, self._streams[source]):
                moved = True
        if moved:
            self._moves += 1
            # Another thread may wait for a letter that this one has just moved.
            if others:
                self._host.ring(self._own)
        return moved

    def _push(self, to: int, pending: PendingMessage) -> bool:
        """Send further bytes; return whether any were sent, or none remained."""
        done = max(0, pending.moved - _HEADER.size)  # bytes of the body that have left
        header = pending.header[pending.moved :]
        body = pending.dense
        went = self._host.channel_write(to, header, body.data_ptr() + done, body.nbytes - done)
        pending.moved += went
        return went > 0 or pending.moved == _HEADER.size + body.nbytes

    def _pull(self, source: int, stream: _Stream) -> bool:
        """Read the data that has arrived from a source; return whether there was any."""
        read = self._host.channel_read
        pulled = False
        while True:
            # A header may arrive in pieces; `_open` may refuse, and is retried at the next step.
            if stream.length < 0:
                address = addressof(stream.header) + stream.read
                moved = read(source, address, _HEADER.size - stream.read)
                stream.read += moved
                pulled = pulled or moved > 0
                if stream.read < _HEADER.size or not self._open(source, stream):
                    return pulled
            body = stream.body
            assert body is not None
            left = stream.length - stream.read
            moved = read(source, body.data_ptr() + stream.read, left) if left else 0
            stream.read += moved
            # A body without bytes is complete, though nothing moves.
            pulled = pulled or moved > 0 or not left
            if stream.read < stream.length:
                return pulled
            self._shut(source, stream)
            if not self._wanted:
                # The next message may stay in the channel, where its receive can take it directly.
                return pulled

    def _open(self, source: int, stream: _Stream) -> bool:
        """Find the memory for the body of a complete header.

        False if there is none yet, because too many bytes are buffered already.
        """
        length, tag, kind = _HEADER.unpack(stream.header)
        letter = self._wanted_by(source, tag)
        if letter is None and self._full(source):
            return False
        stream.length = length
        stream.kind = kind
        stream.read = 0
        stream.letter = letter
        stream.fits = letter is not None and self._fits(letter, length, kind)
        if letter is not None and stream.fits:
            stream.body = letter.dense
            return True
        # Without a matching receive, or with a misfit, the bytes still have to be read, because
        # other messages follow them.
        stream.body = torch.empty(length, dtype=torch.uint8)
        if letter is None:
            stream.aside = _Aside(source, tag, kind, stream.body)
            self._aside.append(stream.aside)
        return True

    def _wanted_by(self, source: int, tag: int) -> PendingMessage | None:
        """Return and remove the first receive that matches such a message, or None."""
        for index, letter in enumerate(self._wanted):
            if letter.tag == tag and letter.peer in (ANY, source):
                return self._wanted.pop(index)
        return None

    def _full(self, source: int) -> bool:
        """Return whether a source has to wait until its buffered messages are received.

        A source does not wait while a receive waits for another of its messages, because that
        message may come after the buffered messages and would never be reached.
        """
        if any(letter.peer in (ANY, source) for letter in self._wanted):
            return False
        return (
            sum(aside.body.numel() for aside in self._aside if aside.source == source)
            >= _ASIDE_BYTES
        )

    def _shut(self, source: int, stream: _Stream) -> None:
        """Complete a body."""
        letter = stream.letter
        aside = stream.aside
        length = stream.length
        stream.read = 0
        stream.length = -1
        stream.body = stream.letter = stream.aside = None
        if aside is not None:
            aside.complete = True
            if aside.letter is not None:
                self._hand_over(aside)
        elif letter is not None and stream.fits:
            letter.delivered(source)
        elif letter is not None:
            letter.finish(self._misfit(letter, source, length))

    def _arrived(self, aside: _Aside) -> None:
        """Handle a rank's message to itself."""
        aside.letter = self._wanted_by(aside.source, aside.tag)
        self._aside.append(aside)
        if aside.letter is not None:
            self._hand_over(aside)

    def _hand_over(self, aside: _Aside) -> None:
        """Copy a complete buffered message to its matching receive."""
        self._aside = [other for other in self._aside if other is not aside]
        letter = aside.letter
        assert letter is not None
        if not self._fits(letter, aside.body.numel(), aside.kind):
            letter.finish(self._misfit(letter, aside.source, aside.body.numel()))
            return
        bytes_of(letter.dense).copy_(aside.body)
        letter.delivered(aside.source)

    def _fits(self, pending: PendingMessage, nbytes: int, kind: int) -> bool:
        return nbytes == pending.dense.nbytes and kind == self._number_of[pending.tensor.dtype]

    def _misfit(self, pending: PendingMessage, source: int, nbytes: int) -> MismatchError:
        """Return the error of a receive whose message has another size or dtype."""
        # Only the receiver gets the error: the sender has already completed its send.
        sent = f"send of {nbytes} bytes with tag {pending.tag}"
        dtype = str(pending.tensor.dtype).removeprefix("torch.")
        asked = f"recv of {pending.dense.nbytes} bytes of {dtype}"
        names = self._host.members.names
        return MismatchError("a message", (((names[source],), sent), ((self._name(),), asked)))

    # Trouble, and the thread.

    def _look_around(self, pending: PendingMessage, waited: float) -> PeerLostError | None:
        """Return the error for the peers of a letter, if any, after a tick."""
        ended = self._host.aborted()
        if ended is not None:
            return ended
        # A receive from any rank fails only when all ranks are lost.
        peers = self._others if pending.peer == ANY else [pending.peer]
        step = f"call {self._host.current()[0]}"
        loss = self._host.loss_among(peers, pending.name, step)
        if loss is not None and (pending.peer != ANY or len(loss.ranks) == len(self._others)):
            with self._lock:  # its messages from before its death have arrived by now
                self._step(self._carriers - 1)
            return loss if not pending.done else None
        if waited >= self._host.timeout:
            return self._host.silent(peers, pending.name, step)
        return self._host.remote()

    def _end(self, loss: PeerLostError) -> None:
        """Fail all messages in progress."""
        with self._lock:
            streams = [stream.letter for stream in self._streams]
            asides = [aside.letter for aside in self._aside]
            sends = [letter for letters in self._leaving.values() for letter in letters]
            # A set, since a letter is finished once, wherever it is found.
            for letter in {*streams, *asides, *sends, *self._wanted}:
                if letter is not None and not letter.done:
                    letter.finish(loss)
            self._leaving.clear()
            self._wanted.clear()

    def _raise_if_over(self) -> None:
        """Raise PeerLostError if the group has ended, or was left."""
        if self._closed:
            raise self._left()
        if self._host.is_over():
            raise self._host.aborted() or AssertionError("over without a reason")

    def _care_for(self, pending: PendingMessage) -> None:
        """Make the thread take over a letter for which possibly no thread waits."""
        if pending.done or self._work_to_do.is_set():
            return
        # The thread starts only if letters stay in progress: most ranks never need it.
        if self._thread is None:
            self._thread = threading.Thread(target=self._carry, name="dure mailbox", daemon=True)
            self._thread.start()
        self._work_to_do.set()

    def _carry(self) -> None:
        try:
            self._carry_what_nobody_carries()
        except BaseException as error:
            # No thread waits for this thread: without this the peers would wait for the timeout.
            self._host.end(f"failed to carry its messages ({type(error).__name__}: {error})")
            self._end(self._host.aborted() or self._left())
            raise

    def _carry_what_nobody_carries(self) -> None:
        """Check periodically for messages without a waiting thread; sleep if there are none."""
        quiet = 0
        while not self._closed:
            if quiet >= _QUIET_ROUNDS:
                # With the lock, under which letters are added: otherwise a letter added in between
                # would find the event set, and be missed.
                with self._lock:
                    if not self._pending():
                        self._work_to_do.clear()
                self._work_to_do.wait()
                quiet = 0
            before = self._moves
            time.sleep(_SOON)  # a thread that waits for a message moves it itself, and faster
            # If messages moved meanwhile, another thread makes progress, and this thread pauses.
            if not self._pending() or self._moves != before:
                quiet += not self._pending()
                continue
            quiet = 0
            self._carry_on()

    def _carry_on(self) -> None:
        """Move all messages until none is in progress."""
        with self._lock:
            self._carriers += 1
        try:
            while not self._closed:
                seen = self._host.bell()
                with self._lock:
                    moved = self._step(self._carriers - 1)
                    if not self._pending():
                        return
                if not moved:
                    self._host.bell_wait(seen, TICK)
        finally:
            with self._lock:
                self._carriers -= 1

    def _pending(self) -> bool:
        return bool(self._wanted or any(self._leaving.values()) or self._coming())

    def _coming(self) -> bool:
        return any(stream.letter is not None for stream in self._streams) or any(
            aside.letter is not None for aside in self._aside
        )

    def _name(self) -> int:
        return self._host.members.names[self._own]
