"""All randomness is a function of (seed, purpose, position)."""

from __future__ import annotations

import random

import numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.randomness.seeds import derive, generator, shuffled

SEEDS = st.integers(-(2**70), 2**70)
PURPOSES = st.sampled_from(["model", "shuffle", "step", "client", "partition", "sample clients"])
POSITIONS = st.lists(st.integers(0, 2**40), max_size=3)


@given(SEEDS, PURPOSES, POSITIONS)
def test_equal_arguments_give_equal_seeds_that_every_generator_takes(seed, purpose, position):
    derived = derive(seed, purpose, *position)
    assert derived == derive(seed, purpose, *position)
    assert 0 <= derived < 2**63
    torch.Generator().manual_seed(derived)
    numpy.random.default_rng(derived)


@given(st.lists(st.tuples(SEEDS, PURPOSES, POSITIONS.map(tuple)), min_size=2, unique=True))
def test_different_arguments_give_different_seeds(arguments):
    assert len({derive(seed, purpose, *position) for seed, purpose, position in arguments}) == len(
        arguments
    )


def test_seeds_are_the_same_on_every_machine_and_in_every_version():
    assert derive(0, "model") == 1977141789342320418
    assert derive(7, "step", 3, 1) == 7286875852640186397


@given(st.integers(1, 50), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_an_order_of_examples_is_a_permutation_that_nobody_s_draws_change(n, seed, epoch, client):
    order = shuffled(n, seed, epoch, client)
    assert sorted(order.tolist()) == list(range(n))
    torch.rand(3)
    random.random()
    assert torch.equal(order, shuffled(n, seed, epoch, client))


def test_epochs_clients_and_seeds_have_orders_of_their_own():
    orders = [shuffled(30, *position).tolist() for position in [(0, 0), (0, 1), (1, 0), (0, 0, 1)]]
    assert len({tuple(order) for order in orders}) == 4


def test_drawing_from_a_derived_generator_leaves_the_global_one_alone():
    before = torch.get_rng_state()
    torch.rand(5, generator=generator(0, "model"))
    shuffled(10, 0, 0)
    assert torch.equal(torch.get_rng_state(), before)
