"""Bucket sizes by measurement: what is measured leads to the sizes that suit it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.parallel.data.buckets import LIMIT, Cost, Kind, end_of, filled
from dure.parallel.data.reducer import Transfer
from dure.parallel.data.trials import CHECKS, LIMITS, TRIALS, TRIED, Trials

KINDS = [Kind(LIMIT // 16, torch.float32, torch.device("cpu"))] * 40
"""40 gradients of a quarter of a megabyte."""
ORDER = list(range(40))[::-1]
READY = [0.1 * (40 - index) / 40 for index in range(40)]
"""Over a tenth of a second, the last one first."""


class Ranks:
    """A group whose ranks all have measured the same."""

    def __init__(self, size: int = 2) -> None:
        self.size = size

    def all_gather_values(self, values: list[float], name: str = "") -> list[list[float]]:
        return [values] * self.size


def note(trials: Trials, cost: Cost, end: float | None = None) -> None:
    """A step on a machine where messages cost so much; end: when it has ended, if not as they
    cost."""
    plan, transfers = trials.plan(), []
    for number, bucket in enumerate(plan.buckets):
        nbytes = sum(KINDS[member].nbytes for member in bucket.members)
        transfers.append(Transfer(number, 0.0, cost.alpha + cost.beta * nbytes))
    if end is not None:
        transfers.append(Transfer(len(plan.buckets), end, end))
    slower = 1 + cost.gamma * len(plan.buckets) / max(READY)
    trials.note([slower * time for time in READY], transfers, 0.0, slower * max(READY))


def measured(cost: Cost, ahead: bool = False) -> Trials:
    """Trials of which all but the checks are over."""
    trials = Trials(KINDS, ORDER, ahead=ahead)
    for _ in range(1 + TRIALS):
        note(trials, cost)
    return trials


@given(st.floats(1e-5, 1e-2), st.floats(1e-11, 1e-8), st.floats(0, 1e-3))
def test_costs_are_found_and_no_other_limit_would_end_earlier(alpha, beta, gamma):
    trials = measured(Cost(alpha, beta, gamma))
    found = trials.cost([trials._rows, trials._rows])
    assert found == pytest.approx(Cost(alpha, beta, gamma), rel=1e-4, abs=1e-9)
    slower = 1 + gamma * len(trials.plans[1].buckets) / max(READY)
    best = trials.limit([slower * time for time in READY], found)
    ends = [
        end_of(filled(KINDS, ORDER, int(limit)), KINDS, READY, Cost(alpha, beta, gamma))
        for limit in LIMITS
    ]
    assert ends[best] <= 1.002 * min(ends)


def test_dear_messages_are_few_and_cheap_ones_many():
    sizes = []
    for alpha in (0.0, 1e-3, 1.0):
        trials = measured(Cost(alpha, 8e-9, 0.0))
        sizes.append(LIMITS[trials.limit(READY, Cost(alpha, 8e-9, 0.0))])
    assert sizes[0] < sizes[1] < sizes[2]


def test_a_rank_that_only_waited_for_another_is_not_believed():
    trials = measured(Cost(1e-3, 1e-9, 0.0))
    late = [[*row[:2], *(10 * seconds for seconds in row[2:])] for row in trials._rows]
    assert trials.cost([late, trials._rows]) == trials.cost([trials._rows])


def test_where_messages_are_sent_ahead_what_one_rank_waits_the_other_seems_to_save():
    trials = measured(Cost(1e-3, 1e-9, 1e-4), ahead=True)
    assert trials.cost([trials._rows]) == pytest.approx(Cost(1e-3, 1e-9, 0.0))
    early, late = (
        [[*row[:2], *(seconds + wait for seconds in row[2:])] for row in trials._rows]
        for wait in (9e-4, -9e-4)
    )
    assert trials.cost([early, late]) == pytest.approx(trials.cost([trials._rows]), rel=1e-9)


def test_short_and_long_buckets_take_turns_and_little_is_not_tried():
    trials, ranks = Trials(KINDS, ORDER), Ranks()
    assert trials.worth_it
    assert TRIALS % len(TRIED) == 0
    note(trials, Cost(1.0, 1.0))  # does not count
    assert trials.go_on(ranks)
    for step in range(TRIALS):
        assert len(trials.plan().buckets) == (5 if step % 2 else 40)
        note(trials, Cost(1e-3, 8e-9))
        assert trials.go_on(ranks)
    assert trials.cost([trials._rows]) == pytest.approx(Cost(1e-3, 8e-9))
    assert not Trials(KINDS[:1], [0]).worth_it


@pytest.mark.parametrize(
    ("end", "taken"), [(0.2, 2), (0.9, 0), (0.52, 2)], ids=["better", "worse", "as good"]
)
def test_what_costs_suggest_is_taken_if_its_own_steps_do_not_tell_otherwise(end: float, taken: int):
    trials, ranks = Trials(KINDS, ORDER), Ranks()
    note(trials, Cost(1e-3, 8e-9))
    for step in range(TRIALS):
        note(trials, Cost(1e-3, 8e-9), end=0.6 if step % 2 else 0.5)
        more = trials.go_on(ranks)
    assert more
    assert trials.plan() not in trials.plans[:2]
    for step in range(CHECKS):
        note(trials, Cost(1e-3, 8e-9), end=end if step else 2.0)
        assert trials.go_on(ranks) == (step < CHECKS - 1)
    assert trials.best(ranks) == trials.plans[taken]


def test_what_is_suggested_and_was_tried_is_not_tried_again():
    trials, ranks = measured(Cost(1e-5, 1e-9)), Ranks()
    assert not trials.go_on(ranks)
    assert trials.best(ranks) == trials.plans[0]
