"""Local SGD: its special cases, its arithmetic by hand, its bytes, its state."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rounds import Regular, alone, hashed, run_on, watched
from torch.nn import functional as F

import dure
from dure.averaging.synchronisation import elements_in_message
from dure.collectives.algorithms import master, ring
from dure.collectives.compression import Cast, TopK
from dure.contracts.fresh_model import seeded_model
from dure.data.batches import Batches
from dure.errors import LossNotFiniteError, PeerLostError
from small import EXAMPLES, largest_difference, same_bits, small_task, weights_of

MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_rounds_of_one_step_are_one_worker(ranks: int) -> None:
    assert EXAMPLES % 8 == 1, "the last batch has fewer examples than ranks"
    many = run_on(small_task(), dure.LocalSGD(8, period=1), ranks, rounds=18)
    assert largest_difference(many, alone(small_task(), 8, steps=18)) < 1e-12


@pytest.mark.parametrize("optimizer", [MOMENTUM, partial(torch.optim.Adam, lr=0.01)])
def test_one_rank_is_one_worker_whatever_the_period(optimizer: Any) -> None:
    task = small_task(optimizer=optimizer)
    assert (
        largest_difference(run_on(task, dure.LocalSGD(8, 4), 1, rounds=5), alone(task, 8, steps=20))
        < 1e-10
    )


def test_a_round_is_the_mean_of_what_its_ranks_do_weighted_by_their_examples() -> None:
    task, batches = small_task(), Batches(EXAMPLES, 8, seed=3)
    models, weights = [], []
    for rank in range(3):
        model = seeded_model(task, 3)
        optimizer = task.optimizer(model.parameters())
        parts = [batches.at(step).tensor_split(3)[rank] for step in range(6)]
        for part in filter(len, parts):
            optimizer.zero_grad()
            inputs, targets = task.train.batch(part)
            task.loss(model(inputs), targets).backward()
            optimizer.step()
        models.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        weights.append(sum(map(len, parts)) / EXAMPLES)
    assert len(set(weights)) == 3, "the shares have to differ for this test to say something"
    mean = sum(weight * model for weight, model in zip(weights, models, strict=True))
    assert (weights_of(run_on(task, dure.LocalSGD(8, 6), 3, rounds=1)) - mean).abs().max() < 1e-12


def test_post_local_sgd_is_one_worker_until_its_rounds_become_longer() -> None:
    strategy = dure.LocalSGD(8, period=4, local_from=6)
    assert (
        largest_difference(
            run_on(small_task(), strategy, 2, rounds=6), alone(small_task(), 8, steps=6)
        )
        < 1e-12
    )
    longer = run_on(small_task(), strategy, 2, rounds=8)
    assert [step.samples for step in longer.history.steps] == [8, 16, 24, 32, 40, 41, 73, 82 + 16]


@pytest.mark.parametrize(
    "settings", [{}, {"momentum": "average"}, {"all_reduce": "native"}, {"compression": TopK(0.3)}]
)
def test_replicas_hash_alike_after_every_round(settings: dict[str, Any]) -> None:
    task = small_task(n=40, model=Regular, optimizer=MOMENTUM)
    strategy = dure.LocalSGD(20, 3, **settings)
    first, *others = watched(
        task, strategy, 3, 3, lambda learner: hashed(list(learner.model.state_dict().values()))
    )
    assert others == [first, first]
    assert len(set(first)) == 3


@pytest.mark.parametrize(
    ("period", "algorithm", "formula"),
    [(1, "ring", ring), (5, "ring", ring), (5, "master", master)],
)
def test_the_bytes_of_a_round_are_those_of_the_formula_whatever_its_length(
    period: int, algorithm: Any, formula: Any
) -> None:
    run = run_on(small_task(), dure.LocalSGD(8, period, all_reduce=algorithm), 3, rounds=4)
    elements = elements_in_message(run.summary["parameters"], 3)
    for rank, worker in enumerate(run.summary["per_worker"]):
        assert worker["bytes_sent"] == 4 * 8 * formula.elements_sent(elements, 3, rank)


def test_a_loss_that_may_say_what_it_counts_sends_one_number_more() -> None:
    task = small_task(loss=lambda outputs, targets: F.cross_entropy(outputs, targets))
    run = run_on(task, dure.LocalSGD(8, 2), 2, rounds=2)
    elements = elements_in_message(run.summary["parameters"], 2, numbers=1)
    for rank, worker in enumerate(run.summary["per_worker"]):
        assert worker["bytes_sent"] == 2 * 8 * ring.elements_sent(elements, 2, rank)


def test_buffers_and_averaged_momentum_are_in_the_formula() -> None:
    task = small_task(n=40, model=Regular, optimizer=partial(torch.optim.Adam, lr=0.01))
    run = run_on(task, dure.LocalSGD(20, 2, momentum="average"), 2, rounds=3)
    trained = run.summary["parameters"] - 42  # those of `frozen` stay at home
    elements = elements_in_message(
        trained, 2, floating_buffers=16 + 3 + 4, other_buffers=1, states=2
    )
    counted = 8  # num_batches_tracked, of rank 0
    for rank, worker in enumerate(run.summary["per_worker"]):
        assert worker["bytes_sent"] == 3 * (
            8 * ring.elements_sent(elements, 2, rank) + (counted if rank == 0 else 0)
        )


def test_batch_norms_statistics_are_averaged() -> None:
    task = small_task(n=40, model=Regular)
    run = run_on(task, dure.LocalSGD(20, 1), 2, rounds=1, seed=0)
    model = seeded_model(task, 0)
    inputs = model.body[0](model.frozen(task.train.inputs[Batches(40, 20, 0).at(0)]))  # type: ignore[index, operator]
    halves = [half.mean(dim=0) for half in inputs.tensor_split(2)]
    norm = run.model.body[1]  # type: ignore[index]
    assert torch.allclose(norm.running_mean, 0.1 * sum(halves) / 2)  # type: ignore[union-attr, arg-type]
    assert norm.num_batches_tracked == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("strategy", [dure.LocalSGD(12, 1), dure.ADMM(12), dure.ParallelSGD(12)])
def test_buffers_that_never_change_keep_their_bits(strategy: Any) -> None:
    run = run_on(small_task(n=36, model=Regular), strategy, 3, rounds=3)
    assert torch.equal(run.model.mask, Regular().mask)  # type: ignore[arg-type]
    assert torch.equal(run.model.expanded, Regular().expanded)  # type: ignore[arg-type]


def buffers_of(learner: Any) -> list[torch.Tensor]:
    state = learner.replica.optimizer.state
    return [
        state[p]["momentum_buffer"].clone()
        for p in learner.replica.trained
        if "momentum_buffer" in state[p]
    ]


def test_momentum_is_kept_averaged_or_begun_anew_as_asked() -> None:
    task = small_task(optimizer=MOMENTUM)
    kept = watched(task, dure.LocalSGD(8, 4, momentum="keep"), 2, 1, buffers_of)
    mean = watched(task, dure.LocalSGD(8, 4, momentum="average"), 2, 1, buffers_of)
    none = watched(task, dure.LocalSGD(8, 4, momentum="reset"), 2, 1, buffers_of)
    (one,), (other,) = kept
    assert all(not torch.equal(a, b) for a, b in zip(one, other, strict=True))
    for a, b, mine, theirs in zip(one, other, mean[0][0], mean[1][0], strict=True):
        assert torch.equal(mine, theirs)
        assert torch.allclose(mine, (a + b) / 2, rtol=0, atol=1e-14)
    assert none == [[[]], [[]]]


def test_a_reset_optimizer_is_as_fresh_as_it_was_at_first() -> None:
    task = small_task(
        optimizer=partial(torch.optim.Adagrad, lr=0.1)
    )  # has state before its first step
    counts = watched(task, dure.LocalSGD(8, 3, momentum="reset"), 2, 2, lambda learner: float(
        learner.replica.optimizer.state[learner.replica.trained[0]]["step"]))  # fmt: skip
    assert counts == [[0.0, 0.0], [0.0, 0.0]]


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, as Prodigy does."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step(closure)


def test_what_steps_count_in_groups_is_reset_as_well() -> None:
    task = small_task(optimizer=partial(Counting, lr=0.1))
    counts = watched(task, dure.LocalSGD(8, 3, momentum="reset"), 2, 2, lambda learner: float(
        learner.replica.optimizer.param_groups[0].get("k", 0)))  # fmt: skip
    assert counts == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    "settings", [{"momentum": "average"}, {"compression": TopK(0.2)}, {"local_from": 3}]
)
def test_a_resumed_run_has_the_bits_of_the_unbroken_one(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    task = small_task(n=40, model=Regular, optimizer=MOMENTUM)
    strategy = dure.LocalSGD(20, 3, **settings)
    run_on(task, strategy, 2, rounds=3, out=tmp_path / "run")
    resumed = dure.resume(tmp_path / "run", task=task, stop=dure.Stop(rounds=7))
    whole = run_on(task, strategy, 2, rounds=7)
    assert same_bits(resumed, whole)
    assert resumed.summary["bytes_sent"] == whole.summary["bytes_sent"]
    assert [step.loss for step in resumed.history.steps] == [
        step.loss for step in whole.history.steps
    ]


def test_compressed_differences_cost_what_their_compression_says() -> None:
    task, compression = small_task(), Cast("bfloat16")
    run = run_on(task, dure.LocalSGD(8, 2, compression=compression), 3, rounds=2)
    like = [p.detach() for p in seeded_model(task, 3).parameters()]
    for rank, worker in enumerate(run.summary["per_worker"]):
        tail = 4 * ring.elements_sent(
            elements_in_message(0, 3), 3, rank
        )  # alone it travels in float32
        assert worker["bytes_sent"] == 2 * (compression.bytes_sent(like, 3, rank, "ring") + tail)


def test_keeping_all_numbers_is_no_compression() -> None:
    strategies = [dure.LocalSGD(8, 3), dure.LocalSGD(8, 3, compression=TopK(1.0))]
    plain, whole = (run_on(small_task(), strategy, 2, rounds=4) for strategy in strategies)
    assert largest_difference(plain, whole) < 1e-12


def test_a_loss_that_is_not_finite_ends_all_ranks_and_spoils_no_checkpoint(tmp_path: Path) -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss.steps += outputs.requires_grad  # type: ignore[attr-defined]
        value = torch.nn.functional.cross_entropy(outputs, targets)
        bad = loss.steps > 7 and torch.distributed.get_rank() == 1  # type: ignore[attr-defined]
        return value / 0 if bad and outputs.requires_grad else value

    loss.steps = 0  # type: ignore[attr-defined]
    with pytest.raises(LossNotFiniteError, match="the loss is inf at round 3 on rank 1"):
        run_on(
            small_task(loss=loss),
            dure.LocalSGD(8, 3),
            2,
            rounds=9,
            out=tmp_path / "run",
            checkpoint_every=1,
        )
    assert [path.name for path in (tmp_path / "run/checkpoint").iterdir()] == ["00000002"]


def test_weights_that_the_last_step_of_a_round_spoils_are_found() -> None:
    with pytest.raises(LossNotFiniteError, match=r"at round 1 on rank \d"):
        run_on(small_task(lr=torch.tensor(float("inf"))), dure.LocalSGD(8, 1), 2, rounds=3)


def test_a_lost_rank_is_named_with_its_round() -> None:
    class Mortal(torch.nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if self.training and torch.distributed.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().forward(inputs)

    task = small_task(model=lambda: Mortal(6, 3).double())
    with pytest.raises(PeerLostError, match=r"rank 1 was killed by SIGKILL, during .* of round 1"):
        run_on(task, dure.LocalSGD(8, 3), 3, rounds=2)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"period": 0}, "period is 0"),
        ({"local_from": -1}, "local_from is -1"),
        ({"momentum": "mix"}, "choose one of keep, average, reset"),
        ({"all_reduce": "rng"}, "there is no all-reduce 'rng'"),
        ({"batch_size": 1}, "a joint batch of 1 cannot be divided over 2 workers"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work(
    settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        run_on(small_task(), dure.LocalSGD(**settings), 2, rounds=1)
