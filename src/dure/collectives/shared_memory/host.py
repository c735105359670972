"""Ranks of a host, as both cores (C and torch) see them: lost ranks, and their last calls."""

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

from dure.collectives.shared_memory.calls import CollectiveCall
from dure.collectives.shared_memory.torch_error_texts import not_in_time
from dure.collectives.shared_memory.work import CallQueue
from dure.errors import PeerLostError

TICK = 0.1
"""Seconds between two checks of the peers during a wait."""


@dataclass(frozen=True)
class HostMembers:
    """Ranks of a group on this host.

    rank: this rank's position among them; names: names of the ranks in errors; processes: their
    process ids.
    """

    rank: int
    names: tuple[int, ...]
    processes: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class PeerRead:
    """Bytes that a rank reads from a peer's input: from `offset` on, as many as `into` has.

    into: contiguous.
    """

    offset: int
    into: Tensor


@dataclass(frozen=True)
class ByteOffer:
    """Bytes that a rank offers to a peer, and number of bytes that it wants from the peer.

    offset, nbytes: the offered range of its input, in bytes.
    """

    offset: int = 0
    nbytes: int = 0
    wanted: int = 0


@dataclass(frozen=True)
class CallProgress:
    """Progress of a rank.

    begun, finished: numbers of the last begun and the last finished call; last: the last begun
    call. left: whether the rank has left the group.
    """

    begun: int
    finished: int
    last: CollectiveCall
    left: bool


