"""The schedule of recursive halving: who exchanges which half with whom."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dure.collectives.algorithms.halving_doubling import folded, folds_into, power_below, schedule


@given(n=st.integers(0, 100), size=st.integers(1, 20))
def test_partners_agree_in_every_step_and_the_windows_left_are_the_tensor(
    n: int, size: int
) -> None:
    taking_part = [rank for rank in range(size) if folds_into(size, rank) is None]
    assert len(taking_part) == power_below(size)
    schedules = {rank: schedule(n, size, rank) for rank in taking_part}
    for rank, steps in schedules.items():
        for position, (partner, keep, give) in enumerate(steps):
            theirs = schedules[partner][position]
            assert (theirs.partner, theirs.keep, theirs.give) == (rank, give, keep)
    left = sorted(steps[-1].keep if steps else (0, n) for steps in schedules.values())
    covered = [index for start, end in left for index in range(start, end)]
    assert covered == list(range(n))


@given(size=st.integers(1, 40))
def test_a_rank_that_is_folded_has_one_that_stands_for_it(size: int) -> None:
    for rank in range(size):
        representative = folds_into(size, rank)
        if representative is None:
            continue
        assert folded(size, representative) == rank
        assert folds_into(size, representative) is None
        assert schedule(10, size, rank) == []
