"""Plans of all-reduces: every gradient in one bucket, cuts that end earliest, costs that explain
what was measured."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.parallel.data.buckets import (
    ALL,
    LONG,
    Bucket,
    Cost,
    Kind,
    cost_of_messages,
    end_of,
    filled,
)

CPU = torch.device("cpu")
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
KINDS = st.lists(
    st.builds(Kind, st.integers(0, LONG // 2), DTYPES, st.just(CPU)), min_size=1, max_size=12
)
ALIKE = st.lists(
    st.builds(Kind, st.integers(1, LONG // 2), st.just(torch.float32), st.just(CPU)),
    min_size=1,
    max_size=8,
)


@given(KINDS, st.integers(1, 4 * LONG), st.randoms(use_true_random=False))
def test_every_gradient_is_in_one_bucket_of_its_dtype(kinds, limit, random):
    order = random.sample(range(len(kinds)), len(kinds))
    plan = filled(kinds, order, limit)
    assert sorted(plan.order()) == sorted(order)
    for bucket in plan.buckets:
        assert len({kinds[member].dtype for member in bucket.members}) == 1
        last = max(bucket.members, key=order.index)
        assert sum(kinds[member].nbytes for member in bucket.members if member != last) < limit, (
            "it leaves when full"
        )
        odd = [kinds[member].nbytes % 64 != 0 for member in bucket.members]
        assert odd == sorted(odd), "those that keep the next one on a cache line come first"
        assert not bucket.alone or (
            len(bucket.members) == 1 and kinds[bucket.members[0]].nbytes >= LONG
        )


@given(KINDS, st.integers(1, 4 * LONG), st.integers(0, 50))
def test_the_tail_rides_in_the_last_bucket_or_is_the_last_message(kinds, limit, tail):
    plan = filled(kinds, range(len(kinds)), limit)
    lengths = plan.lengths(kinds, tail)
    assert sum(lengths) == sum(kind.numel for kind in kinds) + tail
    assert len(lengths) == plan.messages(tail > 0)
    if plan.carries:
        assert kinds[plan.buckets[-1].members[0]].dtype in (torch.float32, torch.float64)
        assert not plan.buckets[-1].alone
    elif tail:
        assert lengths[-1] == tail


def test_small_gradients_need_one_message_and_half_precision_needs_one_for_the_tail():
    small = [Kind(10, torch.float32, CPU)] * 4
    assert filled(small, [3, 2, 1, 0]).lengths(small, 5) == [45]
    halves = [Kind(10, torch.bfloat16, CPU)] * 4
    assert filled(halves, [3, 2, 1, 0]).lengths(halves, 5) == [40, 5]


def test_a_long_gradient_stays_where_it_is_unless_all_are_to_be_in_buffers():
    kinds = [
        Kind(10, torch.float32, CPU),
        Kind(LONG, torch.float32, CPU),
        Kind(20, torch.float32, CPU),
    ]
    plan = filled(kinds, [2, 1, 0])
    assert [(bucket.members, bucket.alone) for bucket in plan.buckets] == [
        ((1,), True),
        ((2, 0), False),
    ]
    assert plan.carries
    assert filled(kinds, [2, 1, 0], ALL, ALL).buckets == (Bucket((1, 2, 0)),)
    assert filled(kinds, [2, 1, 0], long=ALL).buckets == (Bucket((1, 2)), Bucket((0,)))


def test_a_message_waits_for_its_last_gradient_for_the_link_and_for_the_cores():
    kinds = [Kind(25, torch.float32, CPU)] * 3
    plan = filled(kinds, [2, 1, 0], limit=1)
    ready = [0.5, 0.2, 0.1]
    assert end_of(plan, kinds, ready, Cost(0.0, 0.0)) == 0.5
    assert end_of(plan, kinds, ready, Cost(alpha=0.2, beta=0.0)) == pytest.approx(0.1 + 3 * 0.2)
    assert end_of(plan, kinds, ready, Cost(alpha=0.1, beta=0.002)) == pytest.approx(0.1 + 3 * 0.3)
    assert end_of(plan, kinds, ready, Cost(0.0, 0.0, gamma=0.1)) == pytest.approx(0.5 + 2 * 0.1)
    assert end_of(filled(kinds, [2, 1, 0]), kinds, ready, Cost(0.1, 0.002)) == pytest.approx(
        0.5 + 0.1 + 0.6
    )


@given(
    st.floats(1e-6, 1.0),
    st.floats(1e-12, 1e-6),
    st.lists(st.integers(1, 10**8), min_size=2, unique=True),
)
def test_costs_that_are_exact_are_found(alpha, beta, sizes):
    found = cost_of_messages([(size, alpha + beta * size) for size in sizes])
    for size in sizes:
        assert found[0] + found[1] * size == pytest.approx(alpha + beta * size, rel=1e-6)


@given(st.lists(st.tuples(st.integers(1, 10**8), st.floats(1e-6, 10)), min_size=1))
def test_costs_are_never_below_zero(samples):
    alpha, beta = cost_of_messages(samples)
    assert alpha >= 0
    assert beta >= 0


def test_costs_need_samples():
    with pytest.raises(ValueError, match="nothing to fit"):
        cost_of_messages([])
