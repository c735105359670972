"""A group: the ranks that take part in a collective, and the sends and receives between them.

It stands on any torch.distributed process group, counts every payload byte, and turns a failed transfer into an
error that names the lost rank, the operation and the step. A group of one needs no torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from dure.errors import MismatchError, PeerLostError
from dure.record.meter import Meter

Diagnose = Callable[[str, str, "int | None", Exception], "PeerLostError | None"]
"""diagnose(operation, step, peer, error) finds out which peer was lost, if any; worlds know how."""


class Group:
    """The ranks 0 … size-1 of a process group, seen from `rank`.

    process_group: a torch.distributed group; None for a group of one. meter: counts what this rank sends.
    diagnose: called when a transfer fails; by default the error of torch.distributed goes on as it is.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        meter: Meter | None = None,
        diagnose: Diagnose | None = None,
    ) -> None:
        self.process_group = process_group
        self.rank: int = dist.get_rank(process_group) if process_group is not None else 0
        self.size: int = dist.get_world_size(process_group) if process_group is not None else 1
        self.meter = meter if meter is not None else Meter(f"rank {self.rank}")
        self.operation = "a transfer"
        self.step = "the start"
        self._diagnose = diagnose
        self._peer: int | None = None
        self._global = dist.get_process_group_ranks(process_group) if process_group is not None else [0]

    @classmethod
    def default(cls) -> Group:
        """All ranks of the job, or this process alone where torch.distributed is not initialised."""
        return cls(dist.group.WORLD if dist.is_initialized() else None)

    @contextmanager
    def during(self, operation: str) -> Iterator[None]:
        """Names what the group does, for errors; transfers that fail inside are diagnosed."""
        before, self.operation, self._peer = self.operation, operation, None
        try:
            yield
        except MismatchError:  # says already all that can be known
            raise
        except RuntimeError as error:  # all that c10d raises when a transfer fails
            self._fail(error)
        finally:
            self.operation = before

    def _fail(self, error: Exception) -> NoReturn:
        lost = self._diagnose(self.operation, self.step, self._peer, error) if self._diagnose is not None else None
        if lost is None:
            raise error
        raise lost from error

    def send(self, tensor: Tensor, to: int) -> None:
        """Sends a contiguous tensor to rank `to` and waits until it may be changed again."""
        self._peer = to
        dist.send(tensor, self._global[to], group=self.process_group)
        self.meter.sent(tensor.nbytes)

    def receive(self, into: Tensor, source: int) -> None:
        """Fills the contiguous tensor `into` with what rank `source` sends."""
        self._peer = source
        dist.recv(into, self._global[source], group=self.process_group)
        self.meter.received(into.nbytes)

    def exchange(self, tensor: Tensor, to: int, into: Tensor, source: int) -> None:
        """Sends to one rank while receiving from another; empty tensors do not travel."""
        sending = dist.isend(tensor, self._global[to], group=self.process_group) if tensor.numel() else None
        if into.numel():
            self.receive(into, source)
        if sending is not None:
            self._peer = to
            sending.wait()
            self.meter.sent(tensor.nbytes)

    def native_all_reduce(self, tensor: Tensor) -> None:
        """The sum over all ranks by the backend's own all-reduce, in place.

        The backend does not tell what it sends; the meter counts the optimum that a ring reaches,
        2(N-1)/N of the tensor each way.
        """
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self.process_group)
        nbytes = 2 * (self.size - 1) * tensor.nbytes // self.size
        self.meter.sent(nbytes)
        self.meter.received(nbytes)

    def all_gather_values(self, values: list[float]) -> list[list[float]]:
        """Every rank's list of numbers, in order of rank; all lists have the same length.

        Bookkeeping such as metrics and counters: in float64, not counted by the meter.
        """
        if self.size == 1:
            return [values]
        mine = torch.tensor(values, dtype=torch.float64)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        with self.during("all-gather of measurements"):
            dist.all_gather(gathered, mine, group=self.process_group)
        return [part.tolist() for part in gathered]

    @torch.no_grad()
    def broadcast_values(self, tensors: Sequence[Tensor], counted: bool = True) -> None:
        """Rank 0's tensors into every rank's, in place, as one message of their bytes: any dtype and stride.

        counted: whether the meter counts it, as N-1 messages of rank 0.
        """
        if self.size == 1 or not tensors:
            return
        message = torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors])
        with self.during("broadcast of buffers"):
            dist.broadcast(message, self._global[0], group=self.process_group)
        if self.rank == 0:
            for _ in range(self.size - 1 if counted else 0):
                self.meter.sent(message.nbytes)
            return
        if counted:
            self.meter.received(message.nbytes)
        start = 0
        for tensor in tensors:
            arrived = message[start : start + tensor.nbytes].clone().view(tensor.dtype).view(tensor.shape)
            start += tensor.nbytes
            if not torch.equal(arrived, tensor):  # an expanded tensor cannot be written, and never changes
                tensor.copy_(arrived)

    def broadcast_bytes(self, content: bytes | None) -> bytes:
        """Rank 0's `content` on every rank. Bookkeeping, not counted by the meter."""
        if self.size == 1:
            return content or b""
        length = torch.tensor([len(content) if content is not None else 0])
        with self.during("broadcast of the run's state"):
            dist.broadcast(length, self._global[0], group=self.process_group)
            buffer = torch.empty(int(length), dtype=torch.uint8)
            if self.rank == 0 and content:
                buffer.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
            if buffer.numel():
                dist.broadcast(buffer, self._global[0], group=self.process_group)
        return buffer.numpy().tobytes()

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Every rank's `content`, on rank 0 in order of rank; elsewhere an empty list. Not counted by the meter."""
        if self.size == 1:
            return [content]
        lengths = [int(length) for (length,) in self.all_gather_values([float(len(content))])]
        with self.during("gather of the timelines"):
            if self.rank != 0:
                mine = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)
                dist.send(mine, self._global[0], group=self.process_group)
                return []
            parts = [content]
            for source in range(1, self.size):
                buffer = torch.empty(max(1, lengths[source]), dtype=torch.uint8)
                dist.recv(buffer, self._global[source], group=self.process_group)
                parts.append(buffer.numpy().tobytes()[: lengths[source]])
        return parts
