"""Who lives and makes no progress is waited for so long, in seconds in which somebody looked."""

from __future__ import annotations

import pytest

from dure.machine import stall_timeout as module
from dure.machine.stall_timeout import StallTimeout


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def over_at(patience: StallTimeout, clock: Clock, progress: object, step: float) -> float:
    """After how many seconds of looks, `step` apart, it is over."""
    began = clock.now
    while not patience.is_over(progress):
        clock.now += step
    return clock.now - began


def test_it_ends_after_the_deadline_without_progress(clock: Clock) -> None:
    assert over_at(StallTimeout(10.0), clock, "step 3", 0.5) == 10.0


def test_progress_begins_it_anew(clock: Clock) -> None:
    patience = StallTimeout(10.0)
    for step in range(100):
        assert not patience.is_over(step)
        clock.now += 0.9
    assert over_at(patience, clock, 99, 1.0) == 10.0
    patience.again()
    assert not patience.is_over(99)


def test_time_in_which_nobody_looked_does_not_count(clock: Clock) -> None:
    patience = StallTimeout(10.0)
    assert not patience.is_over(0)
    clock.now += 1000.0  # Ctrl-Z
    assert not patience.is_over(0)
    assert over_at(patience, clock, 0, 1.0) == 9.0


def test_short_deadlines_are_looked_at_more_often() -> None:
    assert StallTimeout(0.4).every == 0.1
    assert StallTimeout(600.0).every == 1.0
