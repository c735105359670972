"""DP-SGD at work: batches, noise, the account, and what a run does with them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import torch
import torch.nn.functional as F
from dp_accounting.pld import pld_privacy_accountant
from torch import Tensor, nn

import dure
from dure.contracts.fresh_model import seeded_model
from dure.privacy.dp_sgd import DPSGD, parse_dp_sgd
from dure.privacy.example_level import noised_mean
from dure.privacy.poisson import PoissonBatches
from dure.privacy.step_count import FILE, StepCount
from dure.randomness.secret import Secret


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def data(n: int = 40) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    inputs = torch.randn(n, 6, dtype=torch.float64, generator=draws)
    return inputs, torch.randint(0, 3, (n,), generator=draws)


def task_of(model: Callable[[], nn.Module] = net, **given: Any) -> dure.Task:
    sgd = partial(torch.optim.SGD, lr=0.3, momentum=0.9)
    return dure.Task(model=model, loss=F.cross_entropy, train=data(), optimizer=sgd, **given)


def apart(one: dure.Run, other: dure.Run) -> float:
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


# Batches


def test_every_example_has_its_own_coin_in_every_step() -> None:
    batches = PoissonBatches(1_000, 50, Secret.simulated(0))
    drawn = [batches.at(step) for step in range(400)]
    sizes = torch.tensor([float(len(one)) for one in drawn])
    # Binomial(1000, 0.05): mean 50, deviation 6.9; of 400 the mean has a deviation of 0.34.
    assert abs(float(sizes.mean()) - 50) < 1.7
    assert 5.9 < float(sizes.std()) < 7.9
    times = torch.bincount(torch.cat(drawn), minlength=1_000).double()
    # Binomial(400, 0.05) for each example.
    assert abs(float(times.var()) / (400 * 0.05 * 0.95) - 1) < 0.3
    assert all(bool((one.diff() > 0).all()) for one in drawn)


def test_batches_of_a_secret_are_the_same_when_they_are_asked_for_again() -> None:
    secret = Secret.shared(Secret.system().key("root"))
    batches = PoissonBatches(100, 10, secret)
    others = PoissonBatches(100, 10, Secret.shared(Secret.system().key("root")))
    assert torch.equal(batches.at(3), batches.at(3))
    assert any(not torch.equal(batches.at(step), others.at(step)) for step in range(5))


@pytest.mark.parametrize("batch_size", [None, 100, 1_000])
def test_a_batch_of_all_has_all(batch_size: int | None) -> None:
    batches = PoissonBatches(100, batch_size, Secret.simulated(0))
    assert batches.rate == 1
    assert batches.at(7).tolist() == list(range(100))


# Noise


def test_noise_has_its_deviation_and_the_expected_batch_divides() -> None:
    sums = [torch.full((100, 200), 7.0), torch.full((5_000,), -3.0, dtype=torch.float64)]
    found = noised_mean(sums, DPSGD(2.0, 1.5), 64, Secret.system(), 0)
    for one, total in zip(found, sums, strict=True):
        assert one.dtype == total.dtype
        noise = (one.double() * 64 - total.double()).flatten()
        # 2 · 1.5; the deviation of an estimate from n numbers is 1/sqrt(2n) of it.
        assert abs(float(noise.std()) / 3.0 - 1) < 5 / math.sqrt(2 * len(noise))
        assert abs(float(noise.mean())) < 5 * 3.0 / math.sqrt(len(noise))


def test_no_step_has_the_noise_of_another_and_no_element_that_of_another() -> None:
    secret = Secret.simulated(0)
    zeros = [torch.zeros(50), torch.zeros(50)]
    first = noised_mean(zeros, DPSGD(1.0, 1.0), 1, secret, 0)
    second = noised_mean(zeros, DPSGD(1.0, 1.0), 1, secret, 1)
    drawn = torch.cat([*first, *second])
    assert len(drawn.unique()) > 190
    again = noised_mean(zeros, DPSGD(1.0, 1.0), 1, secret, 0)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    system = noised_mean(zeros, DPSGD(1.0, 1.0), 1, Secret.system(), 0)
    assert not torch.equal(system[0], first[0])


# Runs


def test_without_noise_and_clip_and_with_all_data_it_is_gradient_descent() -> None:
    stop = dure.Stop(steps=5)
    plain = dure.train(task_of(), dure.SingleWorker(None), stop=stop)
    private = dure.train(task_of(), dure.SingleWorker(None, privacy="dp-sgd:inf:0"), stop=stop)
    assert apart(plain, private) < 1e-12
    assert private.summary["numbers"]["epsilon"] is None
    assert "no differential privacy" in private.summary["facts"][0]["promises"][0]["said"]


def test_a_step_is_the_sum_of_clipped_gradients_and_noise_over_the_expected_batch() -> None:
    sgd = partial(torch.optim.SGD, lr=1.0)
    task = dure.Task(model=net, loss=F.cross_entropy, train=data(), optimizer=sgd)
    run = dure.train(
        task, dure.SingleWorker(10, privacy="dp-sgd:0.1:1.1:seed"), stop=dure.Stop(steps=1)
    )
    model = seeded_model(task, 0)
    rows = PoissonBatches(40, 10, Secret.simulated(0)).at(0)
    inputs, targets = task.train.batch(rows)
    sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for one, target in zip(inputs.split(1), targets.split(1), strict=True):
        gradients = torch.autograd.grad(F.cross_entropy(model(one), target), model.parameters())
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        for total, gradient in zip(sums, gradients, strict=True):
            total += gradient * min(1.0, 0.1 / norm)
    wanted = noised_mean(sums, DPSGD(0.1, 1.1), 10, Secret.simulated(0), 0)
    for parameter, trained, gradient in zip(
        model.parameters(), run.model.parameters(), wanted, strict=True
    ):
        torch.testing.assert_close(trained, parameter - gradient, rtol=1e-10, atol=1e-10)


def test_ranks_walk_the_path_of_one_worker() -> None:
    # Batches of 3 in the mean: some ranks have none, and some batches.
    fields: dict[str, Any] = {"privacy": "dp-sgd:0.5:1.1:seed", "batch_size": 3}
    stop = dure.Stop(steps=28)
    alone = dure.train(task_of(), dure.SingleWorker(**fields), stop=stop)
    assert any(step.loss is None for step in alone.history.steps)
    together = dure.train(
        task_of(),
        dure.DataParallel(**fields, accumulate=2),
        world=dure.Processes(3),
        stop=stop,
    )
    assert apart(alone, together) < 1e-12
    assert together.summary["numbers"] == alone.summary["numbers"]
    first, *others = together.summary["facts"]
    assert first["promises"] == alone.summary["facts"][0]["promises"]
    assert others == [{"promises": []}] * 2


def test_system_noise_does_not_repeat_and_that_of_the_seed_does() -> None:
    stop = dure.Stop(steps=3)

    def run(privacy: str) -> dure.Run:
        return dure.train(task_of(), dure.SingleWorker(8, privacy=privacy), stop=stop)

    assert apart(run("dp-sgd:1:1"), run("dp-sgd:1:1")) > 1e-3
    assert apart(run("dp-sgd:1:1:seed"), run("dp-sgd:1:1:seed")) == 0
    assert (
        "does not know its seed"
        in run("dp-sgd:1:1:seed").summary["facts"][0]["promises"][0]["said"]
    )


def test_batches_that_are_read_ahead_are_those_that_would_be_read() -> None:
    fields: dict[str, Any] = {"privacy": "dp-sgd:1:1:seed", "batch_size": 2}
    stop = dure.Stop(steps=20)
    plain = dure.train(task_of(), dure.SingleWorker(**fields), stop=stop)
    # Some of them are empty, and are not read at all.
    assert any(step.loss is None for step in plain.history.steps)
    ahead = dure.train(task_of(), dure.SingleWorker(**fields, loaders=1), stop=stop)
    assert apart(plain, ahead) == 0
    with_system_noise = dure.SingleWorker(2, privacy="dp-sgd:1:1", loaders=1)
    assert dure.train(task_of(), with_system_noise, stop=stop).summary["steps"] == 20


def test_the_epsilon_is_that_of_dp_accounting_by_hand() -> None:
    run = dure.train(
        task_of(test=data()),
        dure.SingleWorker(4, privacy="dp-sgd:1:1.1", delta=1e-4),
        stop=dure.Stop(steps=25),
        evaluate_every=10,
    )
    shown = [(one.step, (one.numbers or {})["epsilon"]) for one in run.history.evaluations]
    assert [step for step, _ in shown] == [0, 10, 20, 25]
    for step, told in shown[1:]:
        accountant = pld_privacy_accountant.PLDAccountant()
        release = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.1))
        accountant.compose(dp_accounting.SelfComposedDpEvent(release, step))
        assert told == pytest.approx(accountant.get_epsilon(1e-4), rel=2e-3)
    assert run.summary["numbers"]["epsilon"] == shown[-1][1]


def test_an_epsilon_chooses_the_noise_for_the_length_of_the_run() -> None:
    strategy = dure.SingleWorker(4, privacy="dp-sgd:1", epsilon=4.0)
    run = dure.train(task_of(), strategy, stop=dure.Stop(epochs=2))
    assert run.summary["steps"] == 20
    assert 3.9 < run.summary["numbers"]["epsilon"] <= 4.0
    with pytest.raises(ValueError, match="give steps or epochs"):
        dure.train(task_of(), strategy, stop=dure.Stop(seconds=1))
    with pytest.raises(ValueError, match="needs privacy=dp-sgd"):
        dure.train(task_of(), dure.SingleWorker(4, epsilon=4.0), stop=dure.Stop(epochs=2))


@pytest.mark.parametrize("noise", ["", ":0.6"])
@pytest.mark.parametrize("epsilon", [-4.0, 0.0, math.nan, math.inf, 1e-6])
def test_a_budget_that_nothing_keeps_to_is_refused_before_any_work(
    noise: str, epsilon: float, tmp_path: Path
) -> None:
    if not noise and epsilon == 1e-6:
        pytest.skip("the noise that keeps to it is found")
    strategy = dure.SingleWorker(8, privacy=f"dp-sgd:1{noise}", epsilon=epsilon)
    with pytest.raises(ValueError, match="epsilon"):
        dure.train(task_of(), strategy, stop=dure.Stop(epochs=2), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_ends_before_it_tells_more_than_it_may() -> None:
    strategy = dure.SingleWorker(4, privacy="dp-sgd:1:1.1", epsilon=2.5)
    run = dure.train(task_of(), strategy, stop=dure.Stop(steps=1_000))
    assert run.summary["ended"] == "epsilon"
    steps = run.summary["steps"]
    assert run.summary["numbers"]["epsilon"] <= 2.5
    more = dure.train(
        task_of(), dure.SingleWorker(4, privacy="dp-sgd:1:1.1"), stop=dure.Stop(steps=steps + 1)
    )
    assert more.summary["numbers"]["epsilon"] > 2.5


# Runs that go on


def test_a_run_of_the_seed_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    strategy = dure.SingleWorker(8, privacy="dp-sgd:1:1:seed")
    dure.train(task_of(), strategy, stop=dure.Stop(steps=7), out=tmp_path / "run")
    gone_on = dure.resume(
        tmp_path / "run", task=task_of(), strategy=strategy, stop=dure.Stop(steps=12)
    )
    whole = dure.train(task_of(), strategy, stop=dure.Stop(steps=12))
    assert apart(gone_on, whole) == 0
    assert gone_on.summary["numbers"] == whole.summary["numbers"]


def test_steps_that_were_lost_are_paid_for(tmp_path: Path) -> None:
    strategy = dure.SingleWorker(8, privacy="dp-sgd:1:1")
    dure.train(task_of(), strategy, stop=dure.Stop(steps=7), out=tmp_path / "run")
    assert json.loads((tmp_path / "run" / FILE).read_text())["charged"] == 7
    # As if it had been killed when it had gone on for a while.
    (tmp_path / "run" / FILE).write_text('{"charged": 10}')
    again = dure.resume(
        tmp_path / "run", task=task_of(), strategy=strategy, stop=dure.Stop(steps=12)
    )
    assert again.summary["steps"] == 12
    assert again.summary["facts"][0]["promises"][0]["steps"] == 15
    (tmp_path / "run" / FILE).write_text("{}")
    with pytest.raises(dure.errors.RunFolderError, match="counts the noised steps"):
        dure.resume(tmp_path / "run", task=task_of(), strategy=strategy, stop=dure.Stop(steps=20))


def test_steps_are_charged_before_they_are_done_and_given_back_at_a_checkpoint(
    tmp_path: Path,
) -> None:
    count = StepCount(tmp_path, block=5)
    count.begin()
    assert StepCount(tmp_path, block=5).spent == 5
    for _ in range(5):
        count.begin()
    assert count.spent == 6
    assert StepCount(tmp_path, block=5).spent == 10
    count.settle()
    later = StepCount(tmp_path, block=5)
    later.restore(4)
    assert later.spent == 6
    later.restore(8)
    assert later.spent == 8


def test_no_file_of_a_run_has_its_noise_or_its_keys(tmp_path: Path) -> None:
    drawn: list[bytes] = []
    key = Secret.key

    def note(secret: Secret, purpose: str, *position: int) -> bytes:
        found = key(secret, purpose, *position)
        drawn.append(found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Secret, "key", note)
        dure.train(
            task_of(),
            dure.SingleWorker(8, privacy="dp-sgd:1:1"),
            stop=dure.Stop(steps=3),
            out=tmp_path / "run",
        )
    assert len(drawn) >= 7
    written = b"".join(one.read_bytes() for one in (tmp_path / "run").rglob("*") if one.is_file())
    assert not any(one in written or one.hex().encode() in written for one in drawn)


# What is refused


@pytest.mark.parametrize(
    ("fields", "asked", "reason"),
    [
        ({"compression": dure.TopK(0.1)}, {}, "before noise is added"),
        ({}, {"precision": "bf16"}, "precision bf16 norms are too inexact"),
        ({}, {"compile": True}, "leave compile out"),
    ],
)
def test_data_parallel_refuses_what_is_not_bounded(
    fields: dict[str, Any], asked: dict[str, Any], reason: str
) -> None:
    strategy = dure.DataParallel(privacy="dp-sgd:1:1", **fields)
    with pytest.raises(ValueError, match=reason):
        dure.train(
            replace(task_of(), **asked), strategy, world=dure.Processes(2), stop=dure.Stop(steps=1)
        )


def test_threads_are_refused() -> None:
    strategy = dure.DataParallel(privacy="dp-sgd:1:1")
    with pytest.raises(
        ValueError, match="in threads the master has only the loss of the whole batch"
    ):
        dure.train(task_of(), strategy, world=dure.Threads(2), stop=dure.Stop(steps=1))


def test_batch_norm_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    task = task_of(lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double())
    with pytest.raises(ValueError, match=r"use nn\.GroupNorm instead"):
        dure.train(task, dure.SingleWorker(8, privacy="dp-sgd:1:1"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_gradient_that_is_not_finite_ends_the_run() -> None:
    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3).double()

        def forward(self, inputs: Tensor) -> Tensor:
            # The value is finite at 0, and the slope is not.
            return self.layer(inputs) + (self.layer.weight.sum() * 0).abs().sqrt()

    with pytest.raises(dure.errors.LossNotFiniteError):
        dure.train(
            task_of(Steep), dure.SingleWorker(8, privacy="dp-sgd:1:1"), stop=dure.Stop(steps=2)
        )


def test_settings_have_a_text_and_refuse_what_makes_no_sense() -> None:
    assert str(DPSGD(1.5, 0.7)) == "dp-sgd:1.5:0.7"
    assert parse_dp_sgd("dp-sgd:1.5:0.7:seed") == DPSGD(1.5, 0.7, "seed")
    assert dure.SingleWorker(privacy="dp-sgd:1:1") == dure.SingleWorker(privacy=DPSGD(1.0, 1.0))
    for text in ("dp-sgd:0", "dp-sgd:1:-1", "dp-sgd:inf:1", "dp-sgd:1:1:clock"):
        with pytest.raises(ValueError, match="dp-sgd"):
            parse_dp_sgd(text)
