"""Messages between ranks of a host, matched by source and tag in the order of sending.

A message is a header and its bytes, streamed through the channel from its sender to its receiver;
one that nobody has asked for yet is put aside. Sends and receives make progress when somebody waits
for one of them, and on a thread of the mailbox when nobody does, so that a rank that computes, or
is in a collective, holds up nobody.
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
from dure.collectives.shared_memory.work import Work
from dure.errors import MismatchError, PeerLostError

_HEADER = struct.Struct("<qqq")  # bytes, tag, dtype
HEADER_BYTES = _HEADER.size
ANY = -1
_SOON = 0.001
"""Seconds after which the thread takes over what nobody waits for."""
_ASIDE_BYTES = 64 << 20
"""Bytes of messages of one source that nobody has asked for; with more, the source has to wait."""
_QUIET_ROUNDS = 50
"""Rounds of `_SOON` seconds in which nothing was under way, after which the thread rests."""


class Letter:
    """A send or receive under way.

    peer: its other end, or ANY; name: what errors call it.

    A thread that holds the mailbox's lock may finish it; any may look whether it is `done`.
    """

    def __init__(self, mailbox: Mailbox, tensor: Tensor, peer: int, tag: int, name: str) -> None:
        self.mailbox = mailbox
        self.tensor = tensor
        # Channels carry bytes in one piece: a strided tensor is sent from a copy, or arrives in
        # one.
        self.dense = tensor if tensor.is_contiguous() else tensor.contiguous()
        self.peer = peer
        self.tag = tag
        self.name = name
        self.moved = 0  # bytes of header and body that have left, for a send
        self.header = b""
        self.done = False
        self.error: BaseException | None = None
        self.receipt: Receipt | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """It is done, or has failed."""
        self.error = error
        self.done = True  # last: a thread that sees it, without the lock, may read the rest
        if self.receipt is not None:
            self.receipt.finish(error)

    def delivered(self, source: int) -> None:
        """What was asked for has come from `source`; the lock is held."""
        # In inference mode, as calls in line: the tensor may be a parameter.
        if self.dense is not self.tensor:
            with torch.inference_mode():
                self.tensor.copy_(self.dense)
        if self.receipt is not None:
            self.receipt.source = source
        self.finish()


class Receipt(Work):
    """A letter as torch knows it, for callers that go on while it is under way.

    `wait` carries the letter on itself.
    """

    def __init__(self, letter: Letter) -> None:
        super().__init__([letter.tensor])
        self._letter = letter

    def _await(self, seconds: float | None) -> bool:
        return self._letter.mailbox.carry_until(self._letter, seconds)


@dataclass
class _Stream:
    """What comes in from one source: a header, then a body, for a receive or to put aside."""

    header: Any = field(default_factory=lambda: (c_char * _HEADER.size)())
    read: int = 0  # bytes, of the header or of the body
    length: int = -1  # of the body; -1 while the header is not complete
    kind: int = 0
    body: Tensor | None = None
    letter: Letter | None = None
    fits: bool = False  # whether the body goes where the letter wants it
    aside: _Aside | None = None


@dataclass
class _Aside:
    source: int
    tag: int
    kind: int
    body: Tensor
    complete: bool = False
    letter: Letter | None = None  # a receive that came while the body was coming in


class Mailbox:
    """All sends and receives of a rank with the ranks of its host.

    number_of: dtype to the number by which both ends know it.

    One lock guards all that is under way. Any thread that waits for a letter carries all letters
    on, so that the one it waits for is moved by whoever holds the lock.
    """

    def __init__(self, host: Host, number_of: dict[torch.dtype, int]) -> None:
        self._host = host
        self._number_of = number_of
        self._own = host.members.rank
        self._others = [rank for rank in range(host.members.size) if rank != self._own]
        self._lock = threading.RLock()
        # By receiver, in the order of sending; and the receives that nothing has come for yet.
        self._leaving: dict[int, deque[Letter]] = {}
        self._wanted: list[Letter] = []
        self._streams = [_Stream() for _ in range(host.members.size)]
        self._aside: list[_Aside] = []
        self._thread: threading.Thread | None = None
        self._work_to_do = threading.Event()
        self._closed = False
        # Both are changed with the lock held, and read without it where a late answer does no harm.
        self._moves = 0  # how often anything has moved, by which the thread sees that others carry
        self._carriers = 0  # threads that carry letters on at this time

    def send(self, tensor: Tensor, to: int, tag: int) -> Work:
        """Starts to send; the tensor may be changed when the work is done."""
        letter = self._letter_to(tensor, to, tag)
        receipt = letter.receipt = Receipt(letter)
        with self._lock:
            self._raise_if_over()
            # A message to this rank itself never meets a channel: a copy is put aside at once.
            if to == self._own:
                kind = self._number_of[tensor.dtype]
                self._arrived(_Aside(to, tag, kind, bytes_of(letter.dense.clone()), complete=True))
                letter.finish()
            else:
                self._leaving.setdefault(to, deque()).append(letter)
                self._step(self._carriers)  # this thread is none of them
        self._care_for(letter)
        return receipt

    def _letter_to(self, tensor: Tensor, to: int, tag: int) -> Letter:
        name = f"send(to rank {self._host.members.names[to]}, tag {tag})"
        letter = Letter(mailbox=self, tensor=tensor, peer=to, tag=tag, name=name)
        letter.header = _HEADER.pack(letter.dense.nbytes, tag, self._number_of[tensor.dtype])
        return letter

    def post(self, tensor: Tensor, to: int, tag: int) -> Work | None:
        """`send` of a contiguous tensor, by a shorter way; None if all of it has left already."""
        if to == self._own:
            return self.send(tensor, to, tag)
        nbytes = tensor.nbytes
        header = _HEADER.pack(nbytes, tag, self._number_of[tensor.dtype])
        with self._lock:
            self._raise_if_over()
            went = 0
            # Straight into the channel, unless others are before it: between two ranks messages
            # keep their order.
            if not self._leaving.get(to):
                went = self._host.channel_write(to, header, tensor.data_ptr(), nbytes)
                if went == _HEADER.size + nbytes:
                    return None
            # The rest leaves as any other letter does, from the byte at which it stopped.
            letter = self._letter_to(tensor, to, tag)
            letter.moved = went
            receipt = letter.receipt = Receipt(letter)
            self._leaving.setdefault(to, deque()).append(letter)
        self._care_for(letter)
        return receipt

    def receive(self, tensor: Tensor, source: int, tag: int) -> Work:
        """Starts to receive from `source`, or from ANY; the work's `source` says who it was."""
        letter = self._letter_from(tensor, source, tag)
        receipt = letter.receipt = Receipt(letter)
        with self._lock:
            self._raise_if_over()
            self._ask(letter)
            self._step(self._carriers)
        self._care_for(letter)
        return receipt

    def _letter_from(self, tensor: Tensor, source: int, tag: int) -> Letter:
        whom = "any rank" if source == ANY else f"rank {self._host.members.names[source]}"
        return Letter(
            mailbox=self, tensor=tensor, peer=source, tag=tag, name=f"recv(from {whom}, tag {tag})"
        )

    def fetch(self, tensor: Tensor, source: int, tag: int) -> None:
        """Receives, and waits for it: the thread, which would be in the way, is not woken."""
        stream = self._streams[source]
        with self._lock:
            self._raise_if_over()
            # Whether what is asked for now is the next thing to come out of the channel: nobody
            # has asked before, nothing was put aside, and no message has come in part.
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

    def _ask(self, letter: Letter) -> None:
        """Matches a receive with what was put aside, or lets it wait; the lock is held."""
        # In the order of arrival, so that of two messages with one tag the first is taken first.
        # One that is still coming in is taken as well: it is handed over when it is complete.
        for aside in self._aside:
            wanted = letter.tag == aside.tag and letter.peer in (ANY, aside.source)
            if wanted and aside.letter is None:
                aside.letter = letter
                if aside.complete:
                    self._hand_over(aside)
                return
        self._wanted.append(letter)

    def carry_until(self, letter: Letter, seconds: float | None) -> bool:
        """Carries all messages on until this one is done; False after `seconds`."""
        start = looked = time.monotonic()
        # From here on `close` waits for this thread, which uses the channels.
        with self._lock:
            self._carriers += 1
        try:
            while not letter.done:
                # The bell is read before the channels are: what comes after that rings again.
                seen = self._host.bell()
                with self._lock:
                    moved = self._step(self._carriers - 1)
                if letter.done:
                    break
                now = time.monotonic()
                if seconds is not None and now - start >= seconds:
                    return False
                # by the clock: others may talk on while this one's peer is lost
                if now - looked >= TICK:
                    looked = now
                    if (loss := self._look_around(letter, now - start)) is not None:
                        self._end(self._host.abort(loss))
                # At most a tick, so that a lost peer, which rings for nobody, is looked for.
                if not moved:
                    self._host.bell_wait(seen, TICK)
        finally:
            with self._lock:
                self._carriers -= 1
        return True

    def close(self) -> bool:
        """No more messages: what is still under way fails.

        Returns whether nobody uses the host's channels any more.
        """
        self._closed = True
        self._end(self._left())
        # The thread may rest, or sleep for the bell, and other threads may carry: all look again.
        self._work_to_do.set()
        self._host.ring(self._own)
        # Not for ever: a rank that leaves must not hang. What is still used then stays.
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
        """Moves whatever can be moved; whether anything was.

        others: how many other threads carry, and may wait for what this one has done.
        """
        moved = False
        for to, letters in self._leaving.items():
            # One after another: the bytes of a letter lie together in the channel.
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

    def _push(self, to: int, letter: Letter) -> bool:
        """Sends on; whether anything went, or nothing was left to go."""
        done = max(0, letter.moved - _HEADER.size)  # bytes of the body that have left
        header = letter.header[letter.moved :]
        body = letter.dense
        went = self._host.channel_write(to, header, body.data_ptr() + done, body.nbytes - done)
        letter.moved += went
        return went > 0 or letter.moved == _HEADER.size + body.nbytes

    def _pull(self, source: int, stream: _Stream) -> bool:
        """Takes what has come from a source, message after message; whether anything had."""
        read = self._host.channel_read
        pulled = False
        while True:
            # A header may come in pieces; `_open` may say no, and is asked again at the next step.
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
                # What comes next may stay where it is, for whoever asks for it to take it there.
                return pulled

    def _open(self, source: int, stream: _Stream) -> bool:
        """A header is there: finds the place for its body.

        False: there is none yet, because too much is put aside already.
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
        # Nobody wants it yet, or it does not fit: the bytes have to be read all the same, since
        # others come after them.
        stream.body = torch.empty(length, dtype=torch.uint8)
        if letter is None:
            stream.aside = _Aside(source, tag, kind, stream.body)
            self._aside.append(stream.aside)
        return True

    def _wanted_by(self, source: int, tag: int) -> Letter | None:
        """The first receive that waits for such a message; it waits no longer."""
        for index, letter in enumerate(self._wanted):
            if letter.tag == tag and letter.peer in (ANY, source):
                return self._wanted.pop(index)
        return None

    def _full(self, source: int) -> bool:
        """Whether a source has to wait until somebody asks for its messages.

        It has not while a receive waits for another message of it, which may come after these,
        and would never be reached.
        """
        if any(letter.peer in (ANY, source) for letter in self._wanted):
            return False
        return (
            sum(aside.body.numel() for aside in self._aside if aside.source == source)
            >= _ASIDE_BYTES
        )

    def _shut(self, source: int, stream: _Stream) -> None:
        """A body is complete."""
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
        """A rank's message to itself."""
        aside.letter = self._wanted_by(aside.source, aside.tag)
        self._aside.append(aside)
        if aside.letter is not None:
            self._hand_over(aside)

    def _hand_over(self, aside: _Aside) -> None:
        """A complete message that was put aside goes to the receive that wants it."""
        self._aside = [other for other in self._aside if other is not aside]
        letter = aside.letter
        assert letter is not None
        if not self._fits(letter, aside.body.numel(), aside.kind):
            letter.finish(self._misfit(letter, aside.source, aside.body.numel()))
            return
        bytes_of(letter.dense).copy_(aside.body)
        letter.delivered(aside.source)

    def _fits(self, letter: Letter, nbytes: int, kind: int) -> bool:
        return nbytes == letter.dense.nbytes and kind == self._number_of[letter.tensor.dtype]

    def _misfit(self, letter: Letter, source: int, nbytes: int) -> MismatchError:
        """The error of a receive for which something else has come."""
        # Only the receiver gets it: the sender is through, its bytes have left.
        sent = f"send of {nbytes} bytes with tag {letter.tag}"
        dtype = str(letter.tensor.dtype).removeprefix("torch.")
        asked = f"recv of {letter.dense.nbytes} bytes of {dtype}"
        names = self._host.members.names
        return MismatchError("a message", (((names[source],), sent), ((self._name(),), asked)))

    # Trouble, and the thread.

    def _look_around(self, letter: Letter, waited: float) -> PeerLostError | None:
        """What there is to say, after a tick, of those that a letter waits for."""
        ended = self._host.aborted()
        if ended is not None:
            return ended
        # A receive from any rank is lost only when all of them are.
        peers = self._others if letter.peer == ANY else [letter.peer]
        step = f"call {self._host.current()[0]}"
        loss = self._host.loss_among(peers, letter.name, step)
        if loss is not None and (letter.peer != ANY or len(loss.ranks) == len(self._others)):
            with self._lock:  # what it sent before it died has arrived by now
                self._step(self._carriers - 1)
            return loss if not letter.done else None
        if waited >= self._host.timeout:
            return self._host.silent(peers, letter.name, step)
        return self._host.remote()

    def _end(self, loss: PeerLostError) -> None:
        """Nothing more comes or goes."""
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
        """Raises PeerLostError if the group has ended, or was left."""
        if self._closed:
            raise self._left()
        if self._host.is_over():
            raise self._host.aborted() or AssertionError("over without a reason")

    def _care_for(self, letter: Letter) -> None:
        """Makes the thread look after a letter for which nobody may wait."""
        if letter.done or self._work_to_do.is_set():
            return
        # A thread only where letters are left under way: most ranks never need one.
        if self._thread is None:
            self._thread = threading.Thread(target=self._carry, name="dure mailbox", daemon=True)
            self._thread.start()
        self._work_to_do.set()

    def _carry(self) -> None:
        try:
            self._carry_what_nobody_carries()
        except BaseException as error:
            # Nobody waits for this thread: without this the peers would find out by the time-out.
            self._host.end(f"failed to carry its messages ({type(error).__name__}: {error})")
            self._end(self._host.aborted() or self._left())
            raise

    def _carry_what_nobody_carries(self) -> None:
        """Looks now and then for messages that nobody carries on; rests if there are none."""
        quiet = 0
        while not self._closed:
            if quiet >= _QUIET_ROUNDS:
                # With the lock, under which letters are added: none can come in between, and find
                # the event set.
                with self._lock:
                    if not self._pending():
                        self._work_to_do.clear()
                self._work_to_do.wait()
                quiet = 0
            before = self._moves
            time.sleep(_SOON)  # a thread that waits for a message carries it itself, and faster
            # Something has moved without this thread, so somebody else carries: leave it to them.
            if not self._pending() or self._moves != before:
                quiet += not self._pending()
                continue
            quiet = 0
            self._carry_on()

    def _carry_on(self) -> None:
        """Moves all messages until none is under way."""
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
