"""When a run ends."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.contracts.stop import Stop


def reached(
    stop: Stop, unit: str = "step", step: int = 0, samples: int = 0, **metrics: float
) -> str | None:
    return stop.reached(unit, step, samples, 10, metrics)


def test_whichever_limit_comes_first_ends_the_run():
    stop = Stop(epochs=2, steps=5, rounds=3)
    assert reached(stop, step=4, samples=19) is None
    assert reached(stop, step=5, samples=19) == "steps"
    assert reached(stop, step=4, samples=20) == "epochs"
    assert reached(stop, unit="round", step=3) == "rounds"
    assert reached(stop, unit="round", step=2, samples=19) is None


def test_steps_do_not_end_a_run_that_counts_rounds():
    assert reached(Stop(steps=1), unit="round", step=9) is None
    assert reached(Stop(rounds=1), unit="step", step=9) is None


def test_all_targets_have_to_be_reached():
    stop = Stop(target={"test_accuracy": 0.9, "test_loss": 0.5})
    assert reached(stop, test_accuracy=0.9, test_loss=0.6) is None
    assert reached(stop, test_accuracy=0.9, test_loss=0.5) == "target"
    assert reached(stop, test_accuracy=0.95) is None
    assert reached(stop) is None
    assert reached(stop, test_accuracy=math.nan, test_loss=0.1) is None


@given(st.integers(1, 40), st.integers(1, 1000))
def test_a_part_of_an_epoch_ends_at_its_last_example_whatever_floats_make_of_it(tenths, examples):
    stop = Stop(epochs=tenths / 10)
    needed = -(-tenths * examples // 10)
    assert stop.reached("step", 1, needed, examples, {}) == "epochs"
    assert stop.reached("step", 1, needed - 1, examples, {}) is None


def test_bytes_end_a_run_of_any_unit():
    for unit in ("step", "round"):
        assert Stop(bytes=100).reached(unit, 1, 1, 10, {}, 99) is None
        assert Stop(bytes=100).reached(unit, 1, 1, 10, {}, 100) == "bytes"


def test_bytes_alone_end_a_run_that_sends_none_after_ten_epochs():
    assert Stop(bytes=100).reached("step", 1, 99, 10, {}, 0) is None
    assert Stop(bytes=100).reached("step", 1, 100, 10, {}, 0) == "epochs"
    assert Stop(bytes=100).reached("step", 1, 100, 10, {}, 1) is None
    assert Stop(bytes=100, seconds=9).reached("step", 1, 100, 10, {}, 0) is None


@pytest.mark.parametrize("name", ["epochs", "steps", "rounds", "seconds", "bytes"])
@pytest.mark.parametrize("value", [0, -1, math.nan])
def test_a_limit_that_is_not_positive_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}, but it has to be greater than 0"):
        Stop(**{name: value}).check("step")


@pytest.mark.parametrize(
    ("stop", "unit", "complaint"),
    [
        (
            Stop(),
            "step",
            "this run has no stopping condition: give epochs, steps, seconds, bytes",
        ),
        (Stop(rounds=3), "step", "rounds do not apply: this system counts steps"),
        (Stop(steps=3), "round", "steps do not apply: this system counts rounds"),
        (Stop(target={}), "round", "this run has no stopping condition"),
    ],
)
def test_limits_that_never_end_a_run_are_refused(stop, unit, complaint):
    with pytest.raises(ValueError, match=complaint):
        stop.check(unit)


@pytest.mark.parametrize(
    ("stop", "unit"),
    [
        (Stop(epochs=0.1), "step"),
        (Stop(steps=1), "step"),
        (Stop(rounds=1), "round"),
        (Stop(seconds=1), "round"),
        (Stop(target={"test_loss": 1.0}), "step"),
    ],
)
def test_one_limit_is_enough(stop, unit):
    stop.check(unit)
