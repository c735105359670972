"""The ranks of one host, as both cores (C and torch) know them: who is lost, what it last did."""

from __future__ import annotations

import contextlib
import os
import select
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
from torch import Tensor

from dure.collectives.shared_memory.calls import Call
from dure.collectives.shared_memory.torch_texts import not_in_time
from dure.collectives.shared_memory.work import Line
from dure.errors import PeerLostError

TICK = 0.1
"""Seconds between two looks at the peers while waiting."""


@dataclass(frozen=True)
class Members:
    """The ranks of a group that live on this host.

    rank: this one's place among them; names: what errors call each of them; processes: their
    process ids.
    """

    rank: int
    names: tuple[int, ...]
    processes: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class Pull:
    """What a rank reads of a peer's input: bytes from `offset` on, as many as `into` has.

    into: contiguous.
    """

    offset: int
    into: Tensor


@dataclass(frozen=True)
class Deal:
    """What a rank offers to a peer, and how many bytes it wants of that peer.

    offset, nbytes: the range of its input that it offers, in bytes.
    """

    offset: int = 0
    nbytes: int = 0
    wanted: int = 0


@dataclass(frozen=True)
class Progress:
    """How far a rank is.

    begun, finished: the numbers of the last call it has begun, and finished; last: the former.
    """

    begun: int
    finished: int
    last: Call
    left: bool


