"""All randomness is a function of (seed, purpose, position)."""

from __future__ import annotations

import random

import numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.contracts.fresh_model import seeded_model
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


def states(device: str) -> list[torch.Tensor]:
    """The states of the generators of an accelerator's devices."""
    return [state.clone() for state in torch.get_device_module(device).get_rng_state_all()]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> list[bool]:
    return list(map(torch.equal, some, others))


def test_the_generators_of_devices_are_seeded_too_where_they_are_used(accelerator, monkeypatch):
    seed_generators(7, "step", 3, 1)
    drawn = torch.rand(3, device=accelerator).cpu()
    # The device draws by the CPU's rule.
    expected = torch.rand(3, generator=torch.Generator().manual_seed(derive(7, "step", 3, 1)))
    assert torch.equal(drawn, expected)
    before, stored = generators_state(), states(accelerator)
    torch.rand(5, device=accelerator)
    restore_generators(before)
    assert all(same(states(accelerator), stored))
    module = torch.get_device_module(accelerator)
    monkeypatch.setattr(module, "is_initialized", lambda: False)
    seed_generators(8, "step")
    assert all(same(states(accelerator), stored))
    assert accelerator not in generators_state()


def test_generators_of_devices_that_one_side_lacks_stay_as_they_are(accelerator):
    whole = generators_state()
    without = {name: state for name, state in whole.items() if name != accelerator}
    for device in range(4):
        torch.rand(1, device=f"{accelerator}:{device}")
    drawn = states(accelerator)
    restore_generators(without)
    assert all(same(states(accelerator), drawn))
    restore_generators({**without, accelerator: whole[accelerator][:1]})
    assert same(states(accelerator), drawn) == [False, True, True, True]


def test_a_model_function_that_is_the_first_to_use_a_device_draws_under_the_seed(
    accelerator, monkeypatch
):
    begun: list[bool] = []
    module = torch.get_device_module(accelerator)
    monkeypatch.setattr(module, "is_initialized", lambda: bool(begun))
    drawn: list[torch.Tensor] = []

    def model() -> torch.nn.Module:
        begun.append(True)
        drawn.append(torch.rand(1, device=accelerator).cpu())
        return network()

    seeded_model(small_task(model=model), 4)
    generator = torch.Generator().manual_seed(derive(4, "model"))
    assert torch.equal(drawn[-1], torch.rand(1, generator=generator))
    drawn.clear()
    seeded_model(small_task(model=model), 4)
    generator.manual_seed(derive(4, "model"))
    assert list(map(float, drawn)) == [float(torch.rand(1, generator=generator))]
