"""The history, and when a target was reached."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.record.history import Evaluation, History, Step, lower_is_better, steps_to_target

NUMBERS = st.floats(allow_nan=False, allow_infinity=False, width=32)
COUNTS = st.integers(0, 2**53)
STEPS = st.builds(
    Step, COUNTS, NUMBERS, COUNTS, NUMBERS, *[NUMBERS, COUNTS, COUNTS, NUMBERS, NUMBERS, NUMBERS]
)
EVALUATIONS = st.builds(
    Evaluation,
    *(COUNTS, NUMBERS, COUNTS, st.none() | NUMBERS, NUMBERS),
    st.dictionaries(st.text(), st.floats()),
    *(COUNTS, COUNTS, NUMBERS, NUMBERS, NUMBERS, COUNTS),
)
RECORDS = st.lists(STEPS | EVALUATIONS, max_size=6)


def evaluation(step: int, **metrics: float) -> Evaluation:
    return Evaluation(step, 0.0, 0, None, 0.0, metrics, 10 * step, 0, 0.0, 0.0, 0.0, 0)


@pytest.mark.parametrize(
    ("steps", "values", "target", "falling", "expected"),
    [
        ([0, 10, 20], [0.1, 0.5, 0.9], 0.8, False, 17.5),
        ([0, 10, 20], [0.1, 0.5, 0.9], 0.5, False, 10.0),
        ([0, 10, 20], [2.0, 1.0, 0.5], 0.75, True, 15.0),
        ([0, 10, 20, 30], [0.1, 0.6, 0.4, 0.8], 0.7, False, 25.0),  # the fall to 0.4 does not count
        ([0, 10], [0.9, 0.95], 0.8, False, 0.0),
        ([5, 10], [0.9, 0.95], 0.9, False, 5.0),
        ([0, 10, 20], [0.1, 0.5, 0.79], 0.8, False, None),
        ([0, 10], [2.0, 1.0], 0.5, True, None),
        ([0, 10, 20], [math.nan, 0.0, 1.0], 0.5, False, 15.0),
        ([], [], 0.5, False, None),
    ],
)
def test_steps_to_a_target_are_counted_on_the_monotone_interpolated_curve(
    steps, values, target, falling, expected
):
    assert steps_to_target(steps, values, target, falling) == pytest.approx(expected)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0, 1))
def test_a_target_is_reached_where_the_best_value_so_far_passes_it(values, target):
    reached = steps_to_target(range(len(values)), values, target)
    if max(values) < target:
        assert reached is None
    else:
        first = next(i for i, value in enumerate(values) if value >= target)
        assert reached is not None
        assert max(0, first - 1) <= reached <= first


def test_losses_errors_and_perplexities_fall():
    falling = ["test_loss", "test_error", "test_perplexity", "loss", "client_error_p10"]
    falling += ["test_MAE", "wer", "test_log loss", "test_top-1 error", "test_word_error_rate"]
    rising = ["test_accuracy", "test_f1", "client_accuracy_p10", "test_loss_scale"]
    # Words that end like others.
    rising += ["test_answer", "test_power", "answer", "test_officer", "client_dancer_p10"]
    assert [lower_is_better(name) for name in [*falling, *rising]] == [True] * 10 + [False] * 9


def test_the_history_finds_best_values_curves_and_targets():
    history = History(
        [
            evaluation(0, test_loss=3.0, test_accuracy=0.2),
            evaluation(10, test_loss=1.0, test_accuracy=0.6),
        ]
    )
    history.append(evaluation(20, test_loss=2.0, test_accuracy=0.5))
    assert history.best() == {"test_loss": 1.0, "test_accuracy": 0.6}
    assert history.to_target("test_loss", 2.0) == 5.0
    assert history.to_target("test_accuracy", 0.9) is None
    assert history.curve("test_accuracy", "bytes_sent") == ([0.0, 100.0, 200.0], [0.2, 0.6, 0.5])
    assert history.curve("test_f1") == ([], [])


def test_a_metric_that_is_not_finite_is_none_and_counts_nowhere():
    history = History([evaluation(0, a=math.nan, b=math.inf), evaluation(1, a=0.5, b=-math.inf)])
    assert [e.metrics for e in history.evaluations] == [
        {"a": None, "b": None},
        {"a": 0.5, "b": None},
    ]
    assert history.best() == {"a": 0.5}
    assert history.curve("a") == ([1.0], [0.5])


@given(RECORDS)
def test_a_history_is_read_back_as_it_was_written(records):
    assert History.decode(History(records).encoded()).records == records


@given(RECORDS.filter(bool), st.data())
def test_a_history_cut_off_anywhere_holds_its_whole_lines(records, data):
    text = History(records).encoded()
    cut = data.draw(st.integers(0, len(text)))
    assert History.decode(text[:cut]).records == records[: text[:cut].count(b"\n")]


@given(RECORDS, COUNTS)
def test_until_keeps_the_records_up_to_a_step(records, step):
    kept = History(records).until(step).records
    assert kept == [record for record in records if record.step <= step]


def test_steps_and_evaluations_are_told_apart():
    step = Step(1, 0.1, 4, 2.0, 0.1, 0, 0, 0.0, 0.0, 0.0)
    history = History([evaluation(0), step, evaluation(1)])
    assert history.steps == [step]
    assert [e.step for e in history.evaluations] == [0, 1]
    assert History.encode(step).startswith(b'{"kind":"step","step":1,"epoch":0.1,')
