"""The timeline as Chrome trace events."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from dure.record.trace import Lane, Span, Trace, chrome_events, write_trace

TIMES = st.floats(0, 1e6)
SPANS = st.builds(
    Span,
    st.text(),
    st.sampled_from(["compute", "communication", "idle"]),
    TIMES,
    TIMES,
    st.integers(0, 2**40),
)


def test_a_span_is_a_complete_event_in_microseconds_since_the_first_span_of_all():
    lanes = [
        Lane("rank 0", [Span("forward", "compute", 10.0, 10.001, 11)]),
        Lane("rank 1", [Span("forward", "compute", 10.0015, 10.0018, 12)]),
    ]
    process, first, early, second, event = chrome_events(lanes, "my run")
    assert early["ts"] == 0.0
    assert process == {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "my run"}}
    assert first == {
        "ph": "M",
        "name": "thread_name",
        "pid": 1,
        "tid": 0,
        "args": {"name": "rank 0"},
    }
    assert (second["tid"], second["args"]) == (1, {"name": "rank 1"})
    where = {
        "ph": "X",
        "name": "forward",
        "cat": "compute",
        "pid": 1,
        "tid": 1,
        "args": {"step": 12},
    }
    assert event == {**where, "ts": 1500.0, "dur": 300.0}


def test_a_lane_keeps_its_first_spans_and_counts_the_rest():
    trace = Trace(limit=2)
    for step in range(5):
        trace.add("rank 0", *Span("forward", "compute", step, step + 1, step))
    trace.add("rank 1", *Span("forward", "compute", 0, 1, 0))
    assert [span.step for span in trace.lanes["rank 0"].spans] == [0, 1]
    events = chrome_events(list(trace.lanes.values()), "run")
    dropped = [event for event in events if event["name"] == "spans_dropped"]
    assert dropped == [
        {"ph": "M", "name": "spans_dropped", "pid": 1, "tid": 0, "args": {"count": 3}}
    ]
    assert sum(event["ph"] == "X" for event in events) == 3


@given(st.dictionaries(st.text(), st.lists(SPANS, max_size=4), max_size=3))
def test_lanes_travel_as_bytes(lanes):
    trace = Trace(limit=3)
    for name, spans in lanes.items():
        for span in spans:
            trace.add(name, *span)
    unpacked = Trace.unpacked(trace.packed())
    assert unpacked == list(trace.lanes.values())
    assert all(isinstance(span, Span) for lane in unpacked for span in lane.spans)


def test_packing_moves_the_times_onto_another_clock_and_leaves_the_lane_alone():
    trace = Trace()
    trace.add("rank 1", *Span("send", "communication", 1.0, 2.5, 3))
    assert Trace.unpacked(trace.packed(offset=-0.5)) == [
        Lane("rank 1", [Span("send", "communication", 0.5, 2.0, 3)])
    ]
    assert trace.lanes["rank 1"].spans[0].start == 1.0


def test_the_file_is_the_json_object_form_of_the_trace_event_format(tmp_path):
    file = tmp_path / "trace.json"
    write_trace(file, [Lane('the "server"', [Span("a<b", "idle", 0.0, 1.0, 1)])], "run")
    content = json.loads(file.read_text())
    assert content.keys() == {"displayTimeUnit", "traceEvents"}
    assert content["displayTimeUnit"] == "ms"
    assert [event["ph"] for event in content["traceEvents"]] == ["M", "M", "X"]
