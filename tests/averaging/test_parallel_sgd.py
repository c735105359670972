"""Parallel SGD: its special cases, its two combinations by hand, one communication, its state."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rounds import Regular, alone, hashed, run_on, watched
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.collectives.algorithms import ring
from dure.contracts.fresh_model import seeded_model
from dure.data.batches import Batches
from dure.errors import LossNotFiniteError
from small import EXAMPLES, largest_difference, same_bits, small_task, weights_of


@pytest.mark.parametrize("partition", [dure.IID(), dure.QuantitySkew(0.5)])
def test_one_step_of_all_data_is_a_step_on_the_joint_gradient(partition: Any) -> None:
    many = run_on(small_task(), dure.ParallelSGD(None, partition=partition), 3, rounds=1)
    assert largest_difference(many, alone(small_task(), None, steps=1)) < 1e-12


@pytest.mark.parametrize("combine", ["average", "best"])
def test_one_rank_is_one_worker(combine: Any) -> None:
    assert (
        largest_difference(
            run_on(small_task(), dure.ParallelSGD(8, combine), 1, 3), alone(small_task(), 8, 18)
        )
        < 1e-12
    )


def parents(
    task: dure.Task, strategy: dure.ParallelSGD, ranks: int, passes: int
) -> tuple[list[nn.Module], list[int]]:
    """The ranks' models, trained here one after another; and how many examples each has."""
    models = []
    parts = strategy.partition.divide(ranks, task.train, 3)
    for rank, part in enumerate(parts):
        model = seeded_model(task, 3)
        optimizer = task.optimizer(model.parameters())
        batches = Batches(len(part), -(-strategy.batch_size // ranks), 3, rank)  # type: ignore[operator]
        for step in range(passes * batches.steps_per_epoch):
            optimizer.zero_grad()
            inputs, targets = task.train.batch(part[batches.at(step)])
            task.loss(model(inputs), targets).backward()
            optimizer.step()
        models.append(model)
    return models, list(map(len, parts))


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_the_average_weighs_a_model_by_its_examples() -> None:
    strategy = dure.ParallelSGD(8, partition=dure.QuantitySkew(0.5))
    models, counts = parents(small_task(), strategy, 3, passes=2)
    assert len(set(counts)) > 1, "the parts have to differ for this test to say something"
    mean = sum(
        count / EXAMPLES * vector(model) for count, model in zip(counts, models, strict=True)
    )
    assert (weights_of(run_on(small_task(), strategy, 3, rounds=2)) - mean).abs().max() < 1e-12


def test_the_best_is_the_one_with_the_least_loss_on_all_training_data() -> None:
    task, strategy = small_task(), dure.ParallelSGD(8, "best", dure.LabelShards(1))
    models, _ = parents(task, strategy, 3, passes=2)
    losses = [
        F.cross_entropy(model(task.train.inputs), task.train.targets).item() for model in models
    ]
    best = models[losses.index(min(losses))]
    run = run_on(task, strategy, 3, rounds=2)
    assert (weights_of(run) - vector(best)).abs().max() < 1e-12


@pytest.mark.parametrize("evaluate_every", [1, 3])
def test_one_average_is_sent_however_often_it_is_evaluated(evaluate_every: int) -> None:
    run = run_on(small_task(), dure.ParallelSGD(8), 3, rounds=3, evaluate_every=evaluate_every)
    expected = [8 * ring.elements_sent(run.summary["parameters"], 3, rank) for rank in range(3)]
    assert [worker["bytes_sent"] for worker in run.summary["per_worker"]] == expected


def test_the_best_is_sent_once_by_its_rank_and_a_loss_by_each() -> None:
    run = run_on(small_task(), dure.ParallelSGD(8, "best"), 3, rounds=2, evaluate_every=1)
    sent = sorted(worker["bytes_sent"] for worker in run.summary["per_worker"])
    assert sent == [16, 16, 16 + 2 * 8 * run.summary["parameters"]]


def test_where_it_repeats_all_ranks_go_on_from_the_combined_model() -> None:
    def look(learner: Any) -> tuple[str, str, int]:
        shared = list(learner.combine().state_dict().values())
        own = list(learner.replica.model.state_dict().values())
        return hashed(shared), hashed(own), len(learner.replica.optimizer.state)

    momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    task = small_task(n=40, model=Regular, optimizer=momentum)
    for combine in ("average", "best"):
        one, other = watched(task, dure.ParallelSGD(20, combine, combine_every=1), 2, 3, look)
        assert one == other
        assert all(shared == own and not kept for shared, own, kept in one)
        assert len(set(one)) == 3, "the model has to move for this test to say something"


@pytest.mark.parametrize("combine", ["average", "best"])
def test_all_ranks_hold_the_same_combined_model_and_train_on_their_own(combine: Any) -> None:
    def look(learner: Any) -> tuple[str, str]:
        return hashed(list(learner.weights().values())), hashed(learner.replica.flat.buffers)

    task = small_task(n=40, model=Regular)
    one, other = watched(task, dure.ParallelSGD(20, combine), 2, 3, look)
    assert [combined for combined, _ in one] == [combined for combined, _ in other]
    assert all(mine != theirs for (_, mine), (_, theirs) in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("combine", "combine_every"), [("average", None), ("average", 2), ("best", None)]
)
def test_a_resumed_run_has_the_bits_of_the_unbroken_one(
    combine: Any, combine_every: int | None, tmp_path: Path
) -> None:
    momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    task = small_task(n=40, model=Regular, optimizer=momentum)
    strategy = dure.ParallelSGD(20, combine, combine_every=combine_every)
    run_on(task, strategy, 2, rounds=2, out=tmp_path / "run")
    resumed = dure.resume(tmp_path / "run", task=task, stop=dure.Stop(rounds=5))
    whole = run_on(task, strategy, 2, rounds=5)
    assert same_bits(resumed, whole)
    assert [e.metrics for e in resumed.history.evaluations] == [
        e.metrics for e in whole.history.evaluations
    ]


def test_a_loss_that_is_not_finite_names_its_rank() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        value = F.cross_entropy(outputs, targets)
        return value / 0 if outputs.requires_grad and torch.distributed.get_rank() == 1 else value

    with pytest.raises(LossNotFiniteError, match="the loss is inf at round 1 on rank 1"):
        run_on(small_task(loss=loss), dure.ParallelSGD(8), 2, rounds=2)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"combine_every": 0}, "combine_every is 0, but it has to be 1 or more"),
        ({"combine": "worst"}, "combine is 'worst'; choose one of average, best"),
        ({"partition": dure.NaturalKey()}, "3"),
        ({"batch_size": 1}, "a joint batch of 1 cannot be divided over 2 workers"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work(
    settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        run_on(small_task(), dure.ParallelSGD(**settings), 2, rounds=1)
