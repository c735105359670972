"""The meter of a worker: bytes sent and received, and time by kind.

Bytes are payload: the content of a tensor or message, without the framing of the transport. Seconds
are wall time in three kinds: compute (forward, backward, update), communication (transfers that the
worker waited for), idle (waiting for the slowest peer to arrive; see
`dure.parallel.data.strategy`). Transfers during computation have a counter of their own, hidden:
the share hidden / (hidden + communication) shows how well a system overlaps the two. Transfers
inside a computation, such as those in the layers of tensor parallelism, are subtracted from the
computation: no second counts twice.
"""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from dure.machine.devices import is_cpu, marked, seconds_between
from dure.record.trace import Trace

MOST_INSIDE = 100_000
"""Most recorded transfers inside computations, until their computation ends.

Bounded, because the transfers of an evaluation stay until the next step discards them.
"""


OF_DEVICES = ("device_allocated", "device_reserved", "model_flops", "available_flops")
"""Counters that only workers on accelerators have."""

PEAKS = ("peak_memory", "device_allocated", "device_reserved")
"""Counters of which a sum over workers has the maximum."""


class Counters(msgspec.Struct):
    """Cumulative counts of a worker; they add over workers.

    inside_seconds, inside_steps: of the transfers inside computations (`Meter.inside`), and the
    steps with any; communication_seconds includes these seconds. shuffle_bytes, shuffle_seconds: of
    examples sent to other workers, and of the whole exchange; bytes_sent and the seconds include
    them. device_allocated, device_reserved: peak bytes of an accelerator in this worker's process.
    model_flops, available_flops: operations of the model, and those that the worker's accelerator
    could have made in the same time, if its peak is known.
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
    device_allocated: int = 0
    device_reserved: int = 0
    model_flops: float = 0.0
    available_flops: float = 0.0

    def as_list(self) -> list[float]:
        """Return the values in the order of the fields, for exchange between ranks of a job."""
        # As float64, in which bytes and messages are exact up to 2^53.
        return [float(value) for value in msgspec.structs.astuple(self)]

    @classmethod
    def from_list(cls, values: list[float]) -> Counters:
        """Return the counters of `as_list`; an older dure had fewer fields."""
        fields = msgspec.structs.fields(cls)
        # Each value in the type of its field again: counts travelled as floats.
        told = zip(fields, values, strict=False)
        return cls(**{field.name: type(field.default)(value) for field, value in told})

    @classmethod
    def in_a_row(cls, values: list[float]) -> list[Counters]:
        """Return the counters of several workers from their concatenated lists."""
        width = len(cls.__struct_fields__)
        starts = range(0, len(values), width)
        return [cls.from_list(values[start : start + width]) for start in starts]

    def written(self) -> dict[str, Any]:
        """Return the content for a file; counters of accelerators only if any was used."""
        content: dict[str, Any] = msgspec.to_builtins(self)
        for name in OF_DEVICES:
            if not content[name]:
                del content[name]
        return content

    @property
    def hidden_share(self) -> float | None:
        """Hidden share of the time of transfers; None without transfers."""
        total = self.hidden_seconds + self.communication_seconds
        return self.hidden_seconds / total if total > 0 else None


def sum_of_counters(workers: Iterable[Counters]) -> Counters:
    """Return the sum of the counters of several workers; of peaks, the maximum."""
    total = Counters()
    for counters in workers:
        for name in Counters.__struct_fields__:
            join = max if name in PEAKS else operator.add
            setattr(total, name, join(getattr(total, name), getattr(counters, name)))
    return total


class Meter:
    """The counters and the timeline lane of a worker.

    name: "rank 3", "server" or "client 17". trace: timeline of its spans; None records no spans.
    is_worker: False for a federation's server, the master of threads, and readers of batches, which
    are counted but do not train.
    """

    def __init__(self, name: str, trace: Trace | None = None, is_worker: bool = True) -> None:
        self.name = name
        self.trace = trace
        self.is_worker = is_worker
        self.counters = Counters()
        self.stands_for = 1
        """Workers counted together by this meter, if there are too many for a meter each."""
        self._inside: deque[tuple[str, float, float]] = deque(maxlen=MOST_INSIDE)
        self._inside_step: int | None = None

    def sent(self, nbytes: int) -> None:
        """Count a sent message of `nbytes` payload bytes."""
        self.counters.bytes_sent += nbytes
        self.counters.messages_sent += 1

    def received(self, nbytes: int) -> None:
        """Count `nbytes` received payload bytes."""
        self.counters.bytes_received += nbytes

    def exchanged(self, sent: Sequence[int], received: Sequence[int]) -> None:
        """Count many messages, given their bytes."""
        self.counters.bytes_sent += sum(sent)
        self.counters.messages_sent += len(sent)
        self.counters.bytes_received += sum(received)

    def shuffled(self, nbytes: int, seconds: float) -> None:
        """Count bytes of examples among the sent bytes, and the seconds of their exchange."""
        self.counters.shuffle_bytes += nbytes
        self.counters.shuffle_seconds += seconds

    def answered(self, down: int, up: int, transfer: float, compute: float) -> None:
        """Count a simulated client's download and upload in bytes; an upload of 0 is no answer.

        transfer, compute: seconds of its device.
        """
        counters = self.counters
        counters.bytes_received += down
        # A client without an answer has received the model and sent nothing.
        if up:
            counters.bytes_sent += up
            counters.messages_sent += 1
        counters.compute_seconds += compute
        counters.communication_seconds += transfer

    def compute(self, name: str, start: float, end: float, step: int) -> None:
        """Count computation from `start` to `end` (seconds of `time.perf_counter`)."""
        # Transfers within this span are communication; no second counts twice.
        inside = self._taken_out(start, step) if self._inside else 0.0
        self.counters.compute_seconds += end - start - inside
        self.counters.communication_seconds += inside
        self.mark(name, "compute", start, end, step)

    def inside(self, name: str, start: float, end: float) -> None:
        """Record a transfer inside of a computation that `compute` will count later.

        Its time is communication, not compute.
        """
        if self.trace is not None:  # else nobody may ever ask
            self._inside.append((name, start, end))

    def _taken_out(self, start: float, step: int) -> float:
        """Return the seconds of the recorded transfers since `start`.

        Earlier transfers were inside computations that are not counted, such as an evaluation.
        """
        seconds = 0.0
        while self._inside:
            name, began, ended = self._inside.popleft()
            # All recorded transfers leave the queue, but only those of this span count.
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
        """Count a transfer from `start` to `end`, for which the last peer arrived at `arrival`.

        computed: end of the worker's simultaneous computation; until then the transfer is hidden,
        and the worker does not wait.
        """
        # ready: arrival of the last peer, when the transfer can begin. free: end of this worker's
        # computation. Both are clamped to the transfer, since the arrival is read from another
        # clock, which may differ slightly.
        ready = start if arrival is None else min(max(arrival, start), end)
        free = start if computed is None else min(max(computed, start), end)
        # Neither computing nor transferring: idle.
        if ready > free:
            self.idle("wait", free, ready, step)
        # Transferring while computing: hidden. At most one of the two cases applies.
        if free > ready:
            self.counters.hidden_seconds += free - ready
            self.mark(name, "communication", ready, free, step, f"{self.name}, beside")
        # The rest: the worker only waited for the bytes.
        self.counters.communication_seconds += end - max(ready, free)
        self.mark(name, "communication", max(ready, free), end, step)

    def idle(self, name: str, start: float, end: float, step: int) -> None:
        """Count idle time from `start` to `end`, in which the worker waited for others."""
        self.counters.idle_seconds += end - start
        self.mark(name, "idle", start, end, step)

    def mark(
        self, name: str, category: str, start: float, end: float, step: int, lane: str | None = None
    ) -> None:
        """Add a span to the timeline without counting it, such as an evaluation or a checkpoint.

        lane: name of the lane; None is the worker's.
        """
        if self.trace is not None:
            self.trace.add(lane or self.name, name, category, start, end, step)


def reset_peak_memory() -> None:
    """Restart the measurement of peak memory (Linux only).

    So each run of a process gets its own peak.
    """
    try:
        # By proc(5), 5 sets the high-water mark VmHWM to the current resident size.
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_memory() -> int:
    """Return the peak of this process's resident bytes since `reset_peak_memory`.

    0 if the system does not report it.
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


