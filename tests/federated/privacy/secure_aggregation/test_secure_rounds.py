"""Rounds of secure sums: the model is the mean of the quantised updates of those in the sum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dure
from dure.contracts.world import RankContext
from dure.federated.aggregate.aggregator import Aggregator, Collects
from dure.federated.aggregate.geometric_median import GeometricMedian
from dure.federated.aggregate.median import Median
from dure.federated.aggregate.rows import UpdateRows
from dure.federated.privacy.secure_aggregation.contribution import Contribution
from dure.federated.server.combining import SummedUpdates
from dure.federated.server.server import FederatedServer
from dure.randomness.seeds import RoundSeed
from small import same_bits, small_task


def with_batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)
    ).double()


class Vectors:
    """The vectors of clients before they are masked, and what they were made by."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.of: dict[int, Tensor] = {}
        self.by: Contribution | None = None
        encode = Contribution.encode

        def recorded(how: Contribution, update: Any, *rest: Any) -> Tensor:
            made = encode(how, update, *rest)
            self.by = how
            self.of[update.client] = made.clone()
            return made

        patch.setattr(Contribution, "encode", recorded)

    def total(self, clients: list[int]) -> Tensor:
        """Their sum modulo 2^32."""
        whole = sum(self.of[client].long() for client in clients)
        assert isinstance(whole, Tensor)
        return ((whole + 2**31) % 2**32 - 2**31).int()


