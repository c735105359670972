"""Who asks too often waits; who is refused too often stays away, longer each time."""

from __future__ import annotations

import pytest

from dure.deploy.server import rate_limits
from dure.deploy.server.rate_limits import RateLimiter, RateLimits


@pytest.fixture
def conducts(clock) -> RateLimiter[int]:
    return RateLimiter(RateLimits(rate=2, burst=3, refusals=3), clock)


def test_a_burst_is_let_through_and_then_the_rate(conducts, clock) -> None:
    assert [conducts.hurry(1) for _ in range(3)] == [0.0] * 3
    assert conducts.hurry(1) == pytest.approx(0.5)
    clock.now += 0.5
    assert conducts.hurry(1) == 0.0
    assert conducts.hurry(1) > 0
    assert conducts.hurry(2) == 0.0


def test_a_long_rest_earns_no_more_than_a_burst(conducts, clock) -> None:
    conducts.hurry(1)
    clock.now += 1000
    assert [conducts.hurry(1) > 0 for _ in range(4)] == [False, False, False, True]


def test_many_refusals_within_a_minute_are_too_many(conducts, clock) -> None:
    assert [conducts.refused(1) for _ in range(3)] == [0.0, 0.0, 120.0]
    assert conducts.away(1) == 120.0
    assert conducts.away(2) == 0.0
    assert conducts.in_quarantine() == {1: 120.0}
    clock.now += 120
    assert conducts.away(1) == 0.0
    assert conducts.in_quarantine() == {}


def test_as_many_over_a_longer_time_are_not(conducts, clock) -> None:
    for _ in range(30):
        assert conducts.refused(1) == 0.0
        clock.now += 31


def test_refusals_in_quarantine_make_it_no_longer(conducts, clock) -> None:
    for _ in range(3):
        conducts.refused(1)
    clock.now += 100
    assert [conducts.refused(1) for _ in range(10)] == [20.0] * 10
    clock.now += 20
    assert conducts.refused(1) == 0.0


def test_after_a_quarantine_the_count_begins_anew(clock) -> None:
    short = RateLimiter[int](RateLimits(refusals=3, within=60, quarantine=10), clock)
    assert quarantine(short) == 10
    clock.now += 10
    assert [short.refused(1) for _ in range(3)] == [0.0, 0.0, 20.0]


def quarantine(conducts: RateLimiter[int]) -> float:
    return [conducts.refused(1) for _ in range(3)][-1]


def test_each_quarantine_is_twice_as_long_up_to_a_longest(conducts, clock) -> None:
    lengths = []
    for _ in range(100):
        lengths.append(quarantine(conducts))
        clock.now += lengths[-1]
    assert lengths[:6] == [120, 240, 480, 960, 1920, 3600]
    assert set(lengths[5:]) == {3600}
    clock.now += 3601
    assert quarantine(conducts) == 120


def test_of_any_number_only_so_many_are_remembered(conducts, monkeypatch) -> None:
    monkeypatch.setattr(rate_limits, "MOST_REMEMBERED", 10)
    for who in range(100):
        conducts.refused(who)
    assert len(conducts._all) == 10


@pytest.mark.parametrize(
    "wrong", [{"rate": 0}, {"burst": 0}, {"refusals": 0}, {"within": 0}, {"quarantine": 1e9}]
)
def test_limits_that_are_none_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match="limits"):
        RateLimits(**wrong)
