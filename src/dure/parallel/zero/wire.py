"""What ZeRO sends: reduce-scatters and all-gathers of equal chunks.

They work in place, at once or alongside the program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeVar, get_args

import torch.distributed as dist
from torch import Tensor

from dure.collectives.algorithms import native, one_shot, ring
from dure.collectives.arguments import check_algorithm
from dure.collectives.group import Group
from dure.collectives.handle import Handle

Value = TypeVar("Value")
Algorithm = Literal["native", "ring", "one_shot"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)


class Span(NamedTuple):
    """What took from `start` to `end`, in seconds of `time.perf_counter`."""

    name: str
    start: float
    end: float


class Later(Handle[None]):
    """What is begun, and ended by whoever waits for it.

    is_read: whether the message may be written to again.
    """

    def __init__(self, end: Callable[[], None], is_read: Callable[[], bool] = lambda: True) -> None:
        self._rest: Callable[[], None] | None = end
        self.is_read = is_read

    def is_completed(self) -> bool:
        return self._rest is None

    def wait(self) -> None:
        """Raises what the end raises; whoever waits once more is told that it failed."""
        rest = self._rest
        if rest is None:
            return
        # Before the end is tried: if it raises, this stays, and a second wait does not try it
        # again.
        self._rest = _failed
        rest()
        self._rest = None


def _failed() -> None:
    raise RuntimeError("this operation failed, and has said so to who waited first")


class Wire:
    """Messages of one group.

    beside: whether they travel alongside the program, in the order of their issue.

    split_phase: whether a reduce-scatter is begun and ended apart: its message then lies in shared
    memory, where the others read it, maybe after this rank has ended it. planned: whether all that
    goes beside is begun at once, by the order that all ranks follow, and ended by whoever waits for
    it: if that is asked for, where each has a host of its own. Nobody checks then that all have
    begun the same.

    mean: whether sums of gradients are divided by N. transfers: those that have ended since they
        were last asked for;
    waits: when the program waited for one.
    """

    def __init__(
        self,
        group: Group,
        algorithm: Algorithm,
        beside: bool,
        mean: bool = False,
        planned: bool = False,
    ) -> None:
        check_algorithm("way to send", algorithm, ALGORITHMS)
        self.group = group
        self.algorithm = algorithm
        self.beside = beside
        self.mean = mean
        carrier = group.transport
        self.planned = planned and beside and algorithm == "native" and carrier.apart
        self.split_phase = not beside and algorithm == "native" and carrier.split_phase
        # when the planned transfer that ended last had ended
        self._last_end = 0.0
        self.transfers: list[Span] = []
        self.waits: list[Span] = []

    def all_gather(self, whole: Tensor, own: Tensor) -> Handle[None]:
        """Fills `whole`, N chunks, with the ranks' `own`, each of one chunk.

        `own` may be its place in `whole`.
        """
        if self.planned and whole.numel():
            return self._begin_all_gather(whole, own)
        # views of `whole`, into which the backend writes directly
        chunks = list(whole.view(self.group.size, -1))
        mine = chunks[self.group.rank]
        # else this rank's chunk lies in its place already
        apart = own.data_ptr() != mine.data_ptr()

        def work() -> None:
            if self.algorithm == "native":
                dist.all_gather(chunks, own, group=self.group.process_group)
                self.count(own)
                return
            if apart:
                mine.copy_(own)
            if self.algorithm == "ring":
                # The ring has rank r begin with chunk r+1: the list is turned by one, so that this
                # is chunk r.
                ring.all_gather(chunks[-1:] + chunks[:-1], self.group)
            else:
                one_shot.all_gather(chunks, self.group)

        # alone nothing is sent (`_send`), and `work` is never called
        if self.group.size == 1 and apart:
            whole.copy_(own)
        return self._send("all-gather", work, whole)

    def reduce_scatter(
        self, message: Tensor, into: Tensor, own: Sequence[Tensor] = ()
    ) -> Handle[None]:
        """On rank r `into` becomes the sum, or mean, of the ranks' chunk r of `message`.

        `into` may be that very chunk.

        own: contiguous tensors that together are this rank's own chunk, where that is not in the
        message; only where calls are `split_phase`.
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
                dist.reduce_scatter(into, chunks, op, group=self.group.process_group)
                self.count(into)
            elif self.algorithm == "ring":
                # turned by one, as in `all_gather`
                ring.reduce_scatter(chunks[-1:] + chunks[:-1], self.group, into=into)
            else:
                one_shot.reduce_scatter(chunks, self.group, into=into)
            if self.mean and not divides:
                into.div_(self.group.size)

        # alone `work` is never called
        if self.group.size == 1 and into.data_ptr() != message.data_ptr():
            into.copy_(chunks[0])
        return self._send("reduce-scatter", work, message)

    def prepare_reduce_scatter(
        self, message: Tensor, into: Tensor
    ) -> Callable[[Sequence[Tensor]], Handle[None]]:
        """`reduce_scatter` of the same tensors again and again.

        It is begun by calling what is returned with what is own. Where calls are not `split_phase`
        all lies in the message, and nothing else is looked at.
        """
        if not (self.split_phase or self.planned) or not message.numel():
            return lambda own: self._reduce_scatter(message, into)
        op = dist.ReduceOp.AVG if self.mean else dist.ReduceOp.SUM
        start = self.group.transport.prepare_reduce_scatter(into, message, op)
        name = "native reduce-scatter"

        def begin(own: Sequence[Tensor]) -> Handle[None]:
            begun = self._plainly(name, lambda: start(own))
            self.count(into)
            return Later(self._ending(name, begun.end), begun.is_read)

        return begin

    def _begin_all_gather(self, whole: Tensor, own: Tensor) -> Handle[None]:
        name = "native all-gather"
        begin = self.group.transport.begin_all_gather
        end = self.group.perform(name, lambda: begin(whole, own), whole)
        self.count(own)
        return Later(self._ending(name, end))

    def _plainly(self, name: str, work: Callable[[], Value]) -> Value:
        """`Group.perform` in its shortest form, because it is in the way of a backward pass.

        It is for what the backend dure does with memory alone.
        """
        self.group.settle()
        with self.group.during(name):
            return work()

    def _ending(self, name: str, end: Callable[[], float]) -> Callable[[], None]:
        """What waits for the end of a call that begins now."""
        started = time.perf_counter()

        def ending() -> None:
            ended = self._plainly(name, end)
            if self.planned:  # several are under way, one after another
                # It had the link to itself from when the one before had ended.
                self.transfers.append(Span(name, min(ended, max(started, self._last_end)), ended))
                self._last_end = max(self._last_end, ended)

        return ending

    def meet(self) -> None:
        """Waits until all ranks are here."""
        if self.group.size > 1:
            started = time.perf_counter()
            self._plainly("meeting", self.group.transport.meet)
            self.waits.append(Span("wait for all ranks", started, time.perf_counter()))

    def count(self, chunk: Tensor) -> None:
        """Counts N-1 chunks each way: the backend does not tell what it sends.

        Whatever it does, so many have to leave and to come.
        """
        if chunk.numel():
            # The counts of messages matter too: one a peer.
            for _ in range(self.group.size - 1):
                self.group.meter.sent(chunk.nbytes)
                self.group.meter.received(chunk.nbytes)

    def all_reduce(self, tensor: Tensor) -> Handle[None]:
        """The sum over all ranks, in place; by a ring where the backend does not carry it."""
        carried = tensor.is_cpu or self.group.backend(tensor.device)
        rule = native.all_reduce if carried else ring.all_reduce
        return self._send("all-reduce", lambda: rule(tensor, self.group), tensor)

    def _send(self, name: str, work: Callable[[], None], tensor: Tensor) -> Handle[None]:
        # Nothing travels, and no rank may expect a message.
        if self.group.size == 1 or not tensor.numel():
            return Handle.of(None)
        name = f"{self.algorithm} {name}"

        def transfer() -> None:
            started = time.perf_counter()
            work()
            self.transfers.append(Span(name, started, time.perf_counter()))

        if self.beside:
            return self.group.perform(name, transfer, tensor, True)  # type: ignore[return-value]
        self.group.perform(name, transfer, tensor)
        # Not beside: all of the transfer was a wait.
        self.waits.append(self.transfers[-1])
        return Handle.of(None)

    def wait(self, handle: Handle[None], what: str) -> None:
        """Waits for the end of a message."""
        started = time.perf_counter()
        waits = not handle.is_completed()
        handle.wait()
        # What had come already cost no wait, and would only fill the timeline.
        if waits:
            self.waits.append(Span(f"wait for {what}", started, time.perf_counter()))

    def account(self, step: int, arrival: float | None = None) -> float:
        """Tells the meter what was sent since the last call.

        Returns the seconds that the program waited.

        arrival: when the last rank came to the last message: until then this one was idle.
        Transfers during which the program did not wait are hidden.
        """
        waits = self.waits
        transfers = self.transfers[:]
        meter = self.group.meter
        self.waits = []
        del self.transfers[: len(transfers)]  # others may be ending now
        for number, wait in enumerate(waits):
            last = arrival if number == len(waits) - 1 else None
            meter.communication(wait.name, wait.start, wait.end, step, last)
        if self.beside:
            for transfer in transfers:
                # the part of the transfer in which the program waited, for whichever message
                shown = sum(
                    max(0.0, min(w.end, transfer.end) - max(w.start, transfer.start)) for w in waits
                )
                meter.counters.hidden_seconds += max(0.0, transfer.end - transfer.start - shown)
                lane = f"{meter.name}, beside"
                meter.mark(transfer.name, "communication", transfer.start, transfer.end, step, lane)
        return sum(wait.end - wait.start for wait in waits)
