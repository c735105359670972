"""What a client does in a round."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from dure.data.batches import Batches
from dure.errors import LossNotFiniteError
from dure.federated.local import LocalTrainer, LocalWork
from dure.federated.messages import Assignment
from dure.flat import FlatParameters
from small import examples, network, small_task

SIZES = st.none() | st.integers(1, 30)


@given(st.integers(1, 20), SIZES, st.integers(1, 3), st.integers(0, 3), st.integers(0, 3))
def test_every_example_comes_exactly_once_a_local_epoch(n, batch_size, epochs, round, client):
    indices = torch.arange(n) * 3 + 1
    batches = list(LocalWork(epochs, None, batch_size).batches(indices, 0, round, client))
    per_epoch = len(batches) // epochs
    for epoch in range(epochs):
        seen = torch.cat(batches[epoch * per_epoch : (epoch + 1) * per_epoch])
        assert sorted(seen.tolist()) == indices.tolist()
    assert max(map(len, batches)) <= (n if batch_size is None else batch_size)


@given(st.integers(1, 20), SIZES, st.integers(1, 30), st.integers(1, 4))
def test_a_number_of_steps_goes_through_the_data_again_and_again_over_the_rounds(n, batch_size, steps, rounds):
    work = LocalWork(9, steps, batch_size)
    batches = [batch for round in range(rounds) for batch in work.batches(torch.arange(n), 0, round, 2)]
    assert len(batches) == rounds * steps
    size = n if batch_size is None else min(batch_size, n)
    per_epoch = -(-n // size)
    for start in range(0, rounds * steps - per_epoch + 1, per_epoch):
        assert sorted(torch.cat(batches[start : start + per_epoch]).tolist()) == list(range(n))


@given(st.integers(1, 20), SIZES, st.integers(1, 3), st.integers(1, 3))
def test_one_client_with_all_the_data_visits_them_as_a_lone_worker_does(n, batch_size, epochs, rounds):
    work, alone = LocalWork(epochs, None, batch_size), Batches(n, batch_size, seed=5)
    visited = [batch for round in range(rounds) for batch in work.batches(torch.arange(n), 5, round, 0)]
    assert all(torch.equal(batch, alone.at(step)) for step, batch in enumerate(visited))
    assert len(visited) == rounds * epochs * alone.steps_per_epoch


def test_rounds_and_clients_have_orders_of_their_own():
    work, indices = LocalWork(1, None, 30), torch.arange(30)
    orders = {tuple(next(work.batches(indices, 0, *who)).tolist()) for who in [(0, 0), (1, 0), (0, 1)]}
    assert len(orders) == 3


def trainer(work: LocalWork | None = None, model=network, **changes) -> tuple[LocalTrainer, list[torch.Tensor]]:
    """A trainer and weights to start from."""
    torch.manual_seed(0)
    task = small_task(model=model, **changes)
    made = LocalTrainer(task, model(), task.train, work or LocalWork(2, None, 4), seed=3)
    return made, FlatParameters(model()).copy()


def assignment(weights, round: int = 0, client: int = 0, buffers=()) -> Assignment:
    return Assignment(round, client, weights, buffers)


def test_an_update_is_what_plain_sgd_does_to_the_weights_received():
    local, weights = trainer()
    indices = torch.tensor([3, 5, 7, 11, 13, 17])
    update = local.train(assignment(weights, round=2, client=1), indices)
    model = network()
    flat = FlatParameters(model)
    flat.load(weights)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.3), []
    for batch in LocalWork(2, None, 4).batches(indices, 3, 2, 1):
        inputs, targets = examples().batch(batch)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), len(batch)))
    assert torch.equal(update.delta[0], flat.buffers[0] - weights[0])
    assert (update.round, update.client, update.examples, update.samples) == (2, 1, 6, 12)
    assert update.loss == pytest.approx(sum(loss * n for loss, n in losses) / 12)


@pytest.mark.parametrize("make", [partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.Adam])
def test_nothing_of_a_round_leaks_into_the_next_client_s(make):
    def train(clients):
        local, weights = trainer(optimizer=make)
        return [local.train(assignment(weights, client=c), torch.arange(c, 20)).delta[0] for c in clients]

    alone, after_others = train([2])[0], train([0, 1, 2])[2]
    assert torch.equal(alone, after_others)


def noisy() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)
    ).double()  # with buffers, and draws


def test_dropout_and_buffers_depend_on_the_client_and_the_round_alone():
    def train(visits):
        local, weights = trainer(model=noisy)
        buffers = list(noisy().buffers())
        result = {}
        for round, client in visits:
            torch.rand(client + 1)
            result[round, client] = local.train(assignment(weights, round, client, buffers), torch.arange(20))
        return result

    visits = [(0, 0), (0, 1), (1, 0)]
    first, second = train(visits), train(visits[::-1])
    for who in visits:
        assert torch.equal(first[who].delta[0], second[who].delta[0])
        assert all(map(torch.equal, first[who].buffers, second[who].buffers))
    assert not torch.equal(first[0, 0].delta[0], first[0, 1].delta[0])


def test_the_weights_received_are_not_changed():
    local, weights = trainer()
    before = weights[0].clone()
    local.train(assignment(weights), torch.arange(20))
    assert torch.equal(weights[0], before)


def test_a_loss_that_is_not_finite_names_client_round_and_local_step():
    def nan_at_third(outputs, targets):
        calls.append(1)
        return outputs.sum() * (float("nan") if len(calls) == 3 else 1.0)

    calls: list[int] = []
    local, weights = trainer(loss=nan_at_third)
    with pytest.raises(LossNotFiniteError, match="the loss is nan at round 5, local step 3 on client 9"):
        local.train(assignment(weights, round=4, client=9), torch.arange(20))