@pytest.mark.parametrize("drop_out", [0.0, 0.3])
@pytest.mark.parametrize(
    "name", ["secure-aggregation", "secure-aggregation-plus:0.7:1:1000:3:0:0.4"]
)
def test_the_model_moves_by_the_mean_of_the_quantised_updates(
    name: str, drop_out: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = Vectors(monkeypatch)
    strategy = dure.FedAvg(clients=12, privacy=name, partition="quantity-skew:5")
    summed: list[list[int]] = []

    def program(context: RankContext) -> None:
        server = strategy.learner(small_task(n=120, model=with_batch_norm), context, 0)
        assert isinstance(server, FederatedServer)
        coordinator = server.coordinator
        fold = coordinator.fold_sum

        def noted(one: SummedUpdates) -> None:
            summed.append([coordinator.assignment(ticket).client for ticket in one.tickets])
            fold(one)

        monkeypatch.setattr(coordinator, "fold_sum", noted)
        for round in range(4):
            asked = _Asked(coordinator.model.weights, coordinator.model.buffers)
            before = len(summed)
            server.advance(0)
            expected = asked.weights
            if len(summed) > before:
                clients = summed[-1]
                assert vectors.by is not None
                total = vectors.by.decode(vectors.total(clients), len(clients), asked, ())
                expected = [w + d for w, d in zip(asked.weights, total.delta, strict=True)]
            assert all(map(torch.equal, expected, coordinator.model.weights)), round

    dure.Simulated(drop_out=drop_out).run(program, lambda event: None)
    assert summed
    assert drop_out == 0 or any(len(clients) < 12 for clients in summed)


class _Asked:
    """As much of an assignment as decoding wants."""

    def __init__(self, weights: Any, buffers: Any) -> None:
        self.weights = weights
        self.buffers = buffers


@pytest.mark.parametrize(
    "strategy",
    [
        dure.FedAvg(clients=6, local_steps=3),
        dure.FedProx(clients=6, mu=0.1),
        dure.Scaffold(clients=6, fraction=0.5),
        dure.FedAdam(clients=6, server_lr=0.01),
        dure.FedPer(clients=6, held_out=0.0),
        dure.Ditto(clients=6, held_out=0.0),
    ],
    ids=lambda one: one.name,
)
def test_it_differs_from_what_is_not_secure_by_rounding_alone(strategy: Any) -> None:
    task = small_task() if strategy.name == "scaffold" else small_task(model=with_batch_norm)
    secure = replace(strategy, privacy=dure.SecureAggregation(range=4.0, most_examples=100))
    plain = dure.train(task, strategy, stop=dure.Stop(rounds=3))
    summed = dure.train(task, secure, stop=dure.Stop(rounds=3))
    for one, other in zip(plain.model.parameters(), summed.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)
    assert summed.history.steps[-1].loss == pytest.approx(plain.history.steps[-1].loss, abs=1e-3)
    assert summed.history.steps[-1].samples == plain.history.steps[-1].samples


def test_updates_that_weigh_alike_are_as_fine_as_others() -> None:
    # A weight of 1 of up to 10^6 would leave a range of a million steps a few hundred.
    secure = dure.SecureAggregation(range=4.0, most_examples=10**6)
    plain = dure.train(small_task(), dure.Scaffold(clients=6), stop=dure.Stop(rounds=3))
    run = dure.train(
        small_task(), dure.Scaffold(clients=6, privacy=secure), stop=dure.Stop(rounds=3)
    )
    for one, other in zip(plain.model.parameters(), run.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


def test_the_same_seed_gives_the_same_bits_also_after_a_resume(tmp_path: Any) -> None:
    strategy = dure.FedAvg(clients=6, privacy="secure-aggregation")
    world = dure.Simulated(drop_out=0.1)
    task = small_task()
    once = dure.train(task, strategy, world, dure.Stop(rounds=4))
    assert same_bits(once, dure.train(task, strategy, world, dure.Stop(rounds=4)))
    dure.train(task, strategy, world, dure.Stop(rounds=2), out=tmp_path / "run")
    again = dure.resume(tmp_path / "run", task=task, stop=dure.Stop(rounds=4))
    assert same_bits(once, again)


@pytest.mark.parametrize(
    ("rule", "groups"), [("bucketing:3/median", 4), ("geometric-median-of-means:3", 3)]
)
def test_rules_get_the_means_of_random_groups(rule: str, groups: int) -> None:
    strategy = dure.FedAvg(clients=12, aggregate=rule, privacy="secure-aggregation")
    seen = []

    def program(context: RankContext) -> None:
        server = strategy.learner(small_task(), context, 0)
        assert isinstance(server, FederatedServer)
        fold = server.coordinator.fold_sum
        server.coordinator.fold_sum = lambda one: (seen.append(one), fold(one))[1]  # type: ignore
        server.advance(0)
        server.advance(0)

    dure.Simulated().run(program, lambda event: None)
    assert len(seen) == 2 * groups
    first, second = seen[:groups], seen[groups:]
    for turn in (first, second):
        clients = [ticket % 12 for one in turn for ticket in one.tickets]
        assert sorted(clients) == list(range(12))
    assert {frozenset(t % 12 for t in one.tickets) for one in first} != {
        frozenset(t % 12 for t in one.tickets) for one in second
    }


@pytest.mark.parametrize(
    ("rule", "inner"),
    [("bucketing:3/median", Median()), ("geometric-median-of-means:3", GeometricMedian())],
)
def test_the_rule_is_that_of_the_groups_means_to_the_bit(
    rule: str, inner: Aggregator, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = dure.FedAvg(clients=12, aggregate=rule, privacy="secure-aggregation")
    seen: list[SummedUpdates] = []

    def program(context: RankContext) -> None:
        server = strategy.learner(small_task(), context, 0)
        assert isinstance(server, FederatedServer)
        fold = server.coordinator.fold_sum

        def noted(one: SummedUpdates) -> None:
            seen.append(one)
            fold(one)

        monkeypatch.setattr(server.coordinator, "fold_sum", noted)
        before = server.coordinator.model.weights
        server.advance(0)
        rows = UpdateRows(
            [list(one.delta) for one in seen], [one.weight for one in seen], measured=1
        )
        assert isinstance(inner, Collects)
        combined, _ = inner.combine(rows, RoundSeed(0, 0))
        expected = [w + d for w, d in zip(before, combined, strict=True)]
        assert all(map(torch.equal, expected, server.coordinator.model.weights))

    dure.Simulated().run(program, lambda event: None)
    assert len(seen) > 2


def test_a_group_without_a_sum_is_refused_and_the_others_count() -> None:
    strategy = dure.FedAvg(clients=30, aggregate="bucketing:3/mean", privacy="secure-aggregation")
    run = dure.train(small_task(), strategy, dure.Simulated(drop_out=0.4), dure.Stop(rounds=3))
    steps = run.history.steps
    assert any(0 < step.numbers["refused"] < 30 for step in steps)
    assert any(step.numbers["updates"] > 0 for step in steps)


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (lambda p: dure.FedAvg(aggregate="krum:1", privacy=p), "krum:1 needs single updates"),
        (lambda p: dure.FedBuff(privacy=p), "use a system with rounds"),
        (lambda p: dure.FedAsync(privacy=p), "use a system with rounds"),
        (lambda p: dure.FedAvg(held_out=0.2, privacy=p), "leave held_out and fine_tune out"),
        (lambda p: dure.FedAvg(selection="weighted", privacy=p), "use uniform"),
        (lambda p: dure.FedAvg(clients=2, privacy=p), "has 2 clients"),
        (lambda p: dure.FedAvg(clients=10, fraction=0.2, privacy=p), "has 2 clients"),
        (lambda p: dure.FedAvg(aggregate="bucketing:2/median", privacy=p), "smallest group"),
    ],
)
def test_what_needs_single_updates_is_refused_in_one_line(strategy: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        dure.train(small_task(), strategy("secure-aggregation"), stop=dure.Stop(rounds=1))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "conditions", [{"arrival": "arriving:0.1:3600"}, {"transfer_budget": "100MB"}]
)
def test_conditions_that_would_have_clients_say_more_are_refused(conditions: Any) -> None:
    strategy = dure.FedAvg(privacy="secure-aggregation")
    with pytest.raises(ValueError, match="leave"):
        dure.train(small_task(), strategy, dure.Simulated(**conditions), dure.Stop(rounds=1))


def test_values_beyond_the_range_are_counted() -> None:
    strategy = dure.FedAvg(clients=4, privacy=dure.SecureAggregation(range=1e-4))
    run = dure.train(small_task(), strategy, stop=dure.Stop(rounds=1))
    assert run.history.steps[-1].numbers["cut"] > 0
    wide = dure.FedAvg(clients=4, privacy=dure.SecureAggregation(range=10.0))
    assert (
        dure.train(small_task(), wide, stop=dure.Stop(rounds=1)).history.steps[-1].numbers["cut"]
        == 0
    )


def test_bytes_are_those_of_plain_updates_and_of_the_protocol() -> None:
    task = dure.load_task("digits")
    both = [
        dure.train(task, dure.FedAvg(clients=10, privacy=privacy), stop=dure.Stop(rounds=1))
        for privacy in ("none", "secure-aggregation")
    ]
    plain, summed = (run.summary["bytes_received"] for run in both)
    assert plain < summed < 1.02 * plain
