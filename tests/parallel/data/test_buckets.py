"""Plans of all-reduces: every gradient is in one bucket, and the tail in the last message."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.parallel.data.buckets import LONG, NO_BYTE_LIMIT, Bucket, GradientSpec, fill_buckets

CPU = torch.device("cpu")
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
KINDS = st.lists(
    st.builds(GradientSpec, st.integers(0, LONG // 2), DTYPES, st.just(CPU)),
    min_size=1,
    max_size=12,
)
ALIKE = st.lists(
    st.builds(GradientSpec, st.integers(1, LONG // 2), st.just(torch.float32), st.just(CPU)),
    min_size=1,
    max_size=8,
)


@given(KINDS, st.integers(1, 4 * LONG), st.randoms(use_true_random=False))
def test_every_gradient_is_in_one_bucket_of_its_dtype(kinds, limit, random):
    order = random.sample(range(len(kinds)), len(kinds))
    plan = fill_buckets(kinds, order, limit)
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
    plan = fill_buckets(kinds, range(len(kinds)), limit)
    lengths = plan.lengths(kinds, tail)
    assert sum(lengths) == sum(kind.numel for kind in kinds) + tail
    assert len(lengths) == plan.messages(tail > 0)
    if plan.carries:
        assert kinds[plan.buckets[-1].members[0]].dtype in (torch.float32, torch.float64)
        assert not plan.buckets[-1].alone
    elif tail:
        assert lengths[-1] == tail


def test_planning_looks_at_each_gradient_a_few_times():
    looks = []

    class Counted(GradientSpec):
        @property
        def nbytes(self):
            looks.append(1)
            return super().nbytes

    kinds = [Counted(2, torch.float32, CPU)] * 2_000
    assert fill_buckets(kinds, range(len(kinds))).lengths(kinds) == [4_000]
    assert len(looks) <= 5 * len(kinds)


def test_small_gradients_need_one_message_and_half_precision_needs_one_for_the_tail():
    small = [GradientSpec(10, torch.float32, CPU)] * 4
    assert fill_buckets(small, [3, 2, 1, 0]).lengths(small, 5) == [45]
    halves = [GradientSpec(10, torch.bfloat16, CPU)] * 4
    assert fill_buckets(halves, [3, 2, 1, 0]).lengths(halves, 5) == [40, 5]


def test_a_long_gradient_stays_where_it_is_unless_all_are_to_be_in_buffers():
    kinds = [
        GradientSpec(10, torch.float32, CPU),
        GradientSpec(LONG, torch.float32, CPU),
        GradientSpec(20, torch.float32, CPU),
    ]
    plan = fill_buckets(kinds, [2, 1, 0])
    assert [(bucket.members, bucket.alone) for bucket in plan.buckets] == [
        ((1,), True),
        ((2, 0), False),
    ]
    assert plan.carries
    assert fill_buckets(kinds, [2, 1, 0], NO_BYTE_LIMIT, NO_BYTE_LIMIT).buckets == (
        Bucket((1, 2, 0)),
    )
    assert fill_buckets(kinds, [2, 1, 0], long=NO_BYTE_LIMIT).buckets == (
        Bucket((1, 2)),
        Bucket((0,)),
    )
