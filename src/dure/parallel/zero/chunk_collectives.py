"""Collectives of ZeRO: reduce-scatters and all-gathers of equal chunks.

They work in place, blocking or overlapped with computation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from dure.collectives.algorithms import native, one_shot, ring
from dure.collectives.arguments import check_algorithm
from dure.collectives.group import Group
from dure.collectives.handle import Handle
from dure.machine.devices import CPU, is_cpu

Value = TypeVar("Value")
Algorithm = Literal["native", "ring", "one_shot"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)


class TransferSpan(NamedTuple):
    """Interval from `start` to `end`, in seconds of `time.perf_counter`."""

    name: str
    start: float
    end: float


class DeferredHandle(Handle[None]):
    """Handle of an operation that has started and that `wait` ends.

    is_read: returns whether the message may be written to again.
    """

    def __init__(self, end: Callable[[], None], is_read: Callable[[], bool] = lambda: True) -> None:
        self._rest: Callable[[], None] | None = end
        self.is_read = is_read

    def is_completed(self) -> bool:
        return self._rest is None

    def wait(self) -> None:
        """End the operation. Raises its error; a second call after an error raises RuntimeError."""
        rest = self._rest
        if rest is None:
            return
        # Set before the end is tried: if the end raises, a second wait does not try it again.
        self._rest = _failed
        rest()
        self._rest = None


def _failed() -> None:
    raise RuntimeError("this operation failed, and the first waiter received the error")


class ChunkCollectives:
    """Messages of a group.

    Args:
        group: The ranks.
        algorithm: "native" is the backend's; "ring" and "one_shot" use point-to-point sends.
        beside: Whether messages overlap computation, in the order of their issue.
        mean: Whether sums of gradients are divided by N.
        planned: Whether overlapped operations start at once, in the order that all ranks follow,
            and end in `wait`; only if each rank has a host of its own. Ranks then do not check that
            all have started the same operations.
        device: Device of the messages. Only messages in the CPU's memory are planned or split.

    Attributes:
        split_phase: Whether the start and the end of a reduce-scatter are separate: its message is
            in shared memory, where other ranks may read it after this rank has ended the operation.
        transfers: Transfers that ended since the last `account`.
        waits: Intervals in which the program waited for a transfer.
    """

    def __init__(
        self,
        group: Group,
        algorithm: Algorithm,
        beside: bool,
        mean: bool = False,
        planned: bool = False,
        device: torch.device = CPU,
    ) -> None:
        check_algorithm("way to send", algorithm, ALGORITHMS)
        self.group = group
        self.algorithm = algorithm
        self.beside = beside
        self.mean = mean
        carrier = group.transport
        able = algorithm == "native" and is_cpu(device)
        self.planned = planned and beside and able and carrier.apart
        self.split_phase = not beside and able and carrier.split_phase
        # end of the planned transfer that ended last
        self._last_end = 0.0
        self.transfers: list[TransferSpan] = []
        self.waits: list[TransferSpan] = []

    def all_gather(self, whole: Tensor, own: Tensor) -> Handle[None]:
        """Fill `whole`, N chunks, with the chunk `own` of each rank.

        `own` may be its place in `whole`.
        """
        if self.planned and whole.numel():
            return self._begin_all_gather(whole, own)
        # views of `whole`, into which the backend writes directly
        chunks = list(whole.view(self.group.size, -1))
        mine = chunks[self.group.rank]
        # otherwise this rank's chunk is in its place already
        apart = own.data_ptr() != mine.data_ptr()

        def work() -> None:
            if self.algorithm == "native" and native.is_staged(whole, self.group):
                with native.staged([own], chunks) as ((mine_there,), there):
                    dist.all_gather(there, mine_there, group=self.group.process_group)
                self.count(own)
                return
            if self.algorithm == "native":
                dist.all_gather(chunks, own, group=self.group.process_group_of(own))
                self.count(own)
                return
            if apart:
                mine.copy_(own)
            if self.algorithm == "ring":
                # In the ring rank r begins with chunk r+1: the list is rotated by one, so that
                # this is chunk r.
                ring.all_gather(chunks[-1:] + chunks[:-1], self.group)
            else:
                one_shot.all_gather(chunks, self.group)

        # with a single rank nothing is sent (`_send`), and `work` is never called
        if self.group.size == 1 and apart:
            whole.copy_(own)
        return self._send("all-gather", work, whole)

    def reduce_scatter(
        self, message: Tensor, into: Tensor, own: Sequence[Tensor] = ()
    ) -> Handle[None]:
        """Set `into` on rank r to the sum, or mean, of the ranks' chunk r of `message`.

        `into` may be that chunk.

        own: contiguous tensors that together are this rank's chunk, if the chunk is not in the
        message; only if calls are `split_phase`.
        """
        return self.prepare_reduce_scatter(message, into)(own)

    def _reduce_scatter(self, message: Tensor, into: Tensor) -> Handle[None]:
        chunks = list(message.view(self.group.size, -1))
        divides = (
            self.mean
            and self.algorithm == "native"
            and self.group.transport.averages(message.device)
        )

        def work() -> None:
            if self.algorithm == "native":
                op = dist.ReduceOp.AVG if divides else dist.ReduceOp.SUM
                if native.is_staged(message, self.group):
                    with native.staged(chunks, [into]) as (there, (into_there,)):
                        dist.reduce_scatter(into_there, there, op, group=self.group.process_group)
                else:
                    group = self.group.process_group_of(into)
                    dist.reduce_scatter(into, chunks, op, group=group)
                self.count(into)
            elif self.algorithm == "ring":
                # rotated by one, as in `all_gather`
                ring.reduce_scatter(chunks[-1:] + chunks[:-1], self.group, into=into)
            else:
                one_shot.reduce_scatter(chunks, self.group, into=into)
            if self.mean and not divides:
                into.div_(self.group.size)

        # with a single rank `work` is never called
        if self.group.size == 1 and into.data_ptr() != message.data_ptr():
            into.copy_(chunks[0])
        return self._send("reduce-scatter", work, message)

    def prepare_reduce_scatter(
        self, message: Tensor, into: Tensor
    ) -> Callable[[Sequence[Tensor]], Handle[None]]:
        """Return a function that starts a `reduce_scatter` of the same tensors at each call.

        The function takes the argument `own` of `reduce_scatter`. Without `split_phase` everything
        is in the message, and the argument is ignored.
        """
        if not (self.split_phase or self.planned) or not message.numel():
            return lambda own: self._reduce_scatter(message, into)
        op = dist.ReduceOp.AVG if self.mean else dist.ReduceOp.SUM
        start = self.group.transport.prepare_reduce_scatter(into, message, op)
        name = "native reduce-scatter"

        def begin(own: Sequence[Tensor]) -> Handle[None]:
            begun = self._plainly(name, lambda: start(own))
            self.count(into)
            return DeferredHandle(self._ending(name, begun.end), begun.is_read)

        return begin

    def _begin_all_gather(self, whole: Tensor, own: Tensor) -> Handle[None]:
        name = "native all-gather"
        begin = self.group.transport.begin_all_gather
        end = self.group.perform(name, lambda: begin(whole, own), whole)
        self.count(own)
        return DeferredHandle(self._ending(name, end))

    def _plainly(self, name: str, work: Callable[[], Value]) -> Value:
        """Run `work` as `Group.perform` does, with less overhead, because backward waits for it.

        Only for operations of the backend dure on memory.
        """
        self.group.settle()
        with self.group.during(name):
            return work()

    def _ending(self, name: str, end: Callable[[], float]) -> Callable[[], None]:
        """Return a function that waits for the end of a call that starts now."""
        started = time.perf_counter()

        def ending() -> None:
            ended = self._plainly(name, end)
            if self.planned:  # several transfers are in flight, one after another
                # This transfer had the link to itself since the end of the previous transfer.
                self.transfers.append(
                    TransferSpan(name, min(ended, max(started, self._last_end)), ended)
                )
                self._last_end = max(self._last_end, ended)

        return ending

    def meet(self) -> None:
        """Wait until all ranks have called this method."""
        if self.group.size > 1:
            started = time.perf_counter()
            self._plainly("meeting", self.group.transport.meet)
            self.waits.append(TransferSpan("wait for all ranks", started, time.perf_counter()))

    def count(self, chunk: Tensor) -> None:
        """Count N-1 chunks in each direction: the backend does not report its messages.

        Any algorithm has to send and receive that many bytes.
        """
        if chunk.numel():
            # The number of messages counts too: one message for each peer.
            for _ in range(self.group.size - 1):
                self.group.meter.sent(chunk.nbytes)
                self.group.meter.received(chunk.nbytes)

    def all_reduce(self, tensor: Tensor) -> Handle[None]:
        """Sum a tensor over all ranks, in place."""
        return self._send("all-reduce", lambda: native.all_reduce(tensor, self.group), tensor)

    def _send(self, name: str, work: Callable[[], None], tensor: Tensor) -> Handle[None]:
        # Nothing is sent, and no rank may expect a message.
        if self.group.size == 1 or not tensor.numel():
            return Handle.of(None)
        name = f"{self.algorithm} {name}"

        def transfer() -> None:
            started = time.perf_counter()
            work()
            self.transfers.append(TransferSpan(name, started, time.perf_counter()))

        if self.beside:
            return self.group.perform(name, transfer, tensor, True)  # type: ignore[return-value]
        self.group.perform(name, transfer, tensor)
        # Without overlap the whole transfer is a wait.
        self.waits.append(self.transfers[-1])
        return Handle.of(None)

    def wait(self, handle: Handle[None], what: str) -> None:
        """Wait for the end of a message."""
        started = time.perf_counter()
        waits = not handle.is_completed()
        handle.wait()
        # A message that had arrived cost no wait, and would only fill the timeline.
        if waits:
            self.waits.append(TransferSpan(f"wait for {what}", started, time.perf_counter()))

    def account(self, step: int, arrival: float | None = None) -> float:
        """Report the transfers since the last call to the meter; return the seconds of waiting.

        arrival: time when the last rank sent the last message; until then this rank was idle.
        Transfers during which the program did not wait are hidden.
        """
        waits = self.waits
        transfers = self.transfers[:]
        meter = self.group.meter
        self.waits = []
        del self.transfers[: len(transfers)]  # another thread may append at the same time
        for number, wait in enumerate(waits):
            last = arrival if number == len(waits) - 1 else None
            meter.communication(wait.name, wait.start, wait.end, step, last)
        if self.beside:
            for transfer in transfers:
                # the part of the transfer in which the program waited for any message
                shown = sum(
                    max(0.0, min(w.end, transfer.end) - max(w.start, transfer.start)) for w in waits
                )
                meter.counters.hidden_seconds += max(0.0, transfer.end - transfer.start - shown)
                lane = f"{meter.name}, beside"
                meter.mark(transfer.name, "communication", transfer.start, transfer.end, step, lane)
        return sum(wait.end - wait.start for wait in waits)
