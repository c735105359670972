"""What carries a group's bytes: all that a group, or an algorithm, may ask of a backend.

Groups and algorithms know a `Transport` and no backend. Over a process group of torch.distributed
(gloo, NCCL, MPI) it is `OverTorch`, which does with torch's own calls what can be done and answers
no to the rest. A process group of our own brings one along: it is a `Carried`.

Ranks are places in the process group. Sends and receives take contiguous tensors; between two ranks
messages arrive in the order of sending.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_AVERAGING = ("dure", "nccl")
"""torch's names of backends whose reductions divide on the way, without another pass."""

Message = tuple[Tensor, int]
"""A tensor, and the rank that it goes to or comes from."""


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> object:
        """Returns when it is done; raises what it failed with."""


class Begun(NamedTuple):
    """A call under way.

    end: waits until the result is there, and tells since when, in seconds of `time.perf_counter`.
    is_read: whether the source may be written to again.
    """

    end: Callable[[], float]
    is_read: Callable[[], bool]


class Transport:
    """What carries the bytes of one process group. This one is a single rank's: it carries nothing.

    What a backend can do beyond messages has an answer here that says no.
    """

    begins_reductions = False
    """Whether `prepare_all_reduce` and `prepare_reduce_scatter` are there."""

    apart = False
    """Whether every rank has a host of its own, so that what all begin by a plan is begun at
    once, several calls at a time."""

    split_phase = False
    """Whether ranks that share memory end later what they begin, so that none waits in between."""

    # Messages.

    def post(self, tensor: Tensor, to: int) -> Pending | None:
        """Begins to send a tensor of the CPU; None if all of it has left already."""
        raise NotImplementedError

    def expect(self, into: Tensor, source: int) -> Pending:
        """Begins to receive into a tensor of the CPU."""
        raise NotImplementedError

    def fetch(self, into: Tensor, source: int) -> None:
        """Receives into a tensor of the CPU, and waits for it."""
        self.expect(into, source).wait()

    def holds(self, messages: int, nbytes: int) -> bool:
        """Whether so many messages, of `nbytes` together, leave at once.

        They lie with their receiver until it asks for them.
        """
        return False

    def reaches(self, device: torch.device) -> bool:
        """Whether `transfer_there` sends from, and receives into, the memory of this device."""
        return False

    def transfer_there(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Sends and receives all of these at once, on a device that it `reaches`."""
        raise NotImplementedError

    # Reductions.

    def averages(self, device: torch.device) -> bool:
        """Whether its reductions can divide on the way, without another pass over the tensor."""
        return False

    def sum(self, tensor: Tensor) -> None:
        """The sum over all ranks, in place, by the shortest way; of a `Carried` group only."""
        raise NotImplementedError

    def prepare_all_reduce(
        self, tensor: Tensor, op: dist.ReduceOp.RedOpType
    ) -> Callable[[], Callable[[], float]]:
        """An all-reduce that is begun again and again, by calling what is returned.

        It is begun when the one before has ended. Each call gives what waits for its end, and tells
        when that was, in seconds of `time.perf_counter`.
        """
        raise NotImplementedError

    def prepare_reduce_scatter(
        self, output: Tensor, source: Tensor, op: dist.ReduceOp.RedOpType
    ) -> Callable[[Sequence[Tensor]], Begun]:
        """A reduce-scatter that is begun again and again, by calling what is returned.

        It is begun when the source of the one before is read. It is given contiguous tensors that
        together are this rank's own block, if that does not lie in `source`.
        """
        raise NotImplementedError

    def begin_all_gather(self, output: Tensor, source: Tensor) -> Callable[[], float]:
        """Begins an all-gather; what is returned waits for its end, and tells when that was."""
        raise NotImplementedError

    def meet(self) -> None:
        """Waits until all ranks are here."""


class Carried:
    """A process group that brings its transport along."""

    transport: Transport


class OverTorch(Transport):
    """Any process group of torch.distributed, by torch's own calls."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._group = process_group
        self._ranks = dist.get_process_group_ranks(process_group)

    def post(self, tensor: Tensor, to: int) -> Pending | None:
        return _there(dist.isend(tensor, self._ranks[to], group=self._group))

    def expect(self, into: Tensor, source: int) -> Pending:
        return _there(dist.irecv(into, self._ranks[source], group=self._group))

    def reaches(self, device: torch.device) -> bool:
        # gloo sends from the memory of the CPU only
        return backend_name(self._group, device) not in ("", "gloo")

    def transfer_there(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        # On NCCL a send and a receive that are not in one batch wait for each other.
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


def _there(work: dist.Work | None) -> dist.Work:
    """torch gives None to ranks that are not in the group; those do not come here."""
    assert work is not None
    return work


def backend_name(process_group: dist.ProcessGroup, device: torch.device) -> str:
    """torch's name of the backend for tensors of this device; empty if there is none."""
    # torch writes "cpu:gloo,cuda:nccl".
    pairs = (pair.partition(":") for pair in dist.get_backend_config(process_group).split(","))
    return next((name for kind, _, name in pairs if kind == device.type), "")


def own_transport(process_group: object) -> Transport | None:
    """The transport that a process group brings along; None where it brings none."""
    return process_group.transport if isinstance(process_group, Carried) else None


def transport_of(process_group: dist.ProcessGroup | None) -> Transport:
    """What carries the bytes of a process group; None is a single rank."""
    if process_group is None:
        return Transport()
    return own_transport(process_group) or OverTorch(process_group)
