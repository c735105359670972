"""Plans of all-reduces: every gradient in one bucket, cuts that end earliest, costs that explain what was measured."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.parallel.buckets import ALL, LONG, Bucket, Kind, Plan, cost_of_messages, cut, filled, merged

CPU = torch.device("cpu")
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
KINDS = st.lists(st.builds(Kind, st.integers(0, LONG // 2), DTYPES, st.just(CPU)), min_size=1, max_size=12)
ALIKE = st.lists(
    st.builds(Kind, st.integers(1, LONG // 2), st.just(torch.float32), st.just(CPU)), min_size=1, max_size=8
)


@given(KINDS, st.integers(1, 4 * LONG), st.randoms(use_true_random=False))
def test_every_gradient_is_in_one_bucket_of_its_dtype(kinds, limit, random):
    order = random.sample(range(len(kinds)), len(kinds))
    plan = filled(kinds, order, limit)
    assert sorted(plan.order()) == sorted(order)
    for bucket in plan.buckets:
        assert len({kinds[member].dtype for member in bucket.members}) == 1
        last = max(bucket.members, key=order.index)
        assert sum(kinds[member].nbytes for member in bucket.members if member != last) < limit, "it leaves when full"
        odd = [kinds[member].nbytes % 64 != 0 for member in bucket.members]
        assert odd == sorted(odd), "those that keep the next one on a cache line come first"
        assert not bucket.alone or (len(bucket.members) == 1 and kinds[bucket.members[0]].nbytes >= LONG)


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
    kinds = [Kind(10, torch.float32, CPU), Kind(LONG, torch.float32, CPU), Kind(20, torch.float32, CPU)]
    plan = filled(kinds, [2, 1, 0])
    assert [(bucket.members, bucket.alone) for bucket in plan.buckets] == [((1,), True), ((2, 0), False)]
    assert plan.carries
    assert filled(kinds, [2, 1, 0], ALL, ALL).buckets == (Bucket((1, 2, 0)),)
    assert filled(kinds, [2, 1, 0], long=ALL).buckets == (Bucket((1, 2)), Bucket((0,)))


def end_of(kinds, order, ready, counts, alpha, beta) -> float:
    """When the last of these buckets has arrived, sent one after another."""
    end, start = 0.0, 0
    for count in counts:
        members = order[start : start + count]
        start += count
        end = max(end, ready[start - 1]) + alpha + beta * sum(kinds[member].nbytes for member in members)
    return end


@given(ALIKE, st.data(), st.floats(1e-4, 1.0), st.floats(0, 1e-6))
def test_no_cut_ends_earlier_than_the_merged_one(kinds, data, alpha, beta):
    order = list(range(len(kinds)))
    ready = sorted(data.draw(st.lists(st.floats(0, 3), min_size=len(kinds), max_size=len(kinds))))
    counts = merged(kinds, order, ready, alpha, beta)
    assert sum(counts) == len(kinds)
    own = end_of(kinds, order, ready, counts, alpha, beta)
    for size in range(len(kinds)):
        for places in itertools.combinations(range(1, len(kinds)), size):
            others = [b - a for a, b in itertools.pairwise((0, *places, len(kinds)))]
            # each of the buckets may be worse by a hundredth of alpha, for being longer
            assert own <= end_of(kinds, order, ready, others, alpha, beta) + 0.01 * alpha * len(kinds) + 1e-9


def test_on_a_link_without_cost_all_is_sent_at_once_and_with_dear_messages_in_one():
    kinds, order, ready = [Kind(1000, torch.float32, CPU)] * 5, [4, 3, 2, 1, 0], [0.1, 0.2, 0.3, 0.4, 0.5]
    assert merged(kinds, order, ready, alpha=1e-3, beta=2e-5) == [1] * 5
    assert merged(kinds, order, ready, alpha=10.0, beta=2e-5) == [5]
    assert isinstance(cut(kinds, order, [2, 3]), Plan)
    assert [bucket.members for bucket in cut(kinds, order, [2, 3]).buckets] == [(4, 3), (2, 1, 0)]
    long = [Kind(LONG, torch.float32, CPU)] * 2
    assert cut(long, [1, 0], [1, 1]).buckets == (Bucket((1,), alone=True), Bucket((0,))), "the last has the tail"


@given(st.floats(1e-6, 1.0), st.floats(1e-12, 1e-6), st.lists(st.integers(1, 10**8), min_size=2, unique=True))
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
