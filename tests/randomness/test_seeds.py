"""All randomness is a function of (seed, purpose, position)."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.contracts.strategy import seeded_model
from dure.randomness.seeds import (
    derive,
    generator,
    generators_state,
    restore_generators,
    seed_generators,
    shuffled,
)
from small import network, small_task

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


def test_the_state_of_all_generators_brings_their_draws_back():
    def draws() -> tuple[float, float, float]:
        return torch.rand(1).item(), float(numpy.random.rand()), random.random()

    seed_generators(3, "step", everything=True)
    before = generators_state()
    first = draws()
    restore_generators(before)
    assert draws() == first


class Cuda:
    """A process that uses CUDA, as far as generators can tell: two devices with a state each."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.states = [torch.tensor([0]), torch.tensor([0])]
        self.begun = True
        patch.setattr(torch.cuda, "is_initialized", lambda: self.begun)
        patch.setattr(torch.cuda, "device_count", lambda: len(self.states))
        patch.setattr(torch.cuda, "manual_seed_all", self.seed)
        patch.setattr(torch.cuda, "get_rng_state_all", lambda: list(self.states))
        patch.setattr(torch.cuda, "set_rng_state", self.set)

    def seed(self, seed: int) -> None:
        self.states = [torch.tensor([seed]) for _ in self.states]

    def set(self, state: Any, device: int) -> None:
        self.states[device] = state


def test_the_generators_of_gpus_are_seeded_too_where_they_are_used(monkeypatch):
    cuda = Cuda(monkeypatch)
    seed_generators(7, "step", 3, 1)
    assert [int(state) for state in cuda.states] == [derive(7, "step", 3, 1)] * 2
    before = generators_state()
    cuda.seed(5)
    restore_generators(before)
    assert [int(state) for state in cuda.states] == [derive(7, "step", 3, 1)] * 2
    cuda.begun = False
    seed_generators(8, "step")
    assert [int(state) for state in cuda.states] == [derive(7, "step", 3, 1)] * 2
    assert "cuda" not in generators_state()


def test_generators_of_gpus_that_one_side_lacks_stay_as_they_are(monkeypatch):
    without = generators_state()
    cuda = Cuda(monkeypatch)
    cuda.seed(5)
    restore_generators(without)
    restore_generators({**without, "cuda": [torch.tensor([6])]})
    assert [int(state) for state in cuda.states] == [6, 5]
    cuda.begun = False
    restore_generators({**without, "cuda": [torch.tensor([9])]})
    assert [int(state) for state in cuda.states] == [6, 5]


def test_a_model_function_that_is_the_first_to_use_cuda_draws_under_the_seed(monkeypatch):
    cuda = Cuda(monkeypatch)
    cuda.begun = False
    drawn: list[int] = []

    def model() -> torch.nn.Module:
        cuda.begun = True
        drawn.append(int(cuda.states[0]))
        return network()

    seeded_model(small_task(model=model), 4)
    assert drawn[-1] == derive(4, "model")
    drawn.clear()
    seeded_model(small_task(model=model), 4)
    assert drawn == [derive(4, "model")]
