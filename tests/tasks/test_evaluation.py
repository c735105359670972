"""Measuring a model on the test data."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import dure
from dure.collectives.group import Group
from dure.record.meter import Meter
from dure.record.trace import Trace
from dure.tasks.evaluation import evaluate
from dure.tasks.loss_shares import loss_and_count
from small import examples, network, small_task


class Share(Group):
    """One rank of several, seen alone: its sums are all there is."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self.sums: list[float] = []

    def all_gather_values(self, values: list[float]) -> list[list[float]]:
        self.sums = values
        return [values]


def test_the_measures_are_those_of_the_plain_computation_uneven_last_batch_included():
    task, model = small_task(eval_batch_size=7), network()
    inputs, targets = task.test.inputs, task.test.targets
    with torch.no_grad():
        outputs = model(inputs)
    measured = evaluate(task, model, task.test, Group(), 0)
    assert measured == {
        "test_loss": pytest.approx(float(F.cross_entropy(outputs, targets)), rel=1e-12),
        "test_accuracy": float((outputs.argmax(1) == targets).double().mean()),
    }


@given(st.integers(1, 30), st.integers(1, 8))
def test_the_ranks_shares_add_up_to_the_whole(n, size):
    task, model = small_task(test=examples(n)), network()
    whole = evaluate(task, model, task.test, Group(), 0)
    shares = [Share(rank, size) for rank in range(size)]
    for share in shares:
        if n > share.rank:
            evaluate(task, model, task.test, share, 0)
    loss, correct, *counts = (
        sum(column) for column in zip(*(s.sums for s in shares if s.sums), strict=True)
    )
    assert counts == [n, n]
    assert loss / n == pytest.approx(whole["test_loss"], rel=1e-12)
    assert correct / n == whole["test_accuracy"]


def test_a_metric_is_a_mean_or_a_sum_with_its_count():
    def mean(outputs, targets):
        return (outputs.argmax(1) == targets).double().mean()

    def of_class_one(outputs, targets):
        ones = targets == 1
        return ((outputs.argmax(1) == 1) & ones).sum(), ones.sum()

    def number(outputs, targets):
        return float(len(targets))

    measures = {"mean": mean, "recall": of_class_one, "batch": number}
    task, model = small_task(metrics=measures, eval_batch_size=7), network()
    with torch.no_grad():
        guesses, targets = model(task.test.inputs).argmax(1), task.test.targets
    measured = evaluate(task, model, task.test, Group(), 0)
    assert measured["test_mean"] == pytest.approx(float((guesses == targets).double().mean()))
    assert measured["test_recall"] == pytest.approx(
        float((guesses[targets == 1] == 1).double().mean())
    )
    assert measured["test_batch"] == pytest.approx((7 * 7 + 7 * 7 + 6 * 6) / 20)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_measured_as_it_predicts_and_goes_on_as_it_was(training):
    model = nn.Sequential(nn.Linear(6, 3, dtype=torch.float64), nn.Dropout(0.9)).train(training)
    task = small_task()
    first, second = (evaluate(task, model, task.test, Group(), 0) for _ in range(2))
    assert first == second
    assert [module.training for module in model.modules()] == [training] * 3


def test_no_gradients_are_kept():
    model, task = network(), small_task()
    evaluate(task, model, task.test, Group(), 0)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_is_measured_without_test_data_and_the_timeline_shows_what_was():
    trace = Trace()
    group, task = Group(meter=Meter("rank 0", trace)), small_task()
    assert evaluate(task, network(), None, group, 3) == {}
    assert not trace.lanes
    evaluate(task, network(), task.test, group, 3)
    ((span,),) = [lane.spans for lane in trace.lanes.values()]
    assert (span.name, span.category, span.step) == ("evaluation", "evaluation", 3)
    assert group.meter.counters.compute_seconds == 0


def ignoring(targets: torch.Tensor) -> torch.Tensor:
    """Most are ignored in the first half, and all of the last few."""
    targets = targets.clone()
    targets[: len(targets) // 2][torch.arange(len(targets) // 2) % 5 > 0] = -100
    targets[-7:] = -100
    return targets


def test_targets_in_few_bits_are_counted_as_they_are():
    targets = torch.tensor([0, 1, 2, 156, 156], dtype=torch.uint8)
    weight = torch.rand(157, generator=torch.Generator().manual_seed(0))
    scores = torch.randn(5, 157, generator=torch.Generator().manual_seed(1))
    for loss in (nn.CrossEntropyLoss(weight=weight), F.cross_entropy):
        total, count = loss_and_count(loss, scores, targets, 5)
        assert total / count == pytest.approx(float(loss(scores, targets.long())))
        assert count == pytest.approx(
            float(weight[targets.long()].sum()) if loss is not F.cross_entropy else 5.0
        )
    assert loss_and_count(partial(F.cross_entropy, size_average=False), scores, targets, 5)[1] == 5


WEIGHT = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
LOSSES = [
    F.cross_entropy,
    nn.CrossEntropyLoss(weight=WEIGHT),
    partial(F.cross_entropy, weight=WEIGHT, label_smoothing=0.1),
    partial(F.cross_entropy, ignore_index=2),
]


@pytest.mark.parametrize("loss", LOSSES, ids=["plain", "module", "weighted", "other"])
def test_a_loss_that_ignores_targets_is_their_mean_whatever_the_batches(loss):
    given = examples(40)
    targets = (
        ignoring(given.targets)
        if getattr(loss, "keywords", {}).get("ignore_index") is None
        else given.targets
    )
    task, model = small_task(loss=loss, test=(given.inputs, targets), eval_batch_size=7), network()
    expected = float(loss(model(given.inputs), targets).detach())
    for size in (1, 3):
        parts = [Share(rank, size) for rank in range(size)]
        for part in parts:
            evaluate(task, model, task.test, part, 0)
        total, _, count, _ = (
            sum(column) for column in zip(*(part.sums for part in parts), strict=True)
        )
        assert total / count == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        (dure.SingleWorker(), dure.Processes(1)),
        (dure.ZeRO(3), dure.Processes(2)),
        (dure.Pipeline(), dure.Processes(2)),
        (dure.ParallelSGD(combine="best"), dure.Processes(2)),
        (dure.FedPer(clients=3, held_out=0.4), dure.Simulated()),
    ],
    ids=lambda one: one.name,
)
def test_no_more_are_measured_at_once_than_was_asked_for(strategy, world, tmp_path):
    def saw(outputs, targets):
        with open(tmp_path / "seen", "a") as seen:
            seen.write(f"{len(targets)}\n")
        return (outputs.argmax(1) == targets).double().mean()

    def run(size):
        task = small_task(metrics={"accuracy": saw}, eval_batch_size=size)
        return (
            dure.train(task, strategy, world, dure.Stop(epochs=1)).history.evaluations[-1].metrics
        )

    small = run(2)
    assert {int(line) for line in (tmp_path / "seen").read_text().split()} <= {1, 2}
    assert small == pytest.approx(run(1_000), abs=1e-12)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, None, "9"])
def test_at_least_one_is_measured_at_once(size):
    with pytest.raises(ValueError, match="eval_batch_size="):
        small_task(eval_batch_size=size)
