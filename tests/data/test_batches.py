"""Which examples a step trains on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.data.batches import Batches, check_batch_size

SIZES = st.none() | st.integers(1, 40)


@given(st.integers(1, 30), SIZES, st.integers(0, 5), st.integers(0, 3))
def test_every_example_comes_exactly_once_an_epoch(n, batch_size, seed, epoch):
    batches = Batches(n, batch_size, seed)
    steps = range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch)
    parts = [batches.at(step) for step in steps]
    assert sorted(torch.cat(parts).tolist()) == list(range(n))
    size = n if batch_size is None else min(batch_size, n)
    assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert 1 <= len(parts[-1]) <= size


@given(st.integers(1, 30), SIZES, st.lists(st.integers(0, 200), min_size=1, max_size=5))
def test_a_batch_depends_on_its_step_and_not_on_the_steps_asked_before(n, batch_size, steps):
    asked = Batches(n, batch_size, seed=1)
    for step in steps:
        assert torch.equal(asked.at(step), Batches(n, batch_size, seed=1).at(step))


def test_a_full_batch_keeps_the_data_s_own_order():
    batches = Batches(5, None, seed=0)
    assert batches.at(0).tolist() == batches.at(7).tolist() == [0, 1, 2, 3, 4]


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [Batches(30, 30, seed).at(epoch).tolist() for seed, epoch in [(0, 0), (0, 1), (1, 0)]]
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.parametrize("size", [0, -3])
def test_a_batch_without_examples_is_refused(size):
    with pytest.raises(ValueError, match=f"batch_size is {size}, but it has to be 1 or more"):
        check_batch_size(size)


def test_one_example_or_all_will_do():
    check_batch_size(1)
    check_batch_size(None)
