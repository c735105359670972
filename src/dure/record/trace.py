"""The timeline: spans of time per rank or client, written as Chrome trace events.

A span is (name, category, start, end, step). Categories: compute, communication, idle, evaluation,
checkpoint. A lane (a rank, a server, a client) stores its first `limit` spans and counts the rest,
so that a run of a million steps neither fills the memory nor writes a file that no browser opens.

The file is the JSON object form of the Trace Event Format (Google, 2016), which Perfetto and
chrome://tracing open.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dure.record.disk import write_atomically


class Span(NamedTuple):
    """A span of time in seconds of `time.perf_counter`, which processes of one machine share."""

    name: str
    category: str
    start: float
    end: float
    step: int


class Lane(msgspec.Struct):
    """The spans of a rank or client, and the number of dropped spans."""

    name: str
    spans: list[Span]
    dropped: int = 0


class Trace:
    """Lanes of spans. `limit`: most spans of a lane."""

    def __init__(self, limit: int = 5_000) -> None:
        self.limit = limit
        self.lanes: dict[str, Lane] = {}

    def add(self, lane: str, name: str, category: str, start: float, end: float, step: int) -> None:
        """Add a span to the lane called `lane`."""
        found = self.lanes.get(lane)
        if found is None:
            found = self.lanes[lane] = Lane(lane, [])
        # The first spans: they show the beginning of a run, which the rest mostly repeats.
        if len(found.spans) < self.limit:
            found.spans.append(Span(name, category, start, end, step))
        else:
            found.dropped += 1

    def packed(self, offset: float = 0.0) -> bytes:
        """Return all lanes as bytes, for rank 0. offset: seconds to add for rank 0's clock."""
        lanes = [
            Lane(
                lane.name,
                [
                    span._replace(start=span.start + offset, end=span.end + offset)
                    for span in lane.spans
                ],
                lane.dropped,
            )
            for lane in self.lanes.values()
        ]
        return msgspec.msgpack.encode(lanes)

    def take(self, packed: bytes) -> None:
        """Add the lanes that another trace has packed."""
        for lane in self.unpacked(packed):
            for span in lane.spans:
                self.add(lane.name, *span)
            if lane.dropped:
                self.lanes.setdefault(lane.name, Lane(lane.name, [])).dropped += lane.dropped

    @staticmethod
    def unpacked(packed: bytes) -> list[Lane]:
        """Return the lanes of `packed`."""
        return msgspec.msgpack.decode(packed, type=list[Lane])


def chrome_events(lanes: Sequence[Lane], label: str) -> list[dict[str, Any]]:
    """Return trace events of `lanes`, a thread for each lane.

    `ts` and `dur` are in microseconds, `ts` since the first span of all.
    """
    origin = min((span.start for lane in lanes for span in lane.spans), default=0.0)
    # "M" events name things, "X" events are spans with a beginning and a length.
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": label}}
    ]
    for tid, lane in enumerate(lanes):
        thread = {"pid": 1, "tid": tid}
        events.append({"ph": "M", "name": "thread_name", **thread, "args": {"name": lane.name}})
        if lane.dropped:
            # A name of our own, which viewers ignore and the report reads.
            events.append(
                {"ph": "M", "name": "spans_dropped", **thread, "args": {"count": lane.dropped}}
            )
        events.extend(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.category,
                **thread,
                "ts": round((span.start - origin) * 1e6, 1),
                "dur": round((span.end - span.start) * 1e6, 1),
                "args": {"step": span.step},
            }
            for span in lane.spans
        )
    return events


def write_trace(path: Path, lanes: Sequence[Lane], label: str) -> None:
    """Write `trace.json`."""
    events = chrome_events(lanes, label)
    content = json.dumps({"displayTimeUnit": "ms", "traceEvents": events})
    write_atomically(path, content.encode())
