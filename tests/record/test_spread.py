"""How numbers of several seeds are spread."""

from __future__ import annotations

import pytest
from scipy import stats

from dure.record.spread import spread


def test_the_interval_is_that_of_students_distribution():
    values = [0.91, 0.93, 0.9, 0.95]
    found = spread(values)
    assert found is not None
    low, high = stats.t.interval(0.95, 3, loc=stats.tmean(values), scale=stats.sem(values))
    assert (found.count, found.mean) == (4, pytest.approx(0.9225, abs=1e-15))
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    assert found.deviation == pytest.approx(stats.tstd(values))


def test_of_one_value_there_is_no_deviation_and_of_none_nothing():
    one = spread([0.5])
    assert one is not None
    assert (one.mean, one.deviation, one.low, one.high) == (0.5, None, None, None)
    assert spread([]) is None
