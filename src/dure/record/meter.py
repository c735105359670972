"""The meter: what one worker sent, received, and spent its time on.

Bytes are payload: what a tensor or a message holds, without the framing of the transport. Seconds
are wall time in three kinds: compute (forward, backward, update), communication (transfers that the
worker waited for), idle (waiting for the slowest peer to arrive; see
`dure.parallel.data.strategy`). Transfers that ran while the worker computed have a counter of their
own, hidden: the share hidden / (hidden + communication) says how well a system overlaps the two.
Transfers inside a computation, such as those in the layers of tensor parallelism, are taken out of
it: no second counts twice.
"""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from dure.record.trace import Trace

MOST_INSIDE = 100_000
"""How many transfers inside computations are kept until their computation has ended.

A bound, since those of an evaluation wait for the next step, which throws them away.
"""


class Counters(msgspec.Struct):
    """Cumulative counts of one worker; they add over workers.

    inside_seconds, inside_steps: of the transfers inside computations (`Meter.inside`), and the
    steps that had any; communication_seconds has these seconds too.
    shuffle_bytes, shuffle_seconds: of examples that were sent to other workers, and of the whole
    exchange; bytes_sent and the seconds have these too.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    compute_seconds: float = 0.0
    communication_seconds: float = 0.0
    idle_seconds: float = 0.0
    peak_memory: int = 0
    hidden_seconds: float = 0.0
    inside_seconds: float = 0.0
    inside_steps: int = 0
    shuffle_bytes: int = 0
    shuffle_seconds: float = 0.0

    def as_list(self) -> list[float]:
        """The values in the order of the fields, as ranks of one job tell each other."""
        # As float64, in which bytes and messages are exact up to 2^53.
        return [float(value) for value in msgspec.structs.astuple(self)]

    @classmethod
    def from_list(cls, values: list[float]) -> Counters:
        """The inverse of `as_list`; an older dure had fewer fields."""
        fields = msgspec.structs.fields(cls)
        # Each value in the type of its field again: counts travelled as floats.
        told = zip(fields, values, strict=False)
        return cls(**{field.name: type(field.default)(value) for field, value in told})

    @classmethod
    def in_a_row(cls, values: list[float]) -> list[Counters]:
        """Those of several workers, told one after another."""
        width = len(cls.__struct_fields__)
        starts = range(0, len(values), width)
        return [cls.from_list(values[start : start + width]) for start in starts]

    @property
    def hidden_share(self) -> float | None:
        """Which part of the time of transfers was hidden; None if nothing was transferred."""
        total = self.hidden_seconds + self.communication_seconds
        return self.hidden_seconds / total if total > 0 else None


def sum_of_counters(workers: Iterable[Counters]) -> Counters:
    """The counters of several workers as one worker's. Peaks of memory do not add."""
    total = Counters()
    for counters in workers:
        for name in Counters.__struct_fields__:
            join = max if name == "peak_memory" else operator.add
            setattr(total, name, join(getattr(total, name), getattr(counters, name)))
    return total


