"""DiLoCo: its special cases, its outer optimizer against torch's, its state."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rounds import Regular, alone, hashed, run_on, watched
from torch import Tensor

import dure
from dure.averaging.synchronisation import elements_in_message
from dure.collectives.algorithms import ring
from dure.contracts.fresh_model import seeded_model
from small import largest_difference, same_bits, small_task, weights_of

ADAMW = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1)


@pytest.mark.parametrize("ranks", [1, 3])
def test_one_step_and_plain_averaging_are_synchronous_sgd(ranks: int) -> None:
    strategy = dure.DiLoCo(8, period=1, outer_lr=1.0, outer_momentum=0.0)
    many = run_on(small_task(), strategy, ranks, rounds=13)
    assert largest_difference(many, alone(small_task(), 8, steps=13)) < 1e-12


def test_plain_averaging_is_local_sgd_whatever_the_inner_optimizer() -> None:
    task = small_task(optimizer=ADAMW)
    outer = run_on(task, dure.DiLoCo(8, 5, outer_lr=1.0, outer_momentum=0.0), 3, rounds=4)
    assert largest_difference(outer, run_on(task, dure.LocalSGD(8, 5), 3, rounds=4)) < 1e-12


def test_an_outer_learning_rate_of_nothing_changes_nothing() -> None:
    run = run_on(small_task(), dure.DiLoCo(8, 5, outer_lr=0.0), 2, rounds=2)
    assert torch.equal(
        weights_of(run),
        torch.cat([p.reshape(-1) for p in seeded_model(small_task(), 3).parameters()]),
    )


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_outer_optimizer_is_torchs_on_the_mean_of_the_ways_back(nesterov: bool) -> None:

    def look(learner: Any) -> tuple[Tensor, Tensor]:
        return learner.common[0].clone(), learner.synchronisation.bodies[0].clone()

    strategy = dure.DiLoCo(8, 3, outer_lr=0.7, outer_momentum=0.9, nesterov=nesterov)
    (seen, _) = watched(small_task(), strategy, 2, 5, look)
    common = torch.nn.Parameter(
        torch.cat([p.reshape(-1) for p in seeded_model(small_task(), 0).parameters()])
    )
    outer = torch.optim.SGD([common], lr=0.7, momentum=0.9, nesterov=nesterov)
    for after, difference in seen:
        common.grad = -difference
        outer.step()
        assert (common - after).abs().max() < 1e-14


def test_replicas_hash_alike_and_inner_optimizers_do_not() -> None:
    def look(learner: Any) -> tuple[str, str]:
        inner = learner.replica.optimizer.state
        return hashed(learner.common + learner.velocity), hashed(
            [inner[p]["exp_avg"] for p in learner.replica.trained]
        )

    one, other = watched(small_task(optimizer=ADAMW), dure.DiLoCo(8, 3), 2, 3, look)
    assert [outer for outer, _ in one] == [outer for outer, _ in other]
    assert all(mine != theirs for (_, mine), (_, theirs) in zip(one, other, strict=True))


def test_a_run_sends_a_message_a_round_and_nothing_for_the_outer_optimizer() -> None:
    run = run_on(small_task(optimizer=ADAMW), dure.DiLoCo(8, 50), 2, rounds=2)
    sent = 8 * ring.elements_sent(elements_in_message(run.summary["parameters"], 2), 2, 0)
    assert [worker["bytes_sent"] for worker in run.summary["per_worker"]] == [2 * sent, 2 * sent]


def test_a_resumed_run_has_the_bits_of_the_unbroken_one(tmp_path: Path) -> None:
    task, strategy = small_task(n=40, model=Regular, optimizer=ADAMW), dure.DiLoCo(20, 3)
    run_on(task, strategy, 2, rounds=3, out=tmp_path / "run")
    resumed = dure.resume(tmp_path / "run", task=task, stop=dure.Stop(rounds=6))
    assert same_bits(resumed, run_on(task, strategy, 2, rounds=6))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"outer_lr": -0.1}, "outer_lr is -0.1"),
        ({"outer_lr": float("nan")}, "outer_lr is nan"),
        ({"outer_momentum": 1.0}, "outer_momentum is 1.0"),
        ({"period": 0}, "period is 0"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work(
    settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        run_on(small_task(), dure.DiLoCo(**settings), 2, rounds=1)