class DeviceSpans:
    """Computations of a worker on an accelerator, measured by events on its stream.

    Nothing waits for a span: spans are counted after the worker has waited for something that was
    queued later (`passed`). A span lies on the clock of this process as long before the end of the
    wait as its events lie before an event that was queued just before the wait.
    """

    def __init__(self, meter: Meter, device: torch.device) -> None:
        self.meter = meter
        self.device = device
        self._queued: list[tuple[str, torch.Event, torch.Event, int]] = []

    def mark(self) -> torch.Event:
        """Queue an event, and return it."""
        return marked(self.device)

    def between(self, name: str, start: torch.Event, end: torch.Event, step: int) -> None:
        """Add the computation between two queued events."""
        self._queued.append((name, start, end, step))

    def passed(self, last: torch.Event, now: float) -> None:
        """Count all spans, of which `last` is the end or a later event.

        now: end of the wait for `last`, in seconds of `time.perf_counter`.
        """
        for name, start, end, step in self._queued:
            began = now - seconds_between(start, last)
            ended = now - seconds_between(end, last)
            self.meter.compute(name, began, max(began, ended), step)
        self._queued.clear()


class StepClock:
    """Meters the consecutive parts of a step."""

    def __init__(self, meter: Meter, step: int) -> None:
        self.meter = meter
        self.step = step
        self.begin()

    def begin(self) -> None:
        """Restart the clock; the time before is counted elsewhere."""
        self.last = time.perf_counter()

    def did(self, name: str, now: float | None = None) -> None:
        """Count the time since the last call as computation called `name`.

        now: its end, if it is over.
        """
        now = time.perf_counter() if now is None else now
        self.meter.compute(name, self.last, now, self.step)
        self.last = now

    def read(self) -> None:
        """Note that the step's loss was read, for which an accelerator is waited for."""


class DeviceStepClock(StepClock):
    """Meters the consecutive parts of a step on an accelerator by events.

    spans: of the worker; a step's last part is counted when the next step's loss is read.
    """

    def __init__(self, spans: DeviceSpans, step: int) -> None:
        self.spans = spans
        super().__init__(spans.meter, step)

    def begin(self) -> None:
        self.last_event = self.spans.mark()

    def did(self, name: str, now: float | None = None) -> None:
        event = self.spans.mark()
        self.spans.between(name, self.last_event, event, self.step)
        self.last_event = event

    def read(self) -> None:
        self.spans.passed(self.last_event, time.perf_counter())


def step_clock(meter: Meter, spans: DeviceSpans | None, step: int) -> StepClock:
    """Return the clock of a step. spans: of a worker on an accelerator; None on the CPU."""
    return StepClock(meter, step) if spans is None else DeviceStepClock(spans, step)


def device_spans(meter: Meter, device: torch.device) -> DeviceSpans | None:
    """Return the spans of a worker on an accelerator; None on the CPU."""
    return None if is_cpu(device) else DeviceSpans(meter, device)
