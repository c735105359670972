"""When simulated clients are there."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.errors import DataError
from dure.fleet import availability
from dure.fleet.availability import Always, AvailabilityFile, Daily, Probability, parse_availability
from dure.randomness.hashed_numbers import uniform

LENGTHS = st.one_of(st.floats(1e-2, 1e6), st.sampled_from([0.1, 0.3, 1 / 3, 49.0]))
WINDOWS = st.one_of(st.floats(1e-3, 0.999), st.just(1.0))
SHARES = st.one_of(st.floats(1e-3, 1 - 1e-12), st.sampled_from([1e-3, 0.5, 0.999, 1 - 1e-12, 1.0]))
SETTINGS = st.one_of(
    st.just(Always()),
    st.builds(Probability, SHARES, LENGTHS),
    st.builds(Daily, WINDOWS, LENGTHS),
)
TIMES = st.floats(0, 1e7)
CLIENTS = st.integers(0, 10**9)
SEEDS = st.integers(0, 5)


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    folder = tmp_path_factory.mktemp("windows")

    def written(*rows):
        path = folder / f"{len(list(folder.iterdir()))}.csv"
        path.write_text("\n".join(["client,start,end", *rows]))
        return str(path)

    return written


def holds(setting, client, now, seed, share):
    """What has to hold of `next` and `until` at any time. share: a number in [0, 1)."""
    start = setting.next(client, now, seed)
    end = setting.until(client, now, seed)
    assert start >= now
    assert setting.next(client, start, seed) == start
    if start == math.inf:
        assert end == math.inf
        return
    assert end > start
    assert setting.until(client, start, seed) == end
    before = now + share * (start - now)
    assert setting.next(client, before, seed) == start
    within = start + share * (min(end, start + 1e6) - start)
    if within < end:
        assert setting.next(client, within, seed) == within
        assert setting.until(client, within, seed) == end
    if end < math.inf:
        assert setting.next(client, end, seed) > end


@given(SETTINGS, CLIENTS, TIMES, SEEDS, st.floats(0, 1, exclude_max=True))
def test_a_client_is_there_between_next_and_until_and_away_before_and_after(
    setting, client, now, seed, share
):
    holds(setting, client, now, seed, share)


@given(st.builds(Probability, SHARES, LENGTHS), CLIENTS, st.integers(0, 10**6), SEEDS)
def test_that_holds_where_periods_meet_too(setting, client, period, seed):
    holds(setting, client, period * setting.period, seed, 0.5)


@given(st.builds(Daily, WINDOWS, LENGTHS), CLIENTS, st.integers(0, 10**4), SEEDS)
def test_that_holds_where_windows_begin_and_end_too(setting, client, day, seed):
    start = setting.next(client, day * setting.day, seed)
    holds(setting, client, start, seed, 0.5)
    if setting.share < 1:
        holds(setting, client, setting.until(client, start, seed), seed, 0.5)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(1, 10)), min_size=1, max_size=8
    ),
    st.sampled_from([0, 30, 30.1, 40]),
    st.one_of(st.floats(0, 1000), st.integers(0, 1000)),
    st.floats(0, 1, exclude_max=True),
)
def test_that_holds_for_windows_of_a_file_too(write, windows, every, now, share):
    setting = AvailabilityFile(
        write(*(f"{client},{start},{start + size}" for client, start, size in windows)), every
    )
    for client in range(3):
        holds(setting, client, now, 0, share)


@given(SETTINGS, CLIENTS, SEEDS, st.lists(TIMES, min_size=1, max_size=6), st.randoms())
def test_answers_do_not_depend_on_the_order_of_the_questions(setting, client, seed, times, random):
    first = {
        now: (setting.next(client, now, seed), setting.until(client, now, seed)) for now in times
    }
    random.shuffle(times)
    assert first == {
        now: (setting.next(client, now, seed), setting.until(client, now, seed)) for now in times
    }


@given(SETTINGS)
def test_the_text_form_is_read_back(setting):
    assert parse_availability(str(setting)) == setting


def there(setting, client, length, seed=0):
    """The share of 0..length in which a client is there."""
    now, total = 0.0, 0.0
    while (start := setting.next(client, now, seed)) < length:
        now = setting.until(client, start, seed)
        total += min(now, length) - start
    return total / length


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.8, 0.98])
def test_the_share_of_time_is_the_probability(p):
    shares = [there(Probability(p, 10.0), client, 10_000.0) for client in range(20)]
    assert abs(sum(shares) / 20 - p) < 5 * (p * (1 - p) / 20_000) ** 0.5
    assert len(set(shares)) > 1


@pytest.mark.parametrize("p", [0.1, 0.5, 0.7])
def test_one_period_says_nothing_about_the_next(p):
    def is_there(period):
        return Probability(p, 1.0).next(7, period + 0.5, 0) == period + 0.5

    periods = [is_there(period) for period in range(8_000)]
    after = [later for now, later in pairwise(periods) if now]
    assert abs(sum(periods) / len(periods) - p) < 5 * (p * (1 - p) / len(periods)) ** 0.5
    assert abs(sum(after) / len(after) - p) < 5 * (p * (1 - p) / len(after)) ** 0.5


@pytest.mark.parametrize(
    "setting", [Probability(1e-6), Probability(1 - 1e-6), Probability(1e-6, 1e-3)]
)
def test_a_rare_event_is_found_without_throwing_for_each_period(setting, monkeypatch):
    throws = []

    def counted(*question):
        throws.append(question)
        return uniform(*question)

    monkeypatch.setattr(availability, "uniform", counted)
    for client in range(100):
        setting.next(client, 1e5, 0)
        setting.until(client, 1e5, 0)
    assert len(throws) < 200 * 10


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_a_day_has_one_window_of_its_share(share):
    setting = Daily(share, 100.0)
    for client in range(20):
        first = setting.until(client, setting.next(client, 0, 0), 0)
        second = setting.next(client, first, 0)
        assert math.isclose(second - first, 100 * (1 - share))
        assert math.isclose(setting.until(client, second, 0) - second, 100 * share)
        assert math.isclose(there(setting, client, 5_000.0), share, rel_tol=1e-9)


def test_clients_have_their_own_hours_evenly_over_the_day():
    starts = [Daily(0.01, 24.0).next(client, 24.0, 0) % 24 for client in range(2_400)]
    for hour in range(24):
        assert 50 < sum(hour <= start < hour + 1 for start in starts) < 160


def test_whoever_is_there_with_certainty_never_leaves():
    for setting in (Always(), Probability(1.0), Daily(1.0)):
        assert (setting.next(3, 5.5, 0), setting.until(3, 5.5, 0)) == (5.5, math.inf)


def test_another_seed_and_another_client_have_other_hours():
    for setting in (Probability(0.5), Daily(0.5)):
        answers = {
            (client, seed): [setting.next(client, 4e3 * k, seed) for k in range(40)]
            for client in range(2)
            for seed in range(2)
        }
        assert len(set(map(tuple, answers.values()))) == 4


def test_windows_of_a_file_are_joined_where_they_touch_and_end_for_good(write):
    setting = AvailabilityFile(write("a,30,40", "a,5,10", "a,8,12", "a,12,20", "b,7,inf"))
    assert (setting.next(0, 0, 0), setting.until(0, 0, 0)) == (5, 20)
    assert (setting.next(0, 20, 0), setting.until(0, 20, 0)) == (30, 40)
    assert (setting.next(0, 40, 0), setting.until(0, 40, 0)) == (math.inf, math.inf)
    assert (setting.next(1, 9, 0), setting.until(1, 9, 0)) == (9, math.inf)
    assert setting.next(2, 0, 0) == 5


def test_windows_of_a_file_begin_again(write):
    setting = AvailabilityFile(write("0,0,10", "0,90,100", "1,20,30", "2,0,100"), every=100)
    assert (setting.next(0, 50, 0), setting.until(0, 50, 0)) == (90, 110)
    assert (setting.next(0, 1_005, 0), setting.until(0, 1_005, 0)) == (1_005, 1_010)
    assert (setting.next(1, 30, 0), setting.until(1, 30, 0)) == (120, 130)
    assert (setting.next(2, 50, 0), setting.until(2, 50, 0)) == (50, math.inf)
    assert parse_availability(str(setting)) == setting


def test_clients_of_a_file_that_are_numbers_are_in_the_order_of_these(write):
    setting = AvailabilityFile(write("1,5,6", "0,7,8"))
    assert [setting.next(client, 0, 0) for client in range(3)] == [7, 5, 7]


@pytest.mark.parametrize(
    ("row", "every", "complaint"),
    [
        ("a,5,5", 0, "line 2: start has to be at least 0 and less than end"),
        ("a,-1,5", 0, "line 2: start has to be at least 0"),
        ("a,nan,5", 0, "line 2: start has to be at least 0"),
        ("a,1,50", 40, "line 2: it ends at 50, after the schedule repeats"),
        ("a,1", 0, "line 2: 2 values, expected 3"),
        ("a,1,soon", 0, "line 2: 'a,1,soon' is not a name and numbers"),
    ],
)
def test_a_bad_file_is_refused_when_the_setting_is_made(write, row, every, complaint):
    with pytest.raises(DataError, match=complaint):
        AvailabilityFile(write(row), every)


@pytest.mark.parametrize("period", [1e-300, 3600.0, 1e300])
def test_the_least_probability_is_not_too_small(period):
    setting = Probability(1e-12, period)
    for client in range(20):
        assert 0 < setting.next(client, 0.0, 0) <= setting.until(client, 0.0, 0)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("never", "there is no availability 'never'"),
        ("probability:0", "probability: p is 0.0, but it has to be in .0, 1."),
        ("probability:nan", "probability: p is nan, but it has to be in .0, 1."),
        ("probability:1e-13", "1e-13 is too close to 0"),
        ("probability:0.9999999999999", "0.9999999999999 is too close to 1"),
        ("probability:0.5:0", "probability: period is 0.0, but it has to be greater than 0"),
        ("daily:0", "daily: share is 0.0, but it has to be in .0, 1."),
        ("daily:0.5:inf", "daily: day is inf, but it has to be greater than 0 and finite"),
        ("file", "the path '' cannot be written"),
        ("file:x:-1", "file: every is -1.0, but it has to be 0 or more and finite"),
    ],
)
def test_text_that_names_none_is_refused(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse_availability(text)
