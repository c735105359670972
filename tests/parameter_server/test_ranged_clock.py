"""The ranged vector clock is a clock for each key."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dure.parameter_server.clock import RangedClock

KEYS = range(5, 25)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, int]:
    start = draw(st.integers(KEYS.start, KEYS.stop - 1))
    return start, draw(st.integers(start + 1, KEYS.stop))


sets = st.lists(st.tuples(ranges(), st.integers(0, 2), st.integers(0, 9)), max_size=12)


@given(sets, ranges())
def test_it_agrees_with_a_dictionary_of_keys(
    sets: list[tuple[tuple[int, int], int, int]], asked: tuple[int, int]
) -> None:
    clock = RangedClock(KEYS.start, KEYS.stop)
    by_key: dict[tuple[int, int], int] = {}
    for (start, stop), worker, time in sets:
        before = len(list(clock.segments()))
        clock.set(start, stop, worker, time)
        assert len(list(clock.segments())) <= before + 2
        by_key.update({(key, worker): time for key in range(start, stop)})
    for worker in range(3):
        times = [by_key.get((key, worker), 0) for key in range(*asked)]
        assert clock.least(*asked, worker) == min(times)
        assert clock.most(*asked, worker) == max(times)
    segments = list(clock.segments())
    assert [start for start, _, _ in segments] == [
        KEYS.start,
        *(stop for _, stop, _ in segments[:-1]),
    ]
    assert segments[-1][1] == KEYS.stop
    for start, stop, times in segments:
        for key in range(start, stop):
            assert all(times.get(w, 0) == by_key.get((key, w), 0) for w in range(3))


@given(sets)
def test_its_state_is_all_of_it(sets: list[tuple[tuple[int, int], int, int]]) -> None:
    clock = RangedClock(KEYS.start, KEYS.stop)
    for (start, stop), worker, time in sets:
        clock.set(start, stop, worker, time)
    again = RangedClock(KEYS.start, KEYS.stop)
    again.restore(clock.state())
    assert list(again.segments()) == list(clock.segments())
    again.set(KEYS.start, KEYS.stop, 0, 99)
    assert clock.most(KEYS.start, KEYS.stop, 0) != 99
