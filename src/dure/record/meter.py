"""The meter: what one worker sent, received, and spent its time on.

Bytes are payload: what a tensor or a message holds, without the framing of the transport. Seconds are wall time
in three kinds: compute (forward, backward, update), communication (transfers), idle (waiting for the slowest peer
to arrive; see `dure.parallel.data`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from dure.record.trace import Trace


class Counters(msgspec.Struct):
    """Cumulative counts of one worker; they add over workers."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    compute_seconds: float = 0.0
    communication_seconds: float = 0.0
    idle_seconds: float = 0.0
    peak_memory: int = 0

    def as_list(self) -> list[float]:
        return [float(value) for value in msgspec.structs.astuple(self)]

    @classmethod
    def from_list(cls, values: list[float]) -> Counters:
        kinds = (int, int, int, float, float, float, int)
        return cls(*(kind(value) for kind, value in zip(kinds, values, strict=True)))


def sum_of_counters(rows: Iterable[list[float]]) -> Counters:
    """The counters of several workers as one worker's; each row is `Counters.as_list`."""
    total = Counters()
    for counters in map(Counters.from_list, rows):
        peak = max(total.peak_memory, counters.peak_memory)
        total = Counters.from_list([a + b for a, b in zip(total.as_list(), counters.as_list(), strict=True)])
        total.peak_memory = peak
    return total


class Meter:
    """The counters and the lane of one worker.

    name: "rank 3", "server" or "client 17". trace: where its spans go; None records no spans.
    """

    def __init__(self, name: str, trace: Trace | None = None) -> None:
        self.name = name
        self.trace = trace
        self.counters = Counters()

    def sent(self, nbytes: int) -> None:
        self.counters.bytes_sent += nbytes
        self.counters.messages_sent += 1

    def received(self, nbytes: int) -> None:
        self.counters.bytes_received += nbytes

    def compute(self, name: str, start: float, end: float, step: int) -> None:
        """The worker computed from `start` to `end` (seconds of `time.perf_counter`)."""
        self.counters.compute_seconds += end - start
        self.mark(name, "compute", start, end, step)

    def communication(self, name: str, start: float, end: float, step: int, arrival: float | None = None) -> None:
        """A transfer from `start` to `end`; until `arrival`, when the last peer came, the worker was idle."""
        ready = start if arrival is None else min(max(arrival, start), end)
        if ready > start:
            self.idle("wait", start, ready, step)
        self.counters.communication_seconds += end - ready
        self.mark(name, "communication", ready, end, step)

    def idle(self, name: str, start: float, end: float, step: int) -> None:
        """The worker had nothing to do from `start` to `end`: it waited for others."""
        self.counters.idle_seconds += end - start
        self.mark(name, "idle", start, end, step)

    def mark(self, name: str, category: str, start: float, end: float, step: int) -> None:
        """A span on the timeline that no counter adds up: an evaluation, a checkpoint."""
        if self.trace is not None:
            self.trace.add(self.name, name, category, start, end, step)


def reset_peak_memory() -> None:
    """Starts the measurement of peak memory anew, so that runs in one process are told apart (Linux only)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_memory() -> int:
    """Bytes of this process resident at the peak since `reset_peak_memory`; 0 where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