class Meter:
    """The counters and the lane of one worker.

    name: "rank 3", "server" or "client 17". trace: where its spans go; None records no spans.
    is_worker: not so for a federation's server, the master of threads, and readers of batches,
    which are counted but do not train.
    """

    def __init__(self, name: str, trace: Trace | None = None, is_worker: bool = True) -> None:
        self.name = name
        self.trace = trace
        self.is_worker = is_worker
        self.counters = Counters()
        self.stands_for = 1
        """Workers that are counted here together, where they are too many for a meter each."""
        self._inside: deque[tuple[str, float, float]] = deque(maxlen=MOST_INSIDE)
        self._inside_step: int | None = None

    def sent(self, nbytes: int) -> None:
        """One message of so many payload bytes left the worker."""
        self.counters.bytes_sent += nbytes
        self.counters.messages_sent += 1

    def received(self, nbytes: int) -> None:
        """So many payload bytes came in."""
        self.counters.bytes_received += nbytes

    def exchanged(self, sent: Sequence[int], received: Sequence[int]) -> None:
        """Many messages, by their bytes."""
        self.counters.bytes_sent += sum(sent)
        self.counters.messages_sent += len(sent)
        self.counters.bytes_received += sum(received)

    def shuffled(self, nbytes: int, seconds: float) -> None:
        """So many bytes of what was sent were examples, in an exchange of so many seconds."""
        self.counters.shuffle_bytes += nbytes
        self.counters.shuffle_seconds += seconds

    def answered(self, down: int, up: int, transfer: float, compute: float) -> None:
        """A simulated client was sent `down` bytes and has answered with `up`; 0 is no answer.

        transfer, compute: its device's seconds.
        """
        counters = self.counters
        counters.bytes_received += down
        # A client that does not answer has received the model and sent nothing.
        if up:
            counters.bytes_sent += up
            counters.messages_sent += 1
        counters.compute_seconds += compute
        counters.communication_seconds += transfer

    def compute(self, name: str, start: float, end: float, step: int) -> None:
        """The worker computed from `start` to `end` (seconds of `time.perf_counter`)."""
        # Transfers that lie within this span are communication; no second counts twice.
        inside = self._taken_out(start, step) if self._inside else 0.0
        self.counters.compute_seconds += end - start - inside
        self.counters.communication_seconds += inside
        self.mark(name, "compute", start, end, step)

    def inside(self, name: str, start: float, end: float) -> None:
        """The worker was in a transfer, inside of what `compute` will be told of.

        The time is communication, not compute.
        """
        if self.trace is not None:  # else nobody may ever ask
            self._inside.append((name, start, end))

    def _taken_out(self, start: float, step: int) -> float:
        """Seconds of the transfers since `start`.

        Earlier ones were inside of what is not counted, such as an evaluation.
        """
        seconds = 0.0
        while self._inside:
            name, began, ended = self._inside.popleft()
            # All that wait are taken from the queue, but only those of this span count.
            if began >= start:
                seconds += ended - began
                self.mark(name, "communication", began, ended, step, f"{self.name}, inside")
        self.counters.inside_seconds += seconds
        # A step may have several computations; it counts once.
        if seconds and step != self._inside_step:
            self.counters.inside_steps += 1
            self._inside_step = step
        return seconds

    def communication(
        self,
        name: str,
        start: float,
        end: float,
        step: int,
        arrival: float | None = None,
        computed: float | None = None,
    ) -> None:
        """A transfer from `start` to `end`, for which the last peer came at `arrival`.

        computed: until then the worker computed meanwhile, so that what was transferred is hidden,
        and nobody waited.
        """
        # ready: when the last peer was there, so that the transfer could begin. free: when this
        # worker had nothing more to compute. Both within the transfer: an arrival is read from
        # another clock, which runs apart by a little.
        ready = start if arrival is None else min(max(arrival, start), end)
        free = start if computed is None else min(max(computed, start), end)
        # Nothing to compute any more, and nobody to transfer with: idle.
        if ready > free:
            self.idle("wait", free, ready, step)
        # Transferred while it still computed: hidden. Only one of the two can be.
        if free > ready:
            self.counters.hidden_seconds += free - ready
            self.mark(name, "communication", ready, free, step, f"{self.name}, beside")
        # The rest: the worker only waited for the bytes.
        self.counters.communication_seconds += end - max(ready, free)
        self.mark(name, "communication", max(ready, free), end, step)

    def idle(self, name: str, start: float, end: float, step: int) -> None:
        """The worker had nothing to do from `start` to `end`: it waited for others."""
        self.counters.idle_seconds += end - start
        self.mark(name, "idle", start, end, step)

    def mark(
        self, name: str, category: str, start: float, end: float, step: int, lane: str | None = None
    ) -> None:
        """A span on the timeline that no counter adds up: an evaluation, a checkpoint.

        lane: None is the worker's.
        """
        if self.trace is not None:
            self.trace.add(lane or self.name, name, category, start, end, step)


def reset_peak_memory() -> None:
    """Starts the measurement of peak memory anew (Linux only).

    So the runs of one process are told apart.
    """
    try:
        # By proc(5), 5 sets the high-water mark VmHWM to what is resident now.
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_memory() -> int:
    """Bytes of this process resident at the peak since `reset_peak_memory`.

    0 where the system does not tell.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        import resource

        # Without /proc this is macOS, which counts bytes here, where Linux counts kilobytes.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


class Clock:
    """What a step does one after another, put down as it is done."""

    def __init__(self, meter: Meter, step: int) -> None:
        self.meter = meter
        self.step = step
        self.begin()

    def begin(self) -> None:
        """What was done until now is put down elsewhere."""
        self.last = time.perf_counter()

    def did(self, name: str) -> None:
        """All since the last time was this."""
        now = time.perf_counter()
        self.meter.compute(name, self.last, now, self.step)
        self.last = now