class Watch:
    """Sees processes die, by their pidfd.

    That works for processes that are no children as well, and at once, before they are reaped.
    """

    def __init__(self, members: Members) -> None:
        self._processes = members.processes
        self._fds = [_pidfd(process) for process in members.processes]

    def dead(self, rank: int) -> bool:
        """Whether the process of a rank has ended."""
        # A pidfd becomes readable when its process ends. Without one, /proc tells; a zombie (Z) is
        # dead as well.
        if self._fds[rank] < 0:
            return not _runs(self._processes[rank])
        poll = select.poll()
        poll.register(self._fds[rank], select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Gives the descriptors back."""
        for fd in self._fds:
            if fd >= 0:
                os.close(fd)
        self._fds = []


def _pidfd(process: int) -> int:
    try:
        return os.pidfd_open(process)
    except OSError:  # it is gone, or the kernel is too old
        return -1


def _runs(process: int) -> bool:
    try:
        # "pid (name) state …", and a name may hold spaces and brackets: split at the last one.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Loss(msgspec.Struct):
    """A PeerLostError, as it travels to the other ranks."""

    ranks: tuple[int, ...]
    operation: str
    step: str
    reason: str

    @classmethod
    def of(cls, error: PeerLostError) -> Loss:
        return cls(error.ranks, error.operation, error.step, error.reason)

    def error(self) -> PeerLostError:
        return PeerLostError(self.ranks, self.operation, self.step, self.reason)


class Collectives(Protocol):
    """What a group needs of its ranks: those of one host (`Host`) or of several (`Across`)."""

    def all_reduce(self, tensor: Tensor, op: int, root: int = -1) -> None:
        """In place; with a root only the root's tensor changes.

        op: a number of `calls.OPERATIONS`.
        """

    def reduce_scatter(self, blocks: Sequence[Tensor], out: Tensor, op: int, call: Call) -> None:
        """`out` becomes the reduction of all ranks' `blocks[rank]`."""

    def exchange(
        self,
        call: Call,
        parts: Sequence[Tensor],
        pulls: dict[int, Pull],
        deals: Sequence[Deal] | None = None,
    ) -> None:
        """Every rank offers `parts`, end to end, and pulls what it wants of its peers'.

        deals: needed where a rank cannot know what its peers offer; `pulls[rank].offset` is then
        the peer's to say. What a rank wants of itself is the caller's to copy.
        """


class Host(ABC):
    """Collectives and messages among the ranks of a host. Ranks are places among `members`.

    Collectives are called by one thread at a time. Tensors are dense, contiguous and on the CPU.
    """

    def __init__(self, members: Members, timeout: float) -> None:
        self.members = members
        self.timeout = timeout
        self._watch = Watch(members)
        self._error: BaseException | None = None  # from `tick`, through C, to `failure`
        # Where the group spans hosts: what this rank does, in words; seconds that it waits longer,
        # because a rank it waits for may itself wait for the network; how to tell the others of a
        # loss, which returns the one told first; and what has been told.
        self.doing: tuple[str, str] | None = None
        self.grace = 0.0
        self.tell: Callable[[PeerLostError], PeerLostError] = lambda loss: loss
        self.remote: Callable[[], PeerLostError | None] = lambda: None

    in_c = False
    """Whether this is the C core."""

    def direct(self, line: Line, otherwise: Callable[[Tensor, int], None]) -> Callable[..., None]:
        """`all_reduce(tensor, op)` in the line's turn, by the shortest way.

        otherwise: does it for tensors, and at times, that need more care.
        """
        return otherwise

    @property
    def split_phase(self) -> bool:
        """Whether calls can be begun and ended later; the same on all ranks."""
        return False

    def prepare_reduce_scatter(
        self, message: Tensor, out: Tensor, op: int
    ) -> Callable[[Sequence[Tensor]], int]:
        """What begins a reduce-scatter of `message`, and returns the call's number.

        Only where calls are `split_phase`.

        `out` becomes the reduction of all ranks' block of `message`, which lies in the pool. What
        is returned is given parts that together are this rank's own block, if that lies elsewhere;
        it is called again when the call before has ended.
        """
        raise NotImplementedError

    def prepare_all_reduce(self, message: Tensor, op: int) -> Callable[[], int]:
        """What begins an all-reduce of `message`, and returns the call's number.

        Only where calls are `split_phase`. `message`, which lies in the pool, becomes the reduction
        of all ranks'.
        """
        raise NotImplementedError

    def end_call(self, number: int) -> None:
        """Waits for the end of a begun call, and of those before it.

        The end of an all-reduce is that of all that are under way.
        """
        raise NotImplementedError

    def is_read(self, number: int) -> bool:
        """Whether no rank needs the message of a begun call any more."""
        raise NotImplementedError

    # What a core does.

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: int, root: int = -1) -> None: ...

    @abstractmethod
    def reduce_scatter(
        self, blocks: Sequence[Tensor], out: Tensor, op: int, call: Call
    ) -> None: ...

    @abstractmethod
    def exchange(
        self,
        call: Call,
        parts: Sequence[Tensor],
        pulls: dict[int, Pull],
        deals: Sequence[Deal] | None = None,
    ) -> None: ...

    channel_bytes = 0
    """Of a channel: what fits leaves at once. 0: nobody knows."""

    @abstractmethod
    def channel_write(self, to: int, header: bytes, address: int, nbytes: int) -> int:
        """How many bytes of a header and then a body went into the channel to `to`; never waits."""

    @abstractmethod
    def channel_read(self, source: int, address: int, nbytes: int) -> int:
        """Bytes that came out of the channel from `source`; never waits."""

    def channel_take(self, source: int, header: bytes, address: int, nbytes: int) -> bool:
        """Reads a body out of the channel from `source`, if it has come after just this header.

        Returns whether it did. Else nothing is read.
        """
        return False

    @abstractmethod
    def bell(self) -> int:
        """Changes whenever a channel from or to this rank has moved."""

    @abstractmethod
    def bell_wait(self, seen: int, seconds: float) -> None:
        """Returns when the bell is no longer what was seen, or after the time, or at a signal."""

    @abstractmethod
    def ring(self, rank: int) -> None:
        """Wakes whoever waits for the bell of `rank`."""

    @abstractmethod
    def progress(self, rank: int) -> Progress:
        """How far a rank of this host is."""

    @abstractmethod
    def current(self) -> tuple[int, Call]:
        """The number of this rank's last call, and the call."""

    @abstractmethod
    def missing(self) -> list[int]:
        """The ranks that have not arrived where this one waits."""

    @abstractmethod
    def _publish_loss(self, text: bytes) -> None:
        """Tells all ranks of the host, unless a loss has been told before."""

    @abstractmethod
    def _published_loss(self) -> bytes | None:
        """The loss that was told first."""

    @abstractmethod
    def leave(self) -> None:
        """Tells the others that this rank makes no more calls."""

    def close(self) -> None:
        """Gives back what the operating system has lent."""
        self._watch.close()

    def is_over(self) -> bool:
        """Whether the group has ended: the short way to ask, before each message."""
        return self._published_loss() is not None

    # What follows from it.

    def abort(self, loss: PeerLostError) -> PeerLostError:
        """Ends the group for all ranks of the host.

        Returns the error that was told first, the same everywhere.
        """
        # First what the hosts agree on, then what the ranks of this one agree on. Another rank may
        # have published before: what stands then is what all raise.
        self._publish_loss(msgspec.json.encode(Loss.of(self.tell(loss))))
        return self.aborted() or loss

    def aborted(self) -> PeerLostError | None:
        """Why the group has ended; None while it lives."""
        text = self._published_loss()
        if text is None:
            return None
        # It was cut off if it was too long for its place: then the text as it stands.
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(text, type=Loss).error()
        return PeerLostError((), "a call", "this group", text.decode(errors="replace"))

    def look_around(self, waited: float) -> PeerLostError | None:
        """What there is to say of the ranks that are missing; called while a collective waits."""
        # Death and leaving are certain, and told at once; silence is told after the time-out.
        missing = self.missing()
        loss = self.loss_among(missing, *self._now())
        if loss is None and waited >= self.timeout + self.grace:
            loss = self.silent(missing, *self._now())
        return loss or self.remote()

    def _now(self) -> tuple[str, str]:
        """What this rank does: the call, and its number, in words."""
        number, call = self.current()
        return self.doing or (str(call), f"call {number}")

    def loss_among(self, ranks: Sequence[int], operation: str, step: str) -> PeerLostError | None:
        """The error for those of `ranks` that have died or left."""
        # A process that ended in order has left as well: death is what is told.
        dead = [rank for rank in ranks if self._watch.dead(rank)]
        left = [rank for rank in ranks if rank not in dead and self.progress(rank).left]
        if dead:
            return self._lost(
                dead, f"died (process {self.members.processes[dead[0]]})", operation, step
            )
        return self._lost(left, "left the group", operation, step) if left else None

    def silent(self, ranks: Sequence[int], operation: str, step: str) -> PeerLostError:
        """The error for ranks that are alive and did not come in time."""
        return self._lost(ranks, not_in_time(self.timeout), operation, step)

    def _lost(self, ranks: Sequence[int], reason: str, operation: str, step: str) -> PeerLostError:
        """The error for these ranks, with what the first of them last did."""
        names = tuple(self.members.names[rank] for rank in ranks)
        did = self._last_did(ranks[0]) if ranks else ""
        return PeerLostError(names, operation, step, f"{reason}{did}")

    def _last_did(self, rank: int) -> str:
        """How far a rank came, in words, as the end of a reason."""
        progress = self.progress(rank)
        if self.doing is not None:  # its calls on this host are parts of the group's
            return ""
        if progress.begun == 0:
            return " before its first call"
        what = f"call {progress.begun}, {progress.last}"
        return (
            f" in the middle of {what}"
            if progress.finished < progress.begun
            else f" after it had finished {what}"
        )

    def tick(self, waited: float) -> bool:
        """Looks at the peers, now and then while a collective waits.

        True: give up. `failure` then has the error.
        """
        try:
            self._error = self.look_around(waited)
        except BaseException as error:  # Ctrl-C, above all; nothing may be raised through C
            self._error = error
        return self._error is not None

    def failure(self) -> BaseException:
        """The error with which this rank gives up; all others get to know it."""
        # Taken away, so that a later wait does not find an old error.
        error = self._error
        self._error = None
        if isinstance(error, PeerLostError):
            return self.abort(error)
        # A rank that stops waiting, by Ctrl-C for example, would hold up its peers: it tells them.
        self.end(f"was interrupted ({type(error).__name__})")
        assert error is not None
        return error

    def end(self, reason: str) -> None:
        """Ends the group for all ranks, for a reason that lies with this one."""
        self.abort(PeerLostError((self.members.names[self.members.rank],), *self._now(), reason))

    def failed(self, error: Exception) -> None:
        """Ends the group because a call has failed here.

        Arguments are checked before a call begins, so that this is a surprise: the others are told,
        and do not wait.
        """
        self.end(f"failed ({type(error).__name__}: {error})")
