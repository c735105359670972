"""Which evaluation is the best, and how long ago it was."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

import dure
from dure.run.early_stopping import BestEvaluation, updated_best


def best_of(
    values: list[float], stop: dure.Stop, monitor: str = "validation_loss"
) -> BestEvaluation:
    best = None
    for step, value in enumerate(values):
        best = updated_best(best, stop, monitor, step, {monitor: value})
    assert best is not None
    return best


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1))
def test_the_best_is_the_first_that_nothing_is_better_than(values: list[float]) -> None:
    best = best_of(values, dure.Stop())
    real = [value for value in values if not math.isnan(value)]
    if not real:
        assert (best.step, best.value, best.waited) == (0, None, len(values) - 1)
        return
    first = values.index(min(real))
    assert (best.step, best.value) == (first, min(real))
    assert best.waited == len(values) - 1 - first


def test_an_accuracy_is_better_where_it_is_higher() -> None:
    best = best_of([0.1, 0.5, 0.4], dure.Stop(), "validation_accuracy")
    assert (best.step, best.value, best.waited) == (1, 0.5, 1)


def test_small_gains_are_kept_and_do_not_count() -> None:
    best = best_of([1.0, 0.9, 0.8, 0.7], dure.Stop(min_delta=0.25))
    assert (best.step, best.value) == (3, 0.7)
    assert best.mark == 0.7
    assert best_of([1.0, 0.9, 0.8], dure.Stop(min_delta=0.25)).waited == 2
