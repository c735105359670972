"""Trials of a sweep, and which was the best."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dure
from dure.contracts.stop import Stop
from dure.run.sweep import ValueRange, judge_of, parse_values, ranked, trials
from small import small_task


def test_a_grid_is_every_combination_in_its_order():
    space = {"lr": parse_values("lr", "0.1,0.01"), "cut": parse_values("cut", '["1","2"],["2"]')}
    assert trials(space) == [
        {"lr": "0.1", "cut": '["1","2"]'},
        {"lr": "0.1", "cut": '["2"]'},
        {"lr": "0.01", "cut": '["1","2"]'},
        {"lr": "0.01", "cut": '["2"]'},
    ]


@given(st.integers(1, 12), st.integers(0, 3))
def test_draws_are_of_their_ranges_and_of_the_seed_alone(draws, seed):
    space = {"a": ValueRange(0.01, 10, "log"), "b": ValueRange(2, 5, "int"), "c": ["x", "y"]}
    found = trials(space, draws, seed)
    assert found == trials(space, draws, seed)
    assert len(found) == draws
    for one in found:
        assert 0.01 <= one["a"] <= 10
        assert one["b"] in (2, 3, 4, 5)
        assert one["c"] in ("x", "y")
    assert found != trials(space, draws, seed + 1)


def test_of_a_small_grid_no_trial_is_drawn_twice():
    assert sorted(one["c"] for one in trials({"c": ["x", "y"]}, 10)) == ["x", "y"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("log:0:1", "a logarithmic range needs numbers above 0"),
        ("int:1:2.5", "not integers"),
        ("uniform:2:1", "to a larger one"),
        ("uniform:1", "write a range as uniform:LOW:HIGH"),
        ("log:nan:1", "to a larger one"),
        ("1,,2", "a value is missing"),
        ("1,1", "given twice"),
    ],
)
def test_what_is_neither_values_nor_a_range_is_refused(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse_values("lr", text)


@pytest.mark.parametrize(
    ("space", "draws", "complaint"),
    [
        ({}, None, "at least one setting"),
        ({"lr": ValueRange(0, 1)}, None, "a grid cannot enumerate"),
        ({"lr": ["1"]}, 0, "1 or more"),
    ],
)
def test_a_space_that_makes_no_trials_is_refused(space, draws, complaint):
    with pytest.raises(ValueError, match=complaint):
        trials(space, draws)


def test_the_best_trial_is_that_of_the_best_mean_over_its_seeds():
    task = small_task()
    entries = [(dure.SingleWorker(10), None, small_task(lr=lr), f"lr {lr}") for lr in (1e-4, 0.3)]
    runs = dure.compare(task, entries, stop=Stop(epochs=3), seeds=2).runs
    judge = judge_of(runs)
    found = ranked(runs, judge)
    assert found[0].label == "lr 0.3"
    assert len(found[0].runs) == 2
    values = [run.summary[judge] for run in runs[2:]]
    assert found[0].value == pytest.approx(sum(values) / 2)
    assert [one.label for one in ranked(runs[:3], judge)] == ["lr 0.0001"], "one seed failed"
    with pytest.raises(ValueError, match="no trial measured 'no_such'"):
        judge_of(runs, "no_such")
