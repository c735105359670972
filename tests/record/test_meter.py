"""What a worker sent, received and spent its time on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.record.meter import Counters, Meter, peak_memory, reset_peak_memory
from dure.record.trace import Trace

COUNTS, SECONDS = st.integers(0, 2**53), st.floats(0, 1e9)
COUNTERS = st.builds(Counters, COUNTS, COUNTS, COUNTS, SECONDS, SECONDS, SECONDS, COUNTS, SECONDS)


@given(COUNTERS)
def test_counters_travel_as_numbers(counters):
    again = Counters.from_list(counters.as_list())
    assert again == counters
    assert isinstance(again.bytes_sent, int)


def test_bytes_and_messages_add_up():
    meter = Meter("rank 0")
    meter.sent(10)
    meter.sent(0)
    meter.received(7)
    counters = meter.counters
    assert (counters.bytes_sent, counters.messages_sent, counters.bytes_received) == (10, 2, 7)


@given(st.floats(0, 10), st.floats(0, 10), st.none() | st.floats(-5, 25))
def test_a_transfer_is_idle_until_the_last_peer_came_and_communication_after(
    start, length, arrival
):
    meter, end = Meter("rank 0"), start + length
    meter.communication("ring all-reduce", start, end, 1, arrival)
    idle, moving = meter.counters.idle_seconds, meter.counters.communication_seconds
    assert idle >= 0
    assert moving >= 0
    assert idle + moving == pytest.approx(end - start)
    if arrival is None or arrival <= start:
        assert idle == 0
    elif arrival >= end:
        assert moving == 0
    else:
        assert idle == pytest.approx(arrival - start)


@given(st.floats(0, 10), st.floats(0, 10), st.none() | st.floats(-5, 25), st.floats(-5, 25))
def test_what_ran_beside_computing_is_hidden_and_makes_nobody_idle(
    start, length, arrival, computed
):
    meter, end = Meter("rank 0"), start + length
    meter.communication("ring all-reduce", start, end, 1, arrival, computed)
    counters = meter.counters
    waited = counters.communication_seconds + counters.idle_seconds
    assert waited == pytest.approx(end - min(max(computed, start), end)), (
        "what was waited for is what was not beside"
    )
    began = start if arrival is None else min(max(arrival, start), end)
    assert counters.hidden_seconds == pytest.approx(max(0.0, min(computed, end) - began))
    assert counters.hidden_seconds + counters.communication_seconds == pytest.approx(end - began)
    if end > start and arrival is None:
        assert counters.hidden_share == pytest.approx(counters.hidden_seconds / (end - start))


def test_spans_lie_in_the_meter_s_lane_and_do_not_overlap():
    trace = Trace()
    meter = Meter("rank 3", trace)
    meter.compute("forward", 0.0, 1.0, 5)
    meter.communication("ring all-reduce", 1.0, 4.0, 5, arrival=3.0)
    meter.mark("evaluation", "evaluation", 4.0, 9.0, 5)
    spans = [(s.name, s.category, s.start, s.end, s.step) for s in trace.lanes["rank 3"].spans]
    assert spans == [
        ("forward", "compute", 0.0, 1.0, 5),
        ("wait", "idle", 1.0, 3.0, 5),
        ("ring all-reduce", "communication", 3.0, 4.0, 5),
        ("evaluation", "evaluation", 4.0, 9.0, 5),
    ]
    assert (meter.counters.compute_seconds, meter.counters.communication_seconds) == (1.0, 1.0)


def test_peak_memory_sees_what_was_held_for_a_moment_since_the_reset():
    reset_peak_memory()
    before = peak_memory()
    held = torch.ones(25_000_000)
    del held
    assert peak_memory() >= before + 50_000_000


def test_transfers_inside_of_a_computation_are_taken_out_of_it():
    trace = Trace()
    meter = Meter("rank 0", trace)
    meter.inside("all-reduce", 0.5, 0.9)  # of an evaluation, which nobody counts
    meter.inside("all-reduce", 1.25, 1.5)
    meter.inside("all-gather", 1.5, 2.0)
    meter.compute("forward", 1.0, 3.0, 7)
    meter.compute("backward", 3.0, 4.0, 7)
    counters = meter.counters
    assert (counters.compute_seconds, counters.communication_seconds) == (2.25, 0.75)
    assert (meter.counters.inside_seconds, meter.counters.inside_steps) == (0.75, 1)
    spans = [(span.name, span.category, span.step) for span in trace.lanes["rank 0, inside"].spans]
    assert spans == [("all-reduce", "communication", 7), ("all-gather", "communication", 7)]
    assert [(span.start, span.end) for span in trace.lanes["rank 0"].spans] == [
        (1.0, 3.0),
        (3.0, 4.0),
    ]


def test_without_a_timeline_nothing_waits_to_be_taken_out():
    meter = Meter("rank 0")
    meter.inside("all-reduce", 1.25, 1.5)
    meter.compute("forward", 1.0, 3.0, 7)
    assert (meter.counters.compute_seconds, meter.counters.inside_seconds) == (2.0, 0.0)
