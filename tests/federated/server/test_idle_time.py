"""Clients that wait for others of their round are idle: closed forms of the virtual clock."""

from __future__ import annotations

from typing import Any

import pytest

import dure
from dure.federated.server.idle_time import idle_seconds
from dure.protocol.carrier import STEP, AssignmentRecord
from small import small_task

SLOW = 10.0


def waits(strategy: Any, rounds: int = 3, **conditions: Any) -> tuple[list[dict[str, Any]], float]:
    """Return each client's seconds, and those of the run on the virtual clock."""
    world = dure.Simulated(devices=f"stragglers:0.3:{SLOW:g}", **conditions)
    run = dure.train(small_task(n=40), strategy, world, dure.Stop(rounds=rounds))
    workers = [one for one in run.summary["per_worker"] if one["name"].startswith("client")]
    return workers, run.history.series("virtual_seconds")[1][-1]


def busy(worker: dict[str, Any]) -> float:
    return float(worker["compute_seconds"] + worker["communication_seconds"])


@pytest.mark.parametrize(
    "strategy",
    [
        dure.FedAvg(clients=8, batch_size=5),
        dure.SplitFed(clients=8, batch_size=5),
        dure.ParallelSplit(clients=8, batch_size=5),
        dure.SplitLearning(clients=8, batch_size=5),
    ],
    ids=lambda one: one.name,
)
def test_whoever_takes_part_is_busy_or_idle_until_the_round_ends(strategy: Any) -> None:
    workers, whole = waits(strategy)
    for one in workers:
        assert busy(one) + one["idle_seconds"] == pytest.approx(whole)


def test_clients_wait_nine_tenths_of_a_round_for_one_that_is_ten_times_as_slow() -> None:
    workers, whole = waits(dure.FedAvg(clients=8, batch_size=5))
    slowest = max(map(busy, workers))
    assert slowest == pytest.approx(whole)
    shares = [one["idle_seconds"] / whole for one in workers]
    for one, share in zip(workers, shares, strict=True):
        assert share == pytest.approx(1 - busy(one) / slowest)
    assert {
        round(one["compute_seconds"] / min(w["compute_seconds"] for w in workers))
        for one in workers
    } == {1, 10}


def test_whoever_is_not_asked_waits_for_nobody() -> None:
    one_of_many = dure.FedAvg(clients=8, batch_size=5, fraction=0.125)  # one client a round
    workers, _ = waits(one_of_many)
    assert [one["idle_seconds"] for one in workers] == [0.0] * 8
    assert sum(1 for one in workers if busy(one)) <= 3


def test_without_rounds_nobody_waits() -> None:
    workers, _ = waits(dure.FedAsync(clients=8, batch_size=5), rounds=20)
    assert max(one["idle_seconds"] for one in workers) == 0


def flight(client: int, began: float, ended: float, outcome: str = "accepted") -> AssignmentRecord:
    # Three quarters of the time are computing, a quarter transfers.
    whole = ended - began
    return AssignmentRecord(client, 0, began, ended, outcome, 1, 1, whole / 4, whole * 3 / 4)


def test_the_idle_time_of_each_kind_of_assignment() -> None:
    flown = [
        flight(0, 10, 12),
        flight(1, 10, 20),
        flight(2, 11, 14, "late"),
        flight(3, 10, 12, "dropped out"),
        # A client that has told its loss before, and confirms a sum afterwards.
        flight(4, 9, 10, STEP),
        flight(4, 11, 13),
        flight(4, 20, 21, STEP),
        # A client that told its loss, and was not asked to train.
        flight(5, 9, 10, STEP),
    ]
    assert idle_seconds(flown, 22.0) == {0: 10.0, 1: 2.0, 4: 13.0 - 1 - 2 - 1}
    assert idle_seconds(flown[:2], None) == {0: 0.0, 1: 0.0}
