"""Weights as those that all began with and the factors of what each has added."""

from __future__ import annotations

import pytest
import torch
from clients_at_work import jobs_of, results, same, vectors, weights_of
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import nn

import dure
from dure.federated.engines import batched
from dure.federated.engines.batched import BatchedEngine, batched_engine
from dure.federated.engines.factored import Factored, which_pay
from dure.federated.engines.loop import LoopEngine
from dure.federated.engines.processes import ProcessesEngine
from dure.federated.engines.products import DeferredUpdate
from small import same_bits, small_task

LR = 0.3


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=4),
    st.data(),
)
def test_it_computes_with_the_weights_that_steps_would_have_made(clients, steps, data):
    """steps: how many clients are still at work, and rows."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    active = [clients, *sorted((min(clients, at_work) for at_work, _ in steps[1:]), reverse=True)]
    start, bias = numbers(5, 7), numbers(5)
    weights, biases = start.repeat(clients, 1, 1), bias.repeat(clients, 1)
    made = Factored(start, clients, sum(rows for _, rows in steps), LR)
    for at_work, (_, rows) in zip(active, steps, strict=True):
        x, g = numbers(at_work, rows, 7), numbers(at_work, rows, 5)
        own, own_biases = weights[:at_work], biases[:at_work]
        plain = torch.einsum("abn,amn->abm", x, own)
        torch.testing.assert_close(made.forward(x, None), plain)
        torch.testing.assert_close(made.forward(x, bias), plain + own_biases[:, None])
        torch.testing.assert_close(made.backward(g), torch.einsum("abm,amn->abn", g, own))
        made.step(g, x)
        own -= LR * torch.einsum("abm,abn->amn", g, x)
        own_biases -= LR * g.sum(1)
    left, right = made.factors()
    torch.testing.assert_close(-LR * left.transpose(1, 2) @ right, weights - start)
    torch.testing.assert_close(-LR * left.sum(1), biases - bias)


@pytest.mark.parametrize(
    ("rows", "shapes", "expected"),
    [
        (2, [(6, 6)], [True]),
        (4, [(6, 6)], [False]),
        (0, [(6, 6)], [False]),
        (1, [(9,), (9, 9, 2)], [False, False]),
        (5, [(6, 6), (6,), (60, 60)], [True, False, True]),
        (6, [(6, 6), (6,), (60, 60)], [False, False, True]),
        (29, [(6, 6), (6,), (60, 60)], [False, False, True]),
        (31, [(6, 6), (6,), (60, 60)], [False, False, False]),
    ],
)
def test_it_pays_while_the_factors_are_smaller(rows, shapes, expected):
    assert which_pay(rows, shapes) == expected


def wide() -> nn.Module:
    """All its weights are factored up to 5 rows, the second, of 40 units, and the first up to
    10."""
    return nn.Sequential(
        nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3)
    ).double()


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 30), nn.Linear(30, 3)
    ).double()


def engine(model=wide, sums: bool = True, **changes) -> BatchedEngine:
    task = small_task(n=60, model=model, **changes)
    made = batched_engine(task, task.model(), task.train, 4, 3, together=True, sums=sums)
    assert isinstance(made, BatchedEngine), made
    return made


def off(model, jobs, **changes) -> float:
    """The largest difference from the loop, of each and of the weighted sum, relative to the
    largest element."""
    task = small_task(n=60, model=model, **changes)
    expected = vectors(results(LoopEngine(task, task.model(), task.train, 4, 3), jobs))
    got = [results(engine(model, sums, **changes), jobs) for sums in (True, False)]
    assert all(isinstance(one.delta, DeferredUpdate) for one in got[0])
    worst = max((vectors(each) - expected).abs().max() for each in got)
    shares = [float(1 + at) for at in range(len(jobs))]
    summed = torch.zeros_like(expected[0])
    for products in {id(one.delta.products): one.delta.products for one in got[0]}.values():
        places = {
            one.delta.place: share
            for one, share in zip(got[0], shares, strict=True)
            if one.delta.products is products
        }
        summed += products.sum([places[place] for place in range(products.clients)])
    worst = max(worst, (summed - torch.tensor(shares, dtype=torch.float64) @ expected).abs().max())
    return float(worst / expected.abs().max())


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=6),
    st.integers(0, 5),
)
def test_clients_of_any_few_steps_are_those_of_the_loop(clients, first):
    jobs = jobs_of(*map(list, zip(*clients, strict=True)), weights_of(wide), first_step=first)
    assert off(wide, jobs) < 1e-12


def test_a_model_of_convolutions_too():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(60, 1, 2, 3, generator=generator, dtype=torch.float64)
    targets = torch.randint(3, (60,), generator=generator)
    jobs = jobs_of([9, 4, 7], [2, 1, 2], weights_of(convolutional))
    assert off(convolutional, jobs, train=(images, targets), test=None) < 1e-12


def test_many_rows_or_weights_of_their_own_are_not_factored():
    jobs = jobs_of([9, 4], [12, 12], weights_of(wide))
    assert not any(isinstance(one.delta, DeferredUpdate) for one in results(engine(), jobs))
    jobs = jobs_of([9, 4], [2, 2], weights_of(wide))
    apart = [replace(job, weights=weights_of(wide, seed=job.client)) for job in jobs]
    assert not any(isinstance(one.delta, DeferredUpdate) for one in results(engine(), apart))
    pulled = [replace(job, mu=0.1) for job in jobs]
    assert not any(isinstance(one.delta, DeferredUpdate) for one in results(engine(), pulled))


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_children_send_factors(chunk):
    jobs = jobs_of([9, 4, 1, 8, 7, 8], [3, 1, 2, 2, 3, 2], weights_of(wide))
    divided = [ProcessesEngine(engine(), wide(), workers, chunk) for workers in (1, 2)]
    try:
        one, two = (results(each, jobs) for each in divided)
        again = results(divided[1], jobs)
    finally:
        for each in divided:
            each.close()
    assert all(isinstance(each.delta, DeferredUpdate) for each in one)
    assert same(one, two)
    assert same(one, again)
    torch.testing.assert_close(
        vectors(one), vectors(results(engine(), jobs)), rtol=1e-12, atol=1e-14
    )


def test_children_send_updates_where_some_are_formed():
    jobs = [
        replace(job, mu=0.1 * (job.client == 1))
        for job in jobs_of([9, 4, 8], [3, 1, 2], weights_of(wide))
    ]
    divided = ProcessesEngine(engine(), wide(), 1, 3)
    try:
        got = results(divided, jobs)
    finally:
        divided.close()
    assert not any(isinstance(each.delta, DeferredUpdate) for each in got)
    torch.testing.assert_close(
        vectors(got), vectors(results(engine(), jobs)), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_resumed_run_divides_its_rounds_as_before(seed, tmp_path, monkeypatch):
    """By the first client of its first round, whoever comes first after the checkpoint."""
    monkeypatch.setattr(batched, "CACHE", 20_000)
    task, world = (
        small_task(n=200, model=wide),
        dure.Simulated(engine="batched-processes", processes=2),
    )
    strategy = dure.FedAvg(clients=20, fraction=0.5, batch_size=3, partition=dure.QuantitySkew(2.0))
    whole = dure.train(task, strategy, world, dure.Stop(rounds=3), seed=seed)
    dure.train(task, strategy, world, dure.Stop(rounds=1), seed=seed, out=tmp_path)
    assert same_bits(whole, dure.resume(tmp_path, task=task, stop=dure.Stop(rounds=3)))
