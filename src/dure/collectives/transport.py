"""Transport of a group's bytes: the interface of a backend for groups and algorithms.

Groups and algorithms know a `Transport` and no backend. For a process group of torch.distributed
(gloo, NCCL, MPI) it is `TorchTransport`, which uses torch's own calls and supports nothing else. A
process group of dure has its own transport: it is a `HasTransport`.

Ranks are ranks of the process group. Sends and receives take contiguous tensors; between two ranks
messages arrive in the order of sending.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_AVERAGING = ("dure", "nccl")
"""torch's names of backends whose reductions average without another pass over the tensor."""

Message = tuple[Tensor, int]
"""Tensor, and the rank that receives or sends it."""


class Pending(Protocol):
    """Message in progress."""

    def wait(self) -> object:
        """Wait until the message is complete; raise its error if it failed."""


class BegunCall(NamedTuple):
    """Call in progress.

    end: waits for the result, and returns its time in seconds of `time.perf_counter`. is_read:
    whether the source may be written to again.
    """

    end: Callable[[], float]
    is_read: Callable[[], bool]


class Transport:
    """Transport of a process group's bytes. This base class is for a single rank.

    It has no messages. For each optional ability of a backend this class returns False.
    """

    begins_reductions = False
    """Whether `prepare_all_reduce` and `prepare_reduce_scatter` are implemented."""

    apart = False
    """Whether every rank has a separate host.

    Planned calls then begin at once, several at a time.
    """

    split_phase = False
    """Whether ranks in shared memory end a call later than they begin it, without a wait."""

    # Messages.

    def post(self, tensor: Tensor, to: int) -> Pending | None:
        """Begin to send a CPU tensor; None if the send is already complete."""
        raise NotImplementedError

    def expect(self, into: Tensor, source: int) -> Pending:
        """Begin to receive into a CPU tensor."""
        raise NotImplementedError

    def fetch(self, into: Tensor, source: int) -> None:
        """Receive into a CPU tensor, and wait for it."""
        self.expect(into, source).wait()

    def holds(self, messages: int, nbytes: int) -> bool:
        """Return whether so many messages, of `nbytes` together, can be sent without a wait.

        The receiver's buffer holds them until the receiver asks for them.
        """
        return False

    def reaches(self, device: torch.device) -> bool:
        """Return whether `transfer_there` can access the memory of this device."""
        return False

    def transfer_there(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Do all of these sends and receives at once, on a device that the transport `reaches`."""
        raise NotImplementedError

    # Reductions.

    def averages(self, device: torch.device) -> bool:
        """Return whether reductions can average without another pass over the tensor."""
        return False

    def sum(self, tensor: Tensor) -> None:
        """Sum over all ranks, in place, by the fast path; only for a `HasTransport` group."""
        raise NotImplementedError

    def prepare_all_reduce(
        self, tensor: Tensor, op: dist.ReduceOp.RedOpType
    ) -> Callable[[], Callable[[], float]]:
        """Prepare a repeated all-reduce; the returned function begins it.

        It may begin when the previous call has ended. Each call returns a function that waits for
        its end, and returns the time of the end, in seconds of `time.perf_counter`.
        """
        raise NotImplementedError

    def prepare_reduce_scatter(
        self, output: Tensor, source: Tensor, op: dist.ReduceOp.RedOpType
    ) -> Callable[[Sequence[Tensor]], BegunCall]:
        """Prepare a repeated reduce-scatter; the returned function begins it.

        It may begin when the source of the previous call is read. Its argument are contiguous
        tensors that together are this rank's own block, if that is not in `source`.
        """
        raise NotImplementedError

    def begin_all_gather(self, output: Tensor, source: Tensor) -> Callable[[], float]:
        """Begin an all-gather; return a function that waits for its end and returns its time."""
        raise NotImplementedError

    def meet(self) -> None:
        """Wait until all ranks have called this method."""


class HasTransport:
    """Process group with its own transport."""

    transport: Transport


class TorchTransport(Transport):
    """Transport over any process group of torch.distributed, by torch's own calls."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._group = process_group
        self._ranks = dist.get_process_group_ranks(process_group)

    def post(self, tensor: Tensor, to: int) -> Pending | None:
        return begun_work(dist.isend(tensor, self._ranks[to], group=self._group))

    def expect(self, into: Tensor, source: int) -> Pending:
        return begun_work(dist.irecv(into, self._ranks[source], group=self._group))

    def reaches(self, device: torch.device) -> bool:
        # gloo sends from the memory of the CPU only
        return backend_name(self._group, device) not in ("", "gloo")

    def transfer_there(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        # On NCCL a send and a receive in separate batches wait for each other.
        operations = [
            dist.P2POp(dist.isend, tensor, self._ranks[to], self._group) for tensor, to in sends
        ]
        operations += [
            dist.P2POp(dist.irecv, into, self._ranks[source], self._group)
            for into, source in receives
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def averages(self, device: torch.device) -> bool:
        return backend_name(self._group, device) in _AVERAGING

    def meet(self) -> None:
        dist.barrier(group=self._group)


def begun_work(work: dist.Work | None) -> dist.Work:
    """Return the work, which torch leaves out only on ranks outside the group."""
    assert work is not None
    return work


def backends_of(process_group: dist.ProcessGroup) -> dict[str, str]:
    """Return torch's names of a group's backends, by the type of device that they serve."""
    # torch writes "cpu:gloo,cuda:nccl".
    pairs = (pair.partition(":") for pair in dist.get_backend_config(process_group).split(","))
    return {kind: name for kind, _, name in pairs}


def backend_name(process_group: dist.ProcessGroup, device: torch.device) -> str:
    """Return torch's name of the backend for tensors of this device; empty if there is none."""
    return backends_of(process_group).get(device.type, "")


def own_transport(process_group: object) -> Transport | None:
    """Return a process group's own transport, or None."""
    return process_group.transport if isinstance(process_group, HasTransport) else None


def transport_of(process_group: dist.ProcessGroup | None) -> Transport:
    """Return the transport of a process group; None is a single rank."""
    if process_group is None:
        return Transport()
    return own_transport(process_group) or TorchTransport(process_group)
