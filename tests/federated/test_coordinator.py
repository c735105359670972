"""The server of a federation as a state machine."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.federated.coordinator import Coordinator, merged
from dure.federated.messages import Assignment, Update

SEEDS = st.integers(0, 1000)


def server(clients: int, fraction: float = 1.0, server_lr: float = 1.0, dtype=torch.float32) -> Coordinator:
    """Weights of 6 and 2 elements; a batch norm's buffers: mean, variance and the count of batches."""
    random = torch.Generator().manual_seed(0)
    weights = [torch.randn(n, generator=random).to(dtype) for n in (6, 2)]
    buffers = [torch.zeros(3, dtype=dtype), torch.tensor(5), torch.ones(3, dtype=dtype)]
    return Coordinator(weights, buffers, clients, fraction, seed=7, server_lr=server_lr)


def answer(assignment: Assignment, seed: int) -> Update:
    """A made-up update: of 1 to 50 examples, the numbers of batches seen drawn around 5."""
    random = torch.Generator().manual_seed(1000 * seed + assignment.client)
    examples = int(torch.randint(1, 51, (), generator=random))

    def noise(tensor):
        return torch.randn(tensor.shape, generator=random).to(tensor.dtype)

    delta = [noise(weight) for weight in assignment.weights]
    buffers = [
        noise(b) if b.is_floating_point() else torch.randint(0, 11, (), generator=random) for b in assignment.buffers
    ]
    return Update(assignment.round, assignment.client, examples, 2 * examples, float(examples % 7), delta, buffers)


def play(coordinator: Coordinator, order, seed: int = 0):
    """One round whose updates arrive in `order`, a permutation of the round's clients."""
    updates = [answer(assignment, seed) for assignment in coordinator.begin_round()]
    results = [coordinator.receive(updates[i]) for i in order(len(updates))]
    assert results[:-1] == [None] * (len(updates) - 1)
    return results[-1], updates


@given(st.integers(1, 8), st.randoms(use_true_random=False), SEEDS)
def test_the_order_of_arrival_does_not_change_a_bit(clients, random, seed):
    def shuffled(n):
        order = list(range(n))
        random.shuffle(order)
        return order

    in_order, as_they_come = server(clients), server(clients)
    for _ in range(2):
        first, _ = play(in_order, range, seed)
        second, _ = play(as_they_come, shuffled, seed)
        assert first == second
        for a, b in zip(in_order.weights + in_order.buffers, as_they_come.weights + as_they_come.buffers, strict=True):
            assert torch.equal(a, b)


@given(st.integers(1, 8), SEEDS, st.floats(0.1, 3.0))
def test_the_new_model_is_the_mean_update_weighted_by_examples(clients, seed, server_lr):
    coordinator = server(clients, server_lr=server_lr, dtype=torch.float64)
    before = [weight.clone() for weight in coordinator.weights]
    result, updates = play(coordinator, range, seed)
    total = sum(update.examples for update in updates)
    for part, start in enumerate(before):
        for element in range(len(start)):
            mean = sum(u.examples * float(u.delta[part][element]) for u in updates) / total
            expected = float(start[element]) + server_lr * mean
            assert float(coordinator.weights[part][element]) == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert result.samples == 2 * total
    assert result.loss == pytest.approx(sum(u.loss * u.samples for u in updates) / (2 * total))
    assert result.clients == list(range(clients))
    assert coordinator.round == 1


def test_floating_point_buffers_are_averaged_and_counters_take_the_largest():
    coordinator = server(3, server_lr=0.5)
    _, updates = play(coordinator, range)
    total = sum(update.examples for update in updates)
    mean = sum(u.examples * u.buffers[0] for u in updates) / total
    assert torch.allclose(coordinator.buffers[0], mean)
    assert torch.allclose(coordinator.buffers[2], sum(u.examples * u.buffers[2] for u in updates) / total)
    assert int(coordinator.buffers[1]) == max(5, *(int(u.buffers[1]) for u in updates))
    assert [b.dtype for b in coordinator.buffers] == [torch.float32, torch.int64, torch.float32]


def test_merged_buffers_stand_in_the_model_s_order():
    buffers = [torch.tensor(1), torch.tensor(0.5), torch.tensor(True), torch.tensor(0.25)]
    new = merged(buffers, [torch.tensor(5.0), torch.tensor(6.0)], [torch.tensor(7), torch.tensor(False)])
    assert [b.item() for b in new] == [7, 5.0, False, 6.0]


def test_an_assignment_holds_the_global_model_and_says_its_bytes():
    coordinator = server(4, fraction=0.5)
    assignments = coordinator.begin_round()
    assert len(assignments) == 2
    for assignment in assignments:
        assert assignment.round == 0
        assert assignment.weights is coordinator.weights
        assert assignment.nbytes == 8 * 4 + (3 + 3) * 4 + 8
        assert answer(assignment, 0).nbytes == assignment.nbytes


def test_what_was_handed_out_stays_as_it_was_when_the_model_moves_on():
    coordinator = server(2)
    assignments = coordinator.begin_round()
    before = [weight.clone() for weight in assignments[0].weights]
    for assignment in assignments:
        coordinator.receive(answer(assignment, 0))
    assert all(map(torch.equal, assignments[0].weights, before))
    assert not torch.equal(coordinator.weights[0], before[0])


def test_an_update_that_was_not_asked_for_is_refused():
    coordinator = server(4, fraction=0.5)
    with pytest.raises(ValueError, match="was not asked for an update"):
        coordinator.receive(Update(0, 0, 1, 1, 0.0, coordinator.weights, coordinator.buffers))
    first, second = coordinator.begin_round()
    stranger = next(c for c in range(4) if c not in (first.client, second.client))
    update = answer(first, 0)
    with pytest.raises(ValueError, match=f"client {stranger} was not asked"):
        coordinator.receive(dataclasses.replace(update, client=stranger))
    with pytest.raises(ValueError, match=f"client {first.client} sent an update of round 1 in round 0"):
        coordinator.receive(dataclasses.replace(update, round=1))
    assert coordinator.receive(update) is None
    with pytest.raises(ValueError, match="has sent it already"):
        coordinator.receive(update)
    assert coordinator.receive(answer(second, 0)) is not None
    with pytest.raises(ValueError, match="sent an update of round 0 in round 1"):
        coordinator.receive(update)


def test_an_early_update_that_comes_twice_is_refused():
    coordinator = server(2)
    _, late = coordinator.begin_round()
    coordinator.receive(answer(late, 0))
    with pytest.raises(ValueError, match="has sent it already"):
        coordinator.receive(answer(late, 0))
