"""Updates that are products: each of them, and their sum without any."""

from __future__ import annotations

import pytest
import torch
from clients_at_work import jobs_of, results, vectors, weights_of
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import dure
from dure.federated.aggregate import Median
from dure.federated.engines.batched import BatchedEngine, batched_engine, windows
from dure.federated.engines.products import DeferredUpdate, Factors, UpdateProducts
from dure.federated.server.global_model import GlobalModel
from dure.protocol.messages import Update
from small import largest_difference, small_task


def drawn(clients: int, seed: int, scale: float = 1.0) -> UpdateProducts:
    """Of a model with a matrix and its bias, a vector, and another matrix."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(clients, *shape, generator=generator, dtype=torch.float64) * scale

    first, last = (
        Factors(numbers(3, 5), numbers(3, 4), True),
        Factors(numbers(2, 2), numbers(2, 5), False),
    )
    return UpdateProducts([first, numbers(5), last], 0.3)


@given(st.integers(1, 6), st.integers(0, 9), st.data())
def test_the_sum_is_that_of_the_updates(clients, seed, data):
    products = drawn(clients, seed)
    weights = data.draw(st.lists(st.floats(0, 9), min_size=clients, max_size=clients))
    each = torch.stack([products.one(place) for place in range(clients)])
    first = products.parts[0]
    assert isinstance(first, Factors)
    torch.testing.assert_close(each[:, 20:25], -0.3 * first.left.sum(1))
    torch.testing.assert_close(products.all(), each, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(
        products.sum(weights),
        torch.tensor(weights, dtype=torch.float64) @ each,
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e200])
@pytest.mark.parametrize("part", [0, 1])
def test_what_may_overflow_is_not_bounded(value, part):
    products = drawn(4, 0)
    assert products.bounded()
    one = products.parts[part]
    (one if isinstance(one, torch.Tensor) else one[0]).view(-1)[3] = value
    assert not products.bounded()


def updates(products: UpdateProducts) -> list[Update]:
    like = products.one(0)
    return [
        Update(
            place, place, 0, 1 + place, 1 + place, 0.5, DeferredUpdate(products, place, like), []
        )
        for place in range(products.clients)
    ]


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 20))
def test_a_mean_of_cohorts_is_the_mean_of_their_updates(first, second, left_out):
    cohorts = [drawn(first, 1), drawn(second, 2)]
    model, plainly = (GlobalModel([torch.zeros_like(cohorts[0].one(0))], []) for _ in range(2))
    for at, update in enumerate(update for cohort in cohorts for update in updates(cohort)):
        if at != left_out:  # as one that was refused
            model.fold(update, 1.0, float(update.examples))
            plainly.fold(replace(update, delta=list(update.delta)), 1.0, float(update.examples))
    model.finish(0), plainly.finish(0)
    torch.testing.assert_close(model.weights, plainly.weights, rtol=1e-12, atol=1e-12)


def test_who_needs_single_updates_gets_them():
    products = drawn(5, 3)
    model = GlobalModel([torch.zeros_like(products.one(0))], [], Median())
    for update in updates(products):
        model.fold(update, 1.0, 1.0)
    model.finish(0)
    torch.testing.assert_close(model.weights[0], products.all().median(0).values)


def test_only_single_steps_of_those_who_share_their_weights_are_kept_as_products():
    task = small_task(n=60)
    made = batched_engine(task, task.model(), task.train, 4, 3, together=True, sums=True)
    assert isinstance(made, BatchedEngine)
    shared = weights_of()
    jobs = jobs_of([4, 4, 9, 2], [1, 1, 3, 1], shared)
    assert [isinstance(one.delta, DeferredUpdate) for one in results(made, jobs)] == [
        True,
        True,
        False,
        True,
    ]
    apart = [replace(job, weights=weights_of(seed=job.client)) for job in jobs]
    assert not any(isinstance(one.delta, DeferredUpdate) for one in results(made, apart))
    moved = [replace(job, mu=0.1) for job in jobs]
    assert not any(isinstance(one.delta, DeferredUpdate) for one in results(made, moved))
    made.sums = False
    formed = results(made, jobs)
    assert not any(isinstance(one.delta, DeferredUpdate) for one in formed)
    torch.testing.assert_close(
        vectors(formed), vectors(results(made, jobs)), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize(("rows", "most"), [(1, 256), (20, 155), (60, 64), (60_000, 64)])
def test_what_is_kept_is_no_more_than_a_cohort_of_weights(rows, most):
    """64-80-40 in float64 has 8,440 elements; with few rows the factors are less."""
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 80), torch.nn.ReLU(), torch.nn.Linear(80, 40)
    ).double()
    data = dure.Examples(torch.zeros(4, 64, dtype=torch.float64), torch.zeros(4, dtype=torch.int64))
    task = small_task(model=lambda: model, train=data, test=None)
    made = batched_engine(task, model, task.train, None, 3, together=True, sums=True)
    assert isinstance(made, BatchedEngine)
    made.room = 97 * 8_440 * 8
    weights = weights_of(lambda: model)
    jobs = [
        replace(job, indices=torch.zeros(rows, dtype=torch.int64))
        for job in jobs_of([4] * 300, [1] * 300, weights)
    ]
    assert len(next(windows(jobs, made._classifier(shared=True)))[0]) == most


def test_convolutions_are_formed_a_cohort_at_a_time():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(8, 3)
    ).double()
    data = dure.Examples(
        torch.randn(20, 1, 4, 4, dtype=torch.float64), torch.zeros(20, dtype=torch.int64)
    )
    task = small_task(model=lambda: model, train=data, test=None)
    made = batched_engine(task, model, task.train, None, 3, together=True, sums=True)
    assert isinstance(made, BatchedEngine)
    jobs = jobs_of([4] * 5, [1] * 5, weights_of(lambda: model))
    assert not any(isinstance(one.delta, DeferredUpdate) for one in results(made, jobs))


def spoiled(value: float) -> BatchedEngine:
    """For clients of 4 examples each, of which client 2 has one with a number like that."""
    data = small_task(n=60).train
    inputs = data.inputs.clone()
    inputs[9, 0] = value
    task = small_task(
        n=60, train=(inputs, data.targets), model=lambda: torch.nn.Linear(6, 3).double()
    )
    made = batched_engine(task, task.model(), task.train, 4, 3, together=True, sums=True)
    assert isinstance(made, BatchedEngine)
    return made


def test_a_client_whose_update_is_not_finite_fails_alone():
    jobs = jobs_of([4] * 4, [1] * 4, weights_of(lambda: torch.nn.Linear(6, 3).double()))
    found = results(spoiled(float("inf")), jobs)
    assert [each.failure is None for each in found] == [True, True, False, True]
    assert vectors([each for each in found if each.failure is None]).isfinite().all()


def test_large_updates_are_formed_and_looked_at():
    jobs = jobs_of([4] * 4, [1] * 4, weights_of(lambda: torch.nn.Linear(6, 3).double()))
    done = results(spoiled(1e200), jobs)
    assert not any(isinstance(one.delta, DeferredUpdate) for one in done)
    assert vectors(done).isfinite().all()


@pytest.mark.parametrize(
    "strategy", [dure.FedSGD(clients=6, fraction=0.7), dure.FedAvg(clients=6, batch_size=None)]
)
def test_a_run_is_that_of_the_loop(strategy):
    task = small_task(n=60)
    one, other = (
        dure.train(task, strategy, dure.Simulated(engine=engine), dure.Stop(rounds=3), seed=4)
        for engine in ("batched", "loop")
    )
    assert largest_difference(one, other) < 1e-12
