"""Consensus ADMM: the centralised optimum on convex problems, residuals, duals, bytes, state."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rounds import Regular, run_on, watched
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.averaging.synchronisation import elements_in_message
from dure.collectives.algorithms import ring
from dure.contracts.fresh_model import seeded_model
from small import same_bits, small_task, weights_of

N, D = 23, 4


def least_squares(lr: float = 0.12) -> dure.Task:
    """23 examples, which 3 ranks cannot share evenly."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(N, D, generator=generator, dtype=torch.float64)
    targets = inputs.sum(dim=1, keepdim=True) + torch.randn(
        N, 1, generator=generator, dtype=torch.float64
    )
    return dure.Task(
        model=lambda: nn.Linear(D, 1, bias=False).double(),
        loss=F.mse_loss,
        train=(inputs, targets),
        optimizer=partial(torch.optim.SGD, lr=lr),
    )


def optimum(task: dure.Task) -> Tensor:
    return torch.linalg.lstsq(task.train.inputs, task.train.targets).solution.flatten()


@pytest.mark.parametrize(("rho", "adaptive"), [(1.0, False), (0.05, True)])
def test_both_residuals_vanish_and_the_consensus_is_the_optimum_of_all_data_whatever_rho(
    rho: float, adaptive: bool
) -> None:
    task = least_squares()
    run = run_on(task, dure.ADMM(None, rho=rho, adaptive=adaptive, local_steps=12), 3, rounds=80)
    numbers = run.summary["numbers"]
    assert numbers["primal_residual"] < 1e-6
    assert numbers["dual_residual"] < 1e-6
    assert (weights_of(run) - optimum(task)).abs().max() < 1e-6
    assert (numbers["rho"] != rho) == adaptive


def test_logistic_regression_agrees_on_the_point_where_the_joint_gradient_vanishes() -> None:
    def model() -> nn.Module:
        return nn.Linear(6, 3, bias=False).double()

    def regularised(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) + 0.05 * outputs.square().mean()

    task = small_task(
        model=model, loss=regularised, optimizer=partial(torch.optim.SGD, lr=1.0), n=40
    )
    run = run_on(task, dure.ADMM(None, rho=0.1, adaptive=False, local_steps=12), 2, rounds=110)
    regularised(run.model(task.train.inputs), task.train.targets).backward()  # type: ignore[no-untyped-call]
    assert (
        max(run.summary["numbers"]["primal_residual"], run.summary["numbers"]["dual_residual"])
        < 1e-8
    )
    assert run.model.weight.grad.abs().max() < 1e-8  # type: ignore[union-attr, operator]


def test_the_rule_by_hand_with_its_residuals_and_duals_that_add_to_nothing() -> None:
    def look(learner: Any) -> tuple[Tensor, ...]:
        return tuple(
            t.clone()
            for t in (learner.replica.flat.buffers[0], learner.duals[0], learner.z.buffers[0])
        )

    task, rho = least_squares(), 0.8
    ranks = watched(task, dure.ADMM(None, rho=rho, adaptive=False, local_steps=3), 3, 4, look)
    run = run_on(task, dure.ADMM(None, rho=rho, adaptive=False, local_steps=3), 3, rounds=4, seed=0)
    _, primal = run.history.series("primal_residual")
    _, dual = run.history.series("dual_residual")
    z = torch.cat([p.detach().reshape(-1) for p in seeded_model(task, 0).parameters()])
    x, u = [z.clone() for _ in range(3)], [torch.zeros_like(z) for _ in range(3)]
    parts = dure.IID().divide(3, task.train, 0)
    for round in range(4):
        for rank, part in enumerate(parts):
            inputs, targets = task.train.batch(part)
            for _ in range(3):
                gradient = 2 * inputs.T @ (inputs @ x[rank] - targets.flatten()) / N * 3
                x[rank] = x[rank] - 0.12 * (gradient + rho * (x[rank] - z + u[rank]))
        before, z = z, sum(x[i] + u[i] for i in range(3)) / 3  # type: ignore[assignment]
        u = [u[i] + x[i] - z for i in range(3)]
        for rank, seen in enumerate(ranks):
            for mine, theirs in zip(seen[round], (x[rank], u[rank], z), strict=True):
                assert (mine - theirs).abs().max() < 1e-12
        assert sum(seen[round][1] for seen in ranks).abs().max() < 1e-13
        assert math.isclose(
            primal[round],
            math.sqrt(sum(float((each - z).square().sum()) for each in x)),
            rel_tol=1e-6,
        )
        assert math.isclose(
            dual[round], rho * math.sqrt(3) * float((z - before).norm()), rel_tol=1e-9
        )