class ProcessMonitor:
    """Monitor of processes by pidfd, to detect their end.

    This works for processes that are not children too, and immediately, before they are reaped.
    """

    def __init__(self, members: HostMembers) -> None:
        self._processes = members.processes
        self._fds = [_pidfd(process) for process in members.processes]

    def dead(self, rank: int) -> bool:
        """Return whether the process of a rank has ended."""
        # A pidfd becomes readable when its process ends. Without a pidfd, /proc is read; a zombie
        # (Z) counts as dead.
        if self._fds[rank] < 0:
            return not _runs(self._processes[rank])
        poll = select.poll()
        poll.register(self._fds[rank], select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the descriptors."""
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


class PeerLoss(msgspec.Struct):
    """PeerLostError in the form that is sent to other ranks."""

    ranks: tuple[int, ...]
    operation: str
    step: str
    reason: str

    @classmethod
    def of(cls, error: PeerLostError) -> PeerLoss:
        return cls(error.ranks, error.operation, error.step, error.reason)

    def error(self) -> PeerLostError:
        return PeerLostError(self.ranks, self.operation, self.step, self.reason)


class Collectives(Protocol):
    """Operations of a group's ranks on a host (`Host`) or on several (`InterHostCollectives`)."""

    def all_reduce(self, tensor: Tensor, op: int, root: int = -1) -> None:
        """Reduce in place; with a root only the root's tensor changes.

        op: a number of `calls.OPERATIONS`.
        """

    def reduce_scatter(
        self, blocks: Sequence[Tensor], out: Tensor, op: int, call: CollectiveCall
    ) -> None:
        """Write the reduction of all ranks' `blocks[rank]` to `out`."""

    def exchange(
        self,
        call: CollectiveCall,
        parts: Sequence[Tensor],
        pulls: dict[int, PeerRead],
        deals: Sequence[ByteOffer] | None = None,
    ) -> None:
        """Offer `parts`, concatenated, and pull the wanted bytes from the peers.

        deals: needed if a rank cannot know the offers of its peers; the peer then determines
        `pulls[rank].offset`. The caller copies a rank's part for itself.
        """


class Host(ABC):
    """Collectives and messages among the ranks of a host. Ranks are positions in `members`.

    A single thread at a time calls collectives. Tensors are dense, contiguous and on the CPU.
    """

    def __init__(self, members: HostMembers, timeout: float) -> None:
        self.members = members
        self.timeout = timeout
        self._watch = ProcessMonitor(members)
        self._error: BaseException | None = None  # from `tick`, through C, to `failure`
        # For a group that spans hosts: this rank's call as text; additional seconds of waiting,
        # because a peer may itself wait for the network; a function that publishes a loss to other
        # hosts and returns the first published loss; and a function that returns that loss.
        self.doing: tuple[str, str] | None = None
        self.grace = 0.0
        self.tell: Callable[[PeerLostError], PeerLostError] = lambda loss: loss
        self.remote: Callable[[], PeerLostError | None] = lambda: None

    in_c = False
    """Whether this is the C core."""

    def direct(
        self, line: CallQueue, otherwise: Callable[[Tensor, int], None]
    ) -> Callable[..., None]:
        """Return `all_reduce(tensor, op)` by the fast path, in the queue's turn.

        otherwise: fallback for tensors and situations that need more checks.
        """
        return otherwise

    @property
    def split_phase(self) -> bool:
        """Whether calls can begin now and end later; the same on all ranks."""
        return False

    def prepare_reduce_scatter(
        self, message: Tensor, out: Tensor, op: int
    ) -> Callable[[Sequence[Tensor]], int]:
        """Return a function that begins a reduce-scatter of `message`; only for `split_phase`.

        The function returns the call's number. `out` becomes the reduction of all ranks' block of
        `message`, which is in the pool. The argument of the function are parts that together are
        this rank's own block, if the block is not in `message`; the function may be called again
        when the previous call has ended.
        """
        raise NotImplementedError

    def prepare_all_reduce(self, message: Tensor, op: int) -> Callable[[], int]:
        """Return a function that begins an all-reduce of `message` and returns the call's number.

        Only for `split_phase`. `message`, which is in the pool, becomes the reduction of all
        ranks'.
        """
        raise NotImplementedError

    def end_call(self, number: int) -> None:
        """Wait for the end of a begun call and of earlier calls.

        The end of an all-reduce is the end of all calls in progress.
        """
        raise NotImplementedError

    def is_read(self, number: int) -> bool:
        """Return whether no rank needs the message of a begun call any more."""
        raise NotImplementedError

    # What a core does.

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: int, root: int = -1) -> None: ...

    @abstractmethod
    def reduce_scatter(
        self, blocks: Sequence[Tensor], out: Tensor, op: int, call: CollectiveCall
    ) -> None: ...

    @abstractmethod
    def exchange(
        self,
        call: CollectiveCall,
        parts: Sequence[Tensor],
        pulls: dict[int, PeerRead],
        deals: Sequence[ByteOffer] | None = None,
    ) -> None: ...

    channel_bytes = 0
    """Capacity of a channel: a message that fits is sent without a wait. 0 if unknown."""

    @abstractmethod
    def channel_write(self, to: int, header: bytes, address: int, nbytes: int) -> int:
        """Return how many bytes of a header and a body were written to the channel; never waits."""

    @abstractmethod
    def channel_read(self, source: int, address: int, nbytes: int) -> int:
        """Return how many bytes were read from the channel of `source`; never waits."""

    def channel_take(self, source: int, header: bytes, address: int, nbytes: int) -> bool:
        """Read a body from the channel of `source`, if it follows exactly this header.

        Returns whether the body was read. Otherwise nothing is read.
        """
        return False

    @abstractmethod
    def bell(self) -> int:
        """Return a counter that changes whenever a channel from or to this rank has moved."""

    @abstractmethod
    def bell_wait(self, seen: int, seconds: float) -> None:
        """Return when the bell differs from `seen`, after the timeout, or at a signal."""

    @abstractmethod
    def ring(self, rank: int) -> None:
        """Wake the threads that wait for the bell of `rank`."""

    @abstractmethod
    def progress(self, rank: int) -> CallProgress:
        """Return the progress of a rank of this host."""

    @abstractmethod
    def current(self) -> tuple[int, CollectiveCall]:
        """Return the number of this rank's last call, and the call."""

    @abstractmethod
    def missing(self) -> list[int]:
        """Return the ranks that have not arrived at this rank's synchronisation."""

    @abstractmethod
    def _publish_loss(self, text: bytes) -> None:
        """Publish a loss to all ranks of the host, unless a loss was published before."""

    @abstractmethod
    def _published_loss(self) -> bytes | None:
        """Return the loss that was published first."""

    @abstractmethod
    def leave(self) -> None:
        """Notify the other ranks that this rank makes no more calls."""

    def close(self) -> None:
        """Release the resources of the operating system."""
        self._watch.close()

    def is_over(self) -> bool:
        """Return whether the group has ended: the fast check before each message."""
        return self._published_loss() is not None

    # What follows from it.

    def abort(self, loss: PeerLostError) -> PeerLostError:
        """End the group for all ranks of the host.

        Returns the error that was published first, the same on all ranks.
        """
        # First the agreement of the hosts, then the agreement of this host's ranks. If another rank
        # has published before, all ranks raise that first loss.
        self._publish_loss(msgspec.json.encode(PeerLoss.of(self.tell(loss))))
        return self.aborted() or loss

    def aborted(self) -> PeerLostError | None:
        """Return the error that ended the group, or None."""
        text = self._published_loss()
        if text is None:
            return None
        # A text longer than its buffer was cut off, and is then used without decoding.
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(text, type=PeerLoss).error()
        return PeerLostError((), "a call", "this group", text.decode(errors="replace"))

    def look_around(self, waited: float) -> PeerLostError | None:
        """Return the error for missing ranks, if any; called during the wait of a collective."""
        # Death and leaving are certain and reported at once; silence only after the timeout.
        missing = self.missing()
        loss = self.loss_among(missing, *self._now())
        if loss is None and waited >= self.timeout + self.grace:
            loss = self.silent(missing, *self._now())
        return loss or self.remote()

    def _now(self) -> tuple[str, str]:
        """Return this rank's call, and its number, as text."""
        number, call = self.current()
        return self.doing or (str(call), f"call {number}")

    def loss_among(self, ranks: Sequence[int], operation: str, step: str) -> PeerLostError | None:
        """Return the error for those of `ranks` that have died or left."""
        # A process that ended regularly has also left; its death is reported.
        dead = [rank for rank in ranks if self._watch.dead(rank)]
        left = [rank for rank in ranks if rank not in dead and self.progress(rank).left]
        if dead:
            return self._lost(
                dead, f"died (process {self.members.processes[dead[0]]})", operation, step
            )
        return self._lost(left, "left the group", operation, step) if left else None

    def silent(self, ranks: Sequence[int], operation: str, step: str) -> PeerLostError:
        """Return the error for ranks that are alive and did not arrive in time."""
        return self._lost(ranks, not_in_time(self.timeout), operation, step)

    def _lost(self, ranks: Sequence[int], reason: str, operation: str, step: str) -> PeerLostError:
        """Return the error for these ranks, with the last call of the first."""
        names = tuple(self.members.names[rank] for rank in ranks)
        did = self._last_did(ranks[0]) if ranks else ""
        return PeerLostError(names, operation, step, f"{reason}{did}")

    def _last_did(self, rank: int) -> str:
        """Return the progress of a rank, as the end of a reason."""
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
        """Check the peers, periodically during the wait of a collective.

        True means to stop waiting; `failure` then has the error.
        """
        try:
            self._error = self.look_around(waited)
        except BaseException as error:  # mainly Ctrl-C; no exception may propagate through C
            self._error = error
        return self._error is not None

    def failure(self) -> BaseException:
        """Return the error with which this rank stops waiting, and notify all others."""
        # Cleared, so that a later wait does not find an old error.
        error = self._error
        self._error = None
        if isinstance(error, PeerLostError):
            return self.abort(error)
        # A rank that stops waiting, for example after Ctrl-C, has to notify its peers.
        self.end(f"was interrupted ({type(error).__name__})")
        assert error is not None
        return error

    def end(self, reason: str) -> None:
        """End the group for all ranks, with this rank as the cause."""
        self.abort(PeerLostError((self.members.names[self.members.rank],), *self._now(), reason))

    def failed(self, error: Exception) -> None:
        """End the group because a call has failed here.

        Arguments are checked before a call begins, so the failure is unexpected: the others are
        notified and do not wait.
        """
        self.end(f"failed ({type(error).__name__}: {error})")
