"""Bucket sizes by measurement: what is measured leads to the sizes that suit it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.parallel.buckets import LIMIT, Cost, Kind, end_of, filled
from dure.parallel.reducer import Transfer
from dure.parallel.trials import LIMITS, TRIALS, TRIED, Trials

KINDS = [Kind(LIMIT // 16, torch.float32, torch.device("cpu"))] * 40
"""40 gradients of a quarter of a megabyte."""
ORDER = list(range(40))[::-1]
READY = [0.1 * (40 - index) / 40 for index in range(40)]
"""Over a tenth of a second, the last one first."""


def measured(cost: Cost) -> Trials:
    """Trials on a machine where messages cost so much."""
    trials = Trials.of(KINDS, ORDER)
    assert trials is not None
    while trials.go_on():
        plan, transfers = trials.plan(), []
        for number, bucket in enumerate(plan.buckets):
            nbytes = sum(KINDS[member].nbytes for member in bucket.members)
            transfers.append(Transfer(number, 0.0, cost.alpha + cost.beta * nbytes))
        slower = 1 + cost.gamma * len(plan.buckets) / max(READY)
        trials.note([slower * time for time in READY], transfers, slower * max(READY))
    return trials


@given(st.floats(1e-5, 1e-2), st.floats(1e-11, 1e-8), st.floats(0, 1e-3))
def test_costs_are_found_and_no_other_limit_would_end_earlier(alpha, beta, gamma):
    trials = measured(Cost(alpha, beta, gamma))
    found = trials.cost([trials._rows, trials._rows])
    assert found == pytest.approx(Cost(alpha, beta, gamma), rel=1e-4, abs=1e-9)
    slower = 1 + gamma * len(trials.plans[1].buckets) / max(READY)
    best = trials.best([slower * time for time in READY], found)
    ends = [end_of(filled(KINDS, ORDER, int(limit)), KINDS, READY, Cost(alpha, beta, gamma)) for limit in LIMITS]
    assert ends[best] <= 1.002 * min(ends)


def test_dear_messages_are_few_and_cheap_ones_many():
    sizes = []
    for alpha in (0.0, 1e-3, 1.0):
        trials = measured(Cost(alpha, 8e-9, 0.0))
        sizes.append(LIMITS[trials.best(READY, Cost(alpha, 8e-9, 0.0))])
    assert sizes[0] < sizes[1] < sizes[2]


def test_a_rank_that_only_waited_for_another_is_not_believed():
    trials = measured(Cost(1e-3, 1e-9, 0.0))
    late = [[row[0], *(10 * seconds for seconds in row[1:])] for row in trials._rows]
    assert trials.cost([late, trials._rows]) == trials.cost([trials._rows])


def test_short_and_long_buckets_take_turns_and_little_is_not_tried():
    trials = Trials.of(KINDS, ORDER)
    assert trials is not None
    assert TRIALS % len(TRIED) == 0
    assert len(trials.plan().buckets) == 40
    trials.note(READY, [], 0.1)
    assert len(trials.plan().buckets) == 5
    assert Trials.of(KINDS[:1], [0]) is None