def test_without_duals_it_is_fed_prox_whose_ranks_do_not_agree() -> None:
    task, mu = least_squares(lr=0.1), 1.0
    run = run_on(
        task, dure.ADMM(None, rho=mu, adaptive=False, local_steps=120, duals=False), 2, rounds=12
    )
    z = seeded_model(task, 3).weight.detach().flatten()  # type: ignore[union-attr, operator]
    for _ in range(12):
        solved = []
        for part in dure.IID().divide(2, task.train, 3):
            inputs, targets = task.train.batch(part)
            normal = 2 * inputs.T @ inputs * 2 / N + mu * torch.eye(D, dtype=torch.float64)
            solved.append(
                torch.linalg.solve(normal, 2 * inputs.T @ targets.flatten() * 2 / N + mu * z)
            )
        z = sum(solved) / 2
    assert (weights_of(run) - z).abs().max() < 1e-9
    assert run.summary["numbers"]["primal_residual"] > 0.01
    assert (z - optimum(task)).abs().max() > 1e-4


def test_rho_doubles_and_halves_with_the_residuals_and_the_true_duals_stay() -> None:
    def look(learner: Any) -> tuple[float, Tensor]:
        return learner.rho, learner.duals[0] * learner.rho

    task = least_squares()
    (seen, _) = watched(task, dure.ADMM(None, rho=1e-3, local_steps=10), 2, 3, look)
    (fixed, _) = watched(
        task, dure.ADMM(None, rho=1e-3, adaptive=False, local_steps=10), 2, 1, look
    )
    assert seen[0][0] == 2e-3
    assert torch.allclose(seen[0][1], fixed[0][1], rtol=1e-12)
    run = run_on(task, dure.ADMM(None, rho=50.0, local_steps=10), 2, rounds=3)
    assert run.history.series("rho") == ([1, 2, 3], [50.0, 25.0, 12.5])


def test_the_consensus_is_what_is_evaluated_and_returned() -> None:
    task = small_task(n=40, model=Regular)
    seen = watched(task, dure.ADMM(20, local_steps=3), 2, 2, lambda learner: (
        learner.weights(), learner.evaluate(), learner.replica.model.state_dict()))  # fmt: skip
    for (z, metrics, x), (same, also, other) in zip(*seen, strict=True):
        assert all(torch.equal(z[name], same[name]) for name in z)
        assert metrics == also
        name = "body.0.weight"
        assert not torch.equal(x[name], other[name])
        assert torch.equal(z["body.1.running_mean"], x["body.1.running_mean"])


def test_a_round_sends_one_message_with_one_number_more() -> None:
    run = run_on(small_task(), dure.ADMM(8, local_epochs=2), 3, rounds=2)
    elements = elements_in_message(run.summary["parameters"], 3, numbers=1)
    for rank, worker in enumerate(run.summary["per_worker"]):
        assert worker["bytes_sent"] == 2 * 8 * ring.elements_sent(elements, 3, rank)
    assert [step.samples for step in run.history.steps] == [82, 164]


def test_what_was_counted_is_one_number_more_where_examples_count_unequally() -> None:
    task = small_task(loss=partial(F.cross_entropy, ignore_index=1))
    run = run_on(task, dure.ADMM(8), 2, rounds=2)
    elements = elements_in_message(run.summary["parameters"], 2, numbers=2)
    for rank, worker in enumerate(run.summary["per_worker"]):
        assert worker["bytes_sent"] == 2 * 8 * ring.elements_sent(elements, 2, rank)


@pytest.mark.parametrize("momentum", ["keep", "average", "reset"])
def test_a_resumed_run_has_the_bits_of_the_unbroken_one(momentum: Any, tmp_path: Path) -> None:
    task = small_task(n=40, model=Regular, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    strategy = dure.ADMM(20, rho=0.3, momentum=momentum)
    run_on(task, strategy, 2, rounds=2, out=tmp_path / "run")
    resumed = dure.resume(tmp_path / "run", task=task, stop=dure.Stop(rounds=5))
    whole = run_on(task, strategy, 2, rounds=5)
    assert same_bits(resumed, whole)
    assert [step.numbers for step in resumed.history.steps] == [
        step.numbers for step in whole.history.steps
    ]
    assert resumed.summary["numbers"] == whole.summary["numbers"]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"rho": 0.0}, "rho is 0.0"),
        ({"rho": float("nan")}, "rho is nan"),
        ({"local_epochs": 0}, "local_epochs is 0"),
        ({"local_steps": 0}, "local_steps is 0"),
        ({"momentum": "mix"}, "choose one of keep, average, reset"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work(
    settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        run_on(small_task(), dure.ADMM(**settings), 2, rounds=1)
