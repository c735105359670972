"""Messages in one order on all ranks, whatever each of them needs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dure.parallel.zero.gather_order import (
    GatherAction,
    GatherSweep,
    backward_order,
    completed_events,
    forward_order,
    guessed_events,
)

UNITS = 4
BLOCKS = [[0], [1, 2], [], [3]]


def picture(order: list[GatherAction]) -> str:
    return " ".join(f"{action.kind[0]}{action.number}" for action in order)


def test_the_order_that_is_guessed() -> None:
    events = guessed_events([0, 1, 2], [[0], [1], [2]], set())
    assert picture(backward_order(events, 0)) == "g2 r2 g1 r1 g0 r0"
    assert picture(backward_order(events, 1)) == "g2 g1 r2 g0 r1 r0"
    assert picture(backward_order(events, 9)) == "g2 g1 g0 r2 r1 r0"
    assert picture(forward_order([0, 1, 2])) == "g0 g1 g2"


def test_units_around_others_are_gathered_first_and_reduced_last() -> None:
    assert picture(guessed_events([0, 1, 2], [[0], [1], [2]], {0})) == "g0 g2 r2 g1 r1 r0"


def test_what_was_not_seen_comes_behind_and_the_carrier_last() -> None:
    everything = guessed_events([0, 1], [[0], [1]], set())
    seen = [GatherAction("reduce", 0), GatherAction("gather", 1), GatherAction("gather", 1)]
    assert picture(completed_events(seen, everything, 0)) == "g1 r1 g0 r0"


def started(
    order: list[GatherAction], prefetch: int, ready: set[int]
) -> tuple[GatherSweep, list[GatherAction]]:
    issued: list[GatherAction] = []
    sweep = GatherSweep(
        order,
        prefetch,
        lambda unit: issued.append(GatherAction("gather", unit)),
        lambda block: issued.append(GatherAction("reduce", block)),
        ready.__contains__,
    )
    return sweep, issued


@given(
    st.permutations(guessed_events(list(range(UNITS)), BLOCKS, {1})),
    st.integers(0, 3),
    st.lists(st.tuples(st.sampled_from(["need", "ready"]), st.integers(0, UNITS - 1)), max_size=12),
)
def test_every_rank_issues_the_same_messages_in_the_same_order(
    events: list[GatherAction], prefetch: int, happens: list[tuple[str, int]]
) -> None:
    order = backward_order(events, prefetch)
    ready: set[int] = set()
    sweep, issued = started(order, prefetch, ready)
    for what, number in happens:
        if what == "need":
            sweep.need(number)
            assert GatherAction("gather", number) in issued
        else:
            ready.add(number)
            sweep.advance()
    sweep.finish()
    assert issued == order
    assert sorted(order) == sorted(events)


def test_a_rank_that_needs_a_unit_behind_a_reduction_sends_what_it_has() -> None:
    order = backward_order(guessed_events([0, 1, 2], [[0], [1], [2]], set()), 0)
    sweep, issued = started(order, 0, set())
    sweep.need(0)
    assert picture(issued) == "g2 r2 g1 r1 g0"
    assert sweep.forced == {1, 2}
    sweep.advance()
    assert picture(issued) == "g2 r2 g1 r1 g0", (
        "the last message, with the tail, waits: something may come late"
    )


def test_units_are_gathered_as_far_ahead_as_asked() -> None:
    sweep, issued = started(forward_order(range(5)), 2, set())
    sweep.need(0)
    assert picture(issued) == "g0 g1 g2"
    sweep.need(1)
    assert picture(issued) == "g0 g1 g2 g3"
