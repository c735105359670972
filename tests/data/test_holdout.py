"""Holding out test examples."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.data.holdout import hold_out


@given(
    st.lists(st.sampled_from("abc"), min_size=1),
    st.sampled_from([0.1, 0.2, 0.5]),
    st.integers(0, 5),
)
def test_every_stratum_gives_its_share_and_every_example_is_on_one_side(strata, fraction, seed):
    train, test = hold_out(strata, fraction, seed)
    assert sorted(train.tolist() + test.tolist()) == list(range(len(strata)))
    assert len(test) == math.ceil(fraction * len(strata))
    taken = Counter(strata[i] for i in test.tolist())
    for stratum, size in Counter(strata).items():
        assert abs(taken[stratum] - fraction * size) < 1
    assert torch.equal(test, hold_out(strata, fraction, seed)[1])


def test_another_seed_holds_out_others():
    assert not torch.equal(hold_out([0] * 50, 0.2, seed=0)[1], hold_out([0] * 50, 0.2, seed=1)[1])


def test_a_fraction_outside_0_to_1_is_refused():
    with pytest.raises(ValueError, match="between 0 and 1"):
        hold_out([0, 1], 1.0, seed=0)
