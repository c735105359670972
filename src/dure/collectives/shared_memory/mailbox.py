"""Messages from one rank of a host to another: matched by source and tag, in the order in which
they were sent.

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
from collections.abc import Iterator
from contextlib import contextmanager
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
_SOON = 0.001  # seconds after which the thread takes over what nobody waits for
_ASIDE_BYTES = (
    64 << 20
)  # of messages that nobody has asked for, from each source, before it has to wait
_QUIET_ROUNDS = 50  # of these, after which the thread rests


class Letter(Work):
    """A send or receive under way. peer: its other end, or ANY. `wait` carries it on itself."""

    def __init__(self, mailbox: Mailbox, tensor: Tensor, peer: int, tag: int, name: str) -> None:
        super().__init__([tensor])
        self._mailbox = mailbox
        self.tensor = tensor
        self.dense = tensor if tensor.is_contiguous() else tensor.contiguous()
        self.peer, self.tag, self.name = peer, tag, name
        self.moved = 0  # bytes of header and body, for a send; of the body, for a receive
        self.header = b""

    def delivered(self, source: int) -> None:
        if self.dense is not self.tensor:
            with torch.inference_mode():
                self.tensor.copy_(self.dense)
        self.source = source
        self.finish()

    def _await(self, seconds: float | None) -> bool:
        return self._mailbox.carry_until(self, seconds)


@dataclass
class _Stream:
    """What comes in from one source: a header, then a body for a receive that has asked for it or
    to put aside."""

    header: Any = field(default_factory=lambda: (c_char * _HEADER.size)())
    read: int = 0
    length: int = -1  # of the body; -1 while the header is not complete
    tag: int = 0
    kind: int = 0
    body: Tensor | None = None
    letter: Letter | None = None


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
    """

    def __init__(self, host: Host, number_of: dict[torch.dtype, int]) -> None:
        self._host = host
        self._number_of = number_of
        self._lock = threading.RLock()
        self._leaving: dict[int, deque[Letter]] = {}
        self._wanted: list[Letter] = []
        self._streams = [_Stream() for _ in range(host.members.size)]
        self._aside: list[_Aside] = []
        self._thread: threading.Thread | None = None
        self._work_to_do = threading.Event()
        self._closed = False
        self._moves = self._carriers = 0

    def send(self, tensor: Tensor, to: int, tag: int) -> Letter:
        """Starts to send; the tensor may be changed when the letter is done."""
        letter = self._letter(tensor, to, tag)
        with self._carrying(), self._lock:
            self._raise_if_over()
            if to == self._host.members.rank:
                kind = self._number_of[tensor.dtype]
                self._arrived(_Aside(to, tag, kind, bytes_of(letter.dense.clone()), complete=True))
                letter.finish()
            else:
                self._leaving.setdefault(to, deque()).append(letter)
                self._step()
        self._care_for(letter)
        return letter

    def _letter(self, tensor: Tensor, to: int, tag: int) -> Letter:
        letter = Letter(self, tensor, to, tag, f"send(to rank {self._name(to)}, tag {tag})")
        letter.header = self._header(letter.dense, tag)
        return letter

    def _header(self, dense: Tensor, tag: int) -> bytes:
        return _HEADER.pack(dense.nbytes, tag, self._number_of[dense.dtype])

    def post(self, tensor: Tensor, to: int, tag: int) -> Letter | None:
        """`send` of a contiguous tensor, for those who count microseconds: None if all of it has
        left already."""
        if to == self._host.members.rank:
            return self.send(tensor, to, tag)
        with self._lock:
            self._raise_if_over()
            went, whole = 0, _HEADER.size + tensor.nbytes
            if not self._leaving.get(to):
                went = self._host.channel_write(
                    to, self._header(tensor, tag), tensor.data_ptr(), tensor.nbytes
                )
                if went == whole:
                    return None
            letter = self._letter(tensor, to, tag)
            letter.moved = went
            self._leaving.setdefault(to, deque()).append(letter)
        self._care_for(letter)
        return letter

    def receive(self, tensor: Tensor, source: int, tag: int) -> Letter:
        """Starts to receive from `source`, or from ANY; `letter.source` says from whom it came."""
        letter = self._ask_for(tensor, source, tag)
        self._care_for(letter)
        return letter

    def fetch(self, tensor: Tensor, source: int, tag: int) -> None:
        """Receives, and waits for it: the thread, which would be in the way, is not woken."""
        with self._lock:
            self._raise_if_over()
            if tensor.is_contiguous() and self._is_next(source) and self._take(tensor, source, tag):
                return
        self._ask_for(tensor, source, tag).wait()

    def _is_next(self, source: int) -> bool:
        """Whether what is asked for now is the next thing to come out of the channel; the lock is
        held."""
        stream = self._streams[source]
        return (
            not (self._wanted or self._aside or stream.length >= 0 or stream.read)
            and source != self._host.members.rank
        )

    def _take(self, tensor: Tensor, source: int, tag: int) -> bool:
        """Takes a message that has come whole, if it is the one that is asked for."""
        return self._host.channel_take(
            source, self._header(tensor, tag), tensor.data_ptr(), tensor.nbytes
        )

    def _ask_for(self, tensor: Tensor, source: int, tag: int) -> Letter:
        whom = "any rank" if source == ANY else f"rank {self._name(source)}"
        letter = Letter(self, tensor, source, tag, f"recv(from {whom}, tag {tag})")
        with self._carrying(), self._lock:
            self._raise_if_over()
            for aside in self._aside:
                if aside.letter is None and _matches(letter, aside.source, aside.tag):
                    aside.letter = letter
                    if aside.complete:
                        self._hand_over(aside)
                    break
            else:
                self._wanted.append(letter)
            self._step()
        return letter

    def carry_until(self, letter: Letter, seconds: float | None) -> bool:
        """Carries all messages on until this one is done; False after `seconds`."""
        start = looked = time.monotonic()
        with self._carrying():
            while not letter.is_completed():
                seen = self._host.bell()
                with self._lock:
                    moved = self._step()
                if letter.is_completed():
                    break
                now = time.monotonic()
                if seconds is not None and now - start >= seconds:
                    return False
                if (
                    now - looked >= TICK
                ):  # by the clock: others may talk on while this one's peer is lost
                    looked = now
                    if (loss := self._look_around(letter, now - start)) is not None:
                        self._end(self._host.abort(loss))
                if not moved:
                    self._host.bell_wait(seen, TICK)
        return True

    @contextmanager
    def _carrying(self) -> Iterator[None]:
        """While more than one thread carries, each wakes the others when something has moved."""
        with self._lock:
            self._carriers += 1
        try:
            yield
        finally:
            with self._lock:
                self._carriers -= 1

    def close(self) -> bool:
        """No more messages: what is still under way fails. Whether nobody uses the host's channels
        any more."""
        self._closed = True
        self._end(self._left())
        self._work_to_do.set()
        self._host.ring(self._host.members.rank)
        if self._thread is not None:
            self._thread.join(1)
        until = time.monotonic() + 1
        while self._carriers and time.monotonic() < until:
            time.sleep(_SOON)
        return not self._carriers and (self._thread is None or not self._thread.is_alive())

    def _left(self) -> PeerLostError:
        return PeerLostError((self._own_name(),), "send or recv", "this group", "left the group")

    # Progress; the lock is held.

    def _step(self) -> bool:
        """Moves whatever can be moved; whether anything was."""
        moved = False
        for to, letters in self._leaving.items():
            while letters and self._push(to, letters[0]):
                moved = True
                if letters[0].moved < len(letters[0].header) + letters[0].dense.nbytes:
                    break
                letters.popleft().finish()
        for source in range(self._host.members.size):
            if source != self._host.members.rank:
                while self._pull(source):
                    moved = True
        if moved:
            self._moves += 1
            if self._carriers > 1:
                self._host.ring(
                    self._host.members.rank
                )  # another thread may wait for what this one has done
        return moved

    def _push(self, to: int, letter: Letter) -> bool:
        """Sends on; whether anything went, or nothing was left to go."""
        done = max(0, letter.moved - _HEADER.size)
        header = letter.header[letter.moved :]
        body = letter.dense
        went = self._host.channel_write(to, header, body.data_ptr() + done, body.nbytes - done)
        letter.moved += went
        return went > 0 or letter.moved == _HEADER.size + body.nbytes

    def _pull(self, source: int) -> bool:
        stream = self._streams[source]
        if stream.length < 0:
            address = addressof(stream.header) + stream.read
            moved = self._host.channel_read(source, address, _HEADER.size - stream.read)
            stream.read += moved
            return moved > 0 if stream.read < _HEADER.size else self._open(source, stream)
        assert stream.body is not None
        left = stream.length - stream.read
        moved = (
            self._host.channel_read(source, stream.body.data_ptr() + stream.read, left)
            if left
            else 0
        )
        stream.read += moved
        if stream.read == stream.length:
            self._shut(source, stream)
            return True
        return moved > 0

    def _open(self, source: int, stream: _Stream) -> bool:
        """A header is there: where does its body go? False: nowhere yet, and there is too much put
        aside already."""
        length, stream.tag, stream.kind = _HEADER.unpack(stream.header)
        stream.letter = next(
            (letter for letter in self._wanted if _matches(letter, source, stream.tag)), None
        )
        if stream.letter is not None:
            self._wanted.remove(stream.letter)
        elif self._full(source):
            return False
        stream.length, stream.read = length, 0
        if stream.letter is not None and self._fits(stream.letter, stream.length, stream.kind):
            stream.body = bytes_of(stream.letter.dense)
        else:
            stream.body = torch.empty(stream.length, dtype=torch.uint8)
        if stream.letter is None:
            self._aside.append(_Aside(source, stream.tag, stream.kind, stream.body))
        return True

    def _full(self, source: int) -> bool:
        """Whether a source has to wait until somebody asks for its messages.

        It has not while a receive waits for another message of it, which may come behind these.
        """
        if any(letter.peer in (ANY, source) for letter in self._wanted):
            return False
        return (
            sum(aside.body.numel() for aside in self._aside if aside.source == source)
            >= _ASIDE_BYTES
        )

    def _shut(self, source: int, stream: _Stream) -> None:
        """A body is complete."""
        body, letter, length = stream.body, stream.letter, stream.length
        stream.read, stream.length, stream.body, stream.letter = 0, -1, None, None
        assert body is not None
        if letter is None:
            aside = next(aside for aside in self._aside if aside.body is body)
            aside.complete = True
            if aside.letter is not None:
                self._hand_over(aside)
        elif not self._fits(letter, length, stream.kind):
            letter.finish(self._misfit(letter, source, length))
        else:
            letter.delivered(source)

    def _arrived(self, aside: _Aside) -> None:
        """A rank's message to itself."""
        aside.letter = next(
            (letter for letter in self._wanted if _matches(letter, aside.source, aside.tag)), None
        )
        self._aside.append(aside)
        if aside.letter is not None:
            self._wanted.remove(aside.letter)
            self._hand_over(aside)

    def _hand_over(self, aside: _Aside) -> None:
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
        sent = f"send of {nbytes} bytes with tag {letter.tag}"
        asked = f"recv of {letter.dense.nbytes} bytes of {str(letter.tensor.dtype).removeprefix('torch.')}"
        names = self._host.members.names
        return MismatchError("a message", (((names[source],), sent), ((self._own_name(),), asked)))

    # Trouble, and the thread.

    def _look_around(self, letter: Letter, waited: float) -> PeerLostError | None:
        ended = self._host.aborted()
        if ended is not None:
            return ended
        others = [
            rank for rank in range(self._host.members.size) if rank != self._host.members.rank
        ]
        peers = others if letter.peer == ANY else [letter.peer]
        step = f"call {self._host.current()[0]}"
        loss = self._host.loss_among(peers, letter.name, step)
        if loss is not None and (letter.peer != ANY or len(loss.ranks) == len(others)):
            with self._lock:  # what it sent before it died has arrived by now
                self._step()
            return loss if not letter.is_completed() else None
        if waited >= self._host.timeout:
            return self._host.silent(peers, letter.name, step)
        return self._host.remote()

    def _end(self, loss: PeerLostError) -> None:
        """Nothing more comes or goes."""
        with self._lock:
            streams = [stream.letter for stream in self._streams]
            asides = [aside.letter for aside in self._aside]
            sends = [letter for letters in self._leaving.values() for letter in letters]
            for letter in {*streams, *asides, *sends, *self._wanted}:
                if letter is not None and not letter.is_completed():
                    letter.finish(loss)
            self._leaving.clear()
            self._wanted.clear()

    def _raise_if_over(self) -> None:
        loss = self._left() if self._closed else self._host.aborted()
        if loss is not None:
            raise loss

    def _care_for(self, letter: Letter) -> None:
        if letter.is_completed() or self._work_to_do.is_set():
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._carry, name="dure mailbox", daemon=True)
            self._thread.start()
        self._work_to_do.set()

    def _carry(self) -> None:
        try:
            self._carry_what_nobody_carries()
        except BaseException as error:
            self._host.end(f"failed to carry its messages ({type(error).__name__}: {error})")
            self._end(self._host.aborted() or self._left())
            raise

    def _carry_what_nobody_carries(self) -> None:
        """Looks every now and then for messages that nobody has carried on meanwhile; rests when
        there are none."""
        quiet = 0
        while not self._closed:
            if quiet >= _QUIET_ROUNDS:
                with self._lock:
                    if not self._pending():
                        self._work_to_do.clear()
                self._work_to_do.wait()
                quiet = 0
            before = self._moves
            time.sleep(_SOON)  # whoever waits for a message carries it himself, and faster
            if not self._pending() or self._moves != before:
                quiet += not self._pending()
                continue
            quiet = 0
            with self._carrying():
                while not self._closed:
                    seen = self._host.bell()
                    with self._lock:
                        moved = self._step()
                        if not self._pending():
                            break
                    if not moved:
                        self._host.bell_wait(seen, TICK)

    def _pending(self) -> bool:
        return bool(self._wanted or any(self._leaving.values()) or self._coming())

    def _coming(self) -> bool:
        return any(stream.letter is not None for stream in self._streams) or any(
            aside.letter is not None for aside in self._aside
        )

    def _name(self, rank: int) -> int:
        return self._host.members.names[rank]

    def _own_name(self) -> int:
        return self._name(self._host.members.rank)


def _matches(letter: Letter, source: int, tag: int) -> bool:
    return letter.peer in (ANY, source) and letter.tag == tag
