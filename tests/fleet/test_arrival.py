"""Data that come and go."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.fleet.arrival import (
    GradualArrival,
    GradualForgetting,
    MovingWindow,
    StaticData,
    parse_arrival,
)

SHARES = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.1, 0.3, 1.0]))
SECONDS = st.floats(1e-2, 1e6)
MOVING = st.one_of(
    st.builds(GradualArrival, SHARES, SECONDS),
    st.builds(GradualForgetting, SHARES, SECONDS),
    st.builds(MovingWindow, SHARES, SECONDS),
)
SETTINGS = st.one_of(st.just(StaticData()), MOVING)
SIZES = st.integers(1, 200)
TIMES = st.floats(0, 1e7)


@given(SETTINGS, SIZES, TIMES)
def test_some_different_examples_of_its_own_are_there_in_order(setting, n, now):
    present = setting.present(n, now)
    assert present.dtype == torch.int64
    assert 1 <= len(present) <= n
    assert present[0] >= 0
    assert present[-1] < n
    assert bool((present.diff() > 0).all())


@given(SETTINGS)
def test_the_text_form_is_read_back(setting):
    assert parse_arrival(str(setting)) == setting


@given(SIZES, TIMES)
def test_what_is_still_stays(n, now):
    assert StaticData().present(n, now).tolist() == list(range(n))


@given(SHARES, SECONDS, SIZES, st.tuples(TIMES, TIMES))
def test_what_has_arrived_stays_and_in_the_end_all_is_there(share, seconds, n, times):
    setting = GradualArrival(share, seconds)
    early, late = (set(setting.present(n, now).tolist()) for now in sorted(times))
    assert early <= late
    assert len(setting.present(n, 0)) == max(round(share * n), 1)
    for now in (seconds, 2 * seconds):
        assert setting.present(n, now).tolist() == list(range(n))


@given(SHARES, SECONDS, SIZES, st.tuples(TIMES, TIMES))
def test_what_is_forgotten_stays_away_and_in_the_end_a_share_is_left(share, seconds, n, times):
    setting = GradualForgetting(share, seconds)
    early, late = (set(setting.present(n, now).tolist()) for now in sorted(times))
    assert early >= late
    assert setting.present(n, 0).tolist() == list(range(n))
    left = setting.present(n, 2 * seconds)
    assert abs(len(left) - max(share * n, 1)) <= 0.5 + 1e-6
    assert left[-1] == n - 1


def test_half_way_half_of_the_rest_is_there():
    assert GradualArrival(0.2, 100).present(10, 50).tolist() == [0, 1, 2, 3, 4, 5]
    assert GradualForgetting(0.2, 100).present(10, 50).tolist() == [4, 5, 6, 7, 8, 9]


def test_a_window_moves_over_the_data_and_begins_again():
    window = MovingWindow(0.3, 100)
    assert window.present(10, 0).tolist() == [0, 1, 2]
    assert window.present(10, 45).tolist() == [4, 5, 6]
    assert window.present(10, 85).tolist() == [0, 8, 9]
    assert window.present(10, 345).tolist() == [4, 5, 6]


@given(st.floats(0.01, 1), st.integers(1, 40))
def test_a_window_is_over_all_examples_equally_long(share, n):
    window = MovingWindow(share, float(n))
    seen = torch.cat([window.present(n, step + 0.5) for step in range(n)])
    assert set(seen.bincount(minlength=n).tolist()) == {max(round(share * n), 1)}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("coming", "there is no arrival 'coming'"),
        ("still:1", "too many values: write still"),
        ("arriving:2", "arriving: share is 2.0, but it has to be in .0, 1."),
        ("leaving:nan", "leaving: share is nan, but it has to be in .0, 1."),
        ("window:0.5:0", "window: seconds is 0.0, but it has to be greater than 0 and finite"),
        ("window:0.5:inf", "window: seconds is inf, but it has to be greater than 0 and finite"),
    ],
)
def test_text_that_names_none_is_refused(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse_arrival(text)
