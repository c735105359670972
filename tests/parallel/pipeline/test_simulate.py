"""Times of schedules: those of the papers' formulas, to the last digit."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.parallel.pipeline.builders import forward_only, make
from dure.parallel.pipeline.schedule import Action, Schedule
from dure.parallel.pipeline.simulate import ActionSpan, ScheduleSimulation, Times, simulate
from dure.parallel.pipeline.validate import ScheduleError
from dure.parallel.pipeline.zero_bubble_v import V_TIMES

RANKS = st.integers(1, 8)
MICROBATCHES = st.integers(1, 16)
SECONDS = st.integers(1, 9)


def simulated(
    name: str, ranks: int, m: int, v: int = 1, forward: float = 1, backward: float = 2
) -> ScheduleSimulation:
    schedule = make(name, ranks, m, v)
    return simulate(schedule, Times.uniform(schedule.stages, forward, backward))


@given(st.sampled_from(["gpipe", "1f1b"]), RANKS, MICROBATCHES, SECONDS, SECONDS)
def test_gpipe_and_1f1b_are_idle_for_p_minus_1_of_m_plus_p_minus_1(name, p, m, forward, backward):
    run = simulated(name, p, m, 1, forward, backward)
    assert run.makespan == (m + p - 1) * (forward + backward)
    assert run.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
    assert run.bubble_over_ideal == (p - 1) / m
    held = [m] * p if name == "gpipe" else [min(m, p - rank) for rank in range(p)]
    assert list(run.peak_activations) == held


@given(RANKS, SECONDS, SECONDS)
def test_naive_lets_one_rank_compute_at_a_time(p, forward, backward):
    run = simulated("naive", p, 1, 1, forward, backward)
    assert run.bubble == pytest.approx((p - 1) / p, abs=1e-12)
    assert run.idle_over_busy == pytest.approx(p - 1)
    assert run.peak_activations == (1,) * p


@settings(max_examples=40)
@given(RANKS, st.integers(1, 4), st.integers(1, 4), SECONDS, SECONDS)
def test_interleaved_divides_the_idle_time_by_v(p, groups, v, forward, backward):
    m = groups * p
    run = simulated("interleaved", p, m, v, forward, backward)  # of a v-th of a model's stage each
    assert run.makespan == (v * m + p - 1) * (forward + backward)
    assert run.bubble_over_ideal == (p - 1) / (v * m)
    if v > 1:
        most = [min(v * m, 2 * (p - rank - 1) + (v - 1) * p + 1) for rank in range(p)]
        assert list(run.peak_activations) == most


@settings(max_examples=40)
@given(st.integers(2, 8), MICROBATCHES, st.integers(2, 4))
def test_interleaved_is_no_longer_than_1f1b_where_p_does_not_divide_m(p, m, v):
    run = simulated("interleaved", p, m, v)
    assert run.makespan <= simulated("1f1b", p, m, 1, v, 2 * v).makespan
    assert run.makespan <= simulated("interleaved", p, -(-m // p) * p, v).makespan


def test_the_example_of_the_study_in_which_p_does_not_divide_m():
    run = simulated("interleaved", 3, 16, 3)
    page = (Path(__file__).parents[3] / "docs" / "study-interleaving.md").read_text()
    page = " ".join(page.split())
    assert f"are idle for {run.bubble:.1%}".replace("%", " %") in page
    assert f"not for {2 / (3 * 16 + 2):.1%}".replace("%", " %") in page


@given(RANKS, MICROBATCHES, st.integers(1, 4))
def test_the_idle_time_of_interleaving_lies_between_its_bounds(p, m, v):
    idle = simulated("interleaved", p, m, v).idle_over_busy
    assert idle is not None
    assert (p - 1) / (v * m) - 1e-9 <= idle <= (p - 1) / m + 1e-9


@pytest.mark.parametrize(("v", "idle"), [(1, 0.2188), (2, 0.1094), (4, 0.0547)])
def test_the_idle_time_of_8_ranks_and_32_microbatches(v, idle):
    run = simulated("interleaved", 8, 32, v, 1 / v, 2 / v)
    assert run.bubble_over_ideal == pytest.approx(7 / (32 * v), abs=1e-12)
    assert round(run.bubble_over_ideal, 4) == idle


@given(st.integers(2, 8), MICROBATCHES, SECONDS, SECONDS, SECONDS)
def test_zero_bubble_is_idle_for_less_than_1f1b_and_holds_no_more(p, m, forward, inputs, weights):
    schedule = make("zero-bubble", p, m)
    run = simulate(schedule, Times((forward,) * p, (0,) * p, (inputs,) * p, (weights,) * p))
    work = forward + inputs + weights
    assert run.makespan < simulated("1f1b", p, m, 1, forward, inputs + weights).makespan
    assert run.peak_activations == (min(m, p),) * p
    if m >= p:
        assert run.makespan == m * work + (p - 1) * (
            forward + inputs - min(forward, inputs, weights)
        )


@settings(max_examples=40)
@given(RANKS, MICROBATCHES)
def test_zero_bubble_v_is_hardly_idle_and_keeps_to_its_memory(p, m):
    run = simulated("zero-bubble-v", p, m, 2)
    assert max(run.peak_activations) <= 2 * p
    assert run.makespan >= 6 * m + p - 1
    if m >= 2 * p:
        assert run.makespan <= 6 * m + p - 1 + max(0, p - 2)
    if p > 1:
        assert run.makespan < simulated("1f1b", p, m, 1, 2, 4).makespan


@settings(max_examples=40)
@given(st.integers(2, 8), MICROBATCHES)
def test_zero_bubble_v_is_made_for_weight_gradients_that_take_less_than_the_rest(p, m):
    forward = V_TIMES["forward"]
    inputs = V_TIMES["input_gradient"]
    weights = V_TIMES["weight_gradient"]

    def time(schedule: Schedule, halves: int) -> float:
        each = [(halves * t,) * schedule.stages for t in (forward, 0, inputs, weights)]
        return simulate(schedule, Times(*each)).makespan

    found = time(make("zero-bubble-v", p, m, 2), 1)
    if m >= 2 * p:
        assert found <= 2 * m * (forward + inputs + weights) + 12 * (p - 1)
        assert found < time(make("zero-bubble", p, m), 2)


TABLE = Path(__file__).parents[3] / "docs" / "pipeline.md"

CONDITIONS = {
    "always": lambda p, m, v: v == 1,
    "m = 1": lambda p, m, v: m == 1 == v,
    "p divides m, v > 1": lambda p, m, v: m % p == 0 and v > 1,
    "p does not divide m, v > 1": lambda p, m, v: m % p > 0 and v > 1,
    "m ≥ p": lambda p, m, v: m >= p and v == 1,
    "m < p": lambda p, m, v: m < p and v == 1,
    "m ≥ 2·p": lambda p, m, v: m >= 2 * p and v == 2,
    "m < 2·p": lambda p, m, v: m < 2 * p and v == 2,
}
"""What the page says under "if", with the stages a rank that a row is about."""


def documented() -> list[list[str]]:
    """The rows of the page's table of bubbles: schedule, condition, idle time, micro-batches held.

    Idle time is told over the busy time and as a share of all.
    """
    lines = TABLE.read_text().split("| `schedule` | if |")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]


def value(formula: str, p: int, m: int, v: int, rank: int = 0) -> float:
    names = {"p": p, "m": m, "v": v, "rank": rank, "max": max, "min": min}
    return float(eval(formula.split(", of ")[0].replace("·", "*"), names))


@pytest.mark.parametrize("row", documented(), ids=lambda row: f"{row[0]} if {row[1]}")
def test_the_page_says_what_the_simulator_finds(row):
    name, condition, over, share, held = row
    low, _, high = over.partition(" to ")
    least, _, most_of_all = share.partition(" to ")
    cases = [
        (p, m, v)
        for p in range(1, 9)
        for m in (1, 2, 3, 5, 8, 15, 16, 24)
        for v in (1, 2, 3)
        if CONDITIONS[condition](p, m, v)
    ]
    for p, m, v in cases:
        # forward, input gradient and weight gradient alike, where they are apart
        run = simulated(name, p, m, v, 1, 2)
        assert run.bubble_over_ideal >= value(low, p, m, v) - 1e-12
        assert run.bubble_over_ideal <= value(high or low, p, m, v) + 1e-12
        assert run.idle_over_busy == pytest.approx(run.bubble_over_ideal, abs=1e-12)
        assert run.bubble >= value(least, p, m, v) - 1e-12
        assert run.bubble <= value(most_of_all or least, p, m, v) + 1e-12
        most = held.removeprefix("at most ")
        for rank, found in enumerate(run.peak_activations):
            said = value(most, p, m, v, rank)
            assert found <= said if most != held else found == said


def test_messages_take_time_but_occupy_nobody():
    times = Times.uniform(2, forward=1, backward=2, send=0.5)
    assert simulate(make("naive", 2, 1), times).makespan == 1 + 0.5 + 1 + 2 + 0.5 + 2
    run = simulate(make("gpipe", 2, 2), times)
    first = [span for span in run.spans if span.rank == 0]
    assert [(str(span.action), span.start, span.end) for span in first[:2]] == [
        ("F0.0", 0, 1),
        ("F0.1", 1, 2),
    ]


def test_stages_of_one_rank_hand_over_without_a_message():
    times = Times.uniform(4, forward=1, backward=2, send=100)
    assert simulate(make("interleaved", 1, 3, 4), times).makespan == 3 * 4 * 3


def test_stages_may_take_different_times_and_the_longest_rank_is_the_ideal():
    times = Times((1, 3), (2, 6), (1, 3), (1, 3))
    run = simulate(make("1f1b", 2, 4), times)
    assert run.busy == (12, 36)
    assert run.ideal == 36
    assert run.makespan == 1 + 36 + 2
    assert run.bubble_over_ideal == 3 / 36
    assert run.bubble == 1 - 48 / (2 * 39)


def test_forwards_alone_are_simulated_too():
    run = simulate(forward_only((0, 1, 2), 4), Times.uniform(3))
    assert run.makespan == 6
    assert run.peak_activations == (4, 4, 4)


@given(st.sampled_from(["1f1b", "zero-bubble"]), st.integers(1, 5), st.integers(1, 6), st.randoms())
def test_a_measured_run_is_simulated_to_the_same_times(name, p, m, random):
    schedule = make(name, p, m)
    actions = chain.from_iterable(schedule.actions)
    measured = {action: random.randint(1, 9) for action in actions}
    times = Times.uniform(p)
    run = simulate(schedule, Times(*(times.forward,) * 4, measured=measured))
    for span in run.spans:
        assert span.end - span.start == measured[span.action]
    assert _by_hand(schedule, measured) == {span.action: span.end for span in run.spans}


def _by_hand(schedule: Schedule, seconds: dict[Action, int]) -> dict[Action, float]:
    """Ends of actions, found by repeating until nothing changes."""
    ends: dict[Action, float] = {}
    while True:
        new: dict[Action, float] = {}
        for actions in schedule.actions:
            now = 0.0
            for action in actions:
                if action.kind.startswith("receive"):
                    now = max(now, ends.get(action.counterpart, 0.0))
                if action.kind.startswith("send"):
                    new[action] = now + seconds[action]
                else:
                    now = new[action] = now + seconds[action]
        if new == ends:
            return {action: end for action, end in ends.items() if action.computes}
        ends = new


def test_measured_spans_are_judged_as_simulated_ones_are():
    spans = (
        ActionSpan(0, Action("forward", 0, 0), 10.0, 11.0),
        ActionSpan(1, Action("forward", 1, 0), 11.0, 12.0),
    )
    run = ScheduleSimulation(2, spans, (1, 1))
    assert (run.makespan, run.bubble, run.bubble_over_ideal) == (2.0, 0.5, 1.0)
    assert (
        ScheduleSimulation(1, (), (0,)).bubble
        == 0
        == ScheduleSimulation(1, (), (0,)).bubble_over_ideal
    )


def test_times_of_too_few_stages_and_deadlocks_are_refused():
    with pytest.raises(ValueError, match="there are times of 1 stages for forward, but 2"):
        simulate(make("1f1b", 2, 2), Times.uniform(1))
    stuck = Schedule("stuck", (0, 1), 1, ((Action("receive_gradient", 0, 0),), ()))
    with pytest.raises(ScheduleError, match=r"waits for SG1\.0, which is never sent"):
        simulate(stuck, Times.uniform(2))
