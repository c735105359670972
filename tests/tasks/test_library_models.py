"""Metrics of scikit-learn and of objects with a state, called as they are."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from ranks import on_ranks
from sklearn import metrics as sk
from torch import nn
from torch.nn import functional as F

import dure
from dure.collectives.group import Group
from dure.tasks.evaluation import evaluate
from dure.tasks.metric_libraries import is_of_a_library, metric_of_all
from small import examples, network, small_task

GENERATOR = torch.Generator().manual_seed(0)
TARGETS = torch.randint(0, 3, (50,), generator=GENERATOR)
SCORES = torch.randn(50, 3, generator=GENERATOR) + F.one_hot(TARGETS)
CLASSES = SCORES.argmax(1)
PROBABILITIES = SCORES.double().softmax(1).numpy()


@pytest.mark.parametrize(
    ("metric", "given"),
    [
        (sk.accuracy_score, CLASSES),
        (partial(sk.f1_score, average="macro"), CLASSES),
        # Which of the two comes first matters here.
        (partial(sk.precision_score, average="macro"), CLASSES),
        (sk.balanced_accuracy_score, CLASSES),
        (sk.cohen_kappa_score, CLASSES),
        (sk.homogeneity_score, CLASSES),
        (partial(partial(sk.fbeta_score, beta=2), average="micro"), CLASSES),
        (partial(sk.roc_auc_score, multi_class="ovr"), PROBABILITIES),
        (sk.log_loss, PROBABILITIES),
        (partial(sk.top_k_accuracy_score, k=2), PROBABILITIES),
        (sk.hinge_loss, SCORES),
    ],
)
@pytest.mark.parametrize("form", ["scores", "log-probabilities", "probabilities"])
def test_targets_come_first_and_outputs_are_what_the_metric_takes(metric, given, form):
    outputs = {
        "scores": SCORES.double(),
        "log-probabilities": SCORES.double().log_softmax(1),
        "probabilities": torch.from_numpy(PROBABILITIES),
    }[form]
    if metric is sk.hinge_loss:
        given = outputs
    expected = metric(TARGETS.numpy(), numpy.asarray(given))
    assert metric_of_all(metric, outputs, TARGETS) == pytest.approx(expected, rel=1e-9)


def test_of_two_classes_probabilities_are_those_of_the_second():
    targets = TARGETS.clamp(max=1)
    scores = SCORES[:, :2]
    second = scores.double().softmax(1)[:, 1].numpy()
    for metric in (sk.roc_auc_score, sk.average_precision_score, sk.brier_score_loss, sk.log_loss):
        assert metric_of_all(metric, scores, targets) == pytest.approx(
            metric(targets.numpy(), second)
        )


def test_ignored_targets_are_left_out_and_positions_count_one_by_one():
    scores = torch.randn(4, 3, 5, generator=GENERATOR)
    targets = torch.randint(0, 3, (4, 5), generator=GENERATOR)
    targets[0] = -100
    correct, count = dure.accuracy(scores, targets)
    assert metric_of_all(sk.accuracy_score, scores, targets) == pytest.approx(
        float(correct / count)
    )


@pytest.mark.parametrize("shape", [(50,), (50, 1)])
def test_numbers_are_compared_as_they_are(shape):
    outputs, targets = torch.randn(shape), torch.randn(shape)
    assert metric_of_all(sk.r2_score, outputs.bfloat16(), targets) == pytest.approx(
        sk.r2_score(targets.numpy(), outputs.bfloat16().float().numpy())
    )
    whole = torch.arange(50).view(shape)
    assert metric_of_all(sk.mean_squared_error, outputs, whole) == pytest.approx(
        float(F.mse_loss(outputs.double(), whole.double()))
    )


@pytest.mark.parametrize("shape", [(50,), (50, 1)])
def test_one_score_an_example_has_an_order_but_is_no_class_and_no_probability(shape):
    outputs, targets = SCORES[:, 0].view(shape), (TARGETS > 0).long().view(shape)
    expected = sk.roc_auc_score(targets.reshape(-1), outputs.reshape(-1))
    assert metric_of_all(sk.roc_auc_score, outputs, targets) == pytest.approx(expected)
    assert metric_of_all(sk.roc_auc_score, outputs, targets.float()) == pytest.approx(expected)
    with pytest.raises(
        ValueError, match=r"f1_score takes predicted .* f1_score\(targets, outputs "
    ):
        metric_of_all(sk.f1_score, outputs, targets)
    with pytest.raises(ValueError, match=r"log_loss takes prob.* log_loss\(targets, outputs\.s"):
        metric_of_all(sk.log_loss, outputs, targets)


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (sk.silhouette_score, "'odd' failed: ValueError: silhouette_score does not compare"),
        (sk.confusion_matrix, r"'odd' returns an array of shape \[3, 3\]"),
        (sk.precision_recall_fscore_support, r"'odd' returns \(an array"),
    ],
)
def test_what_is_no_metric_is_refused(metric, said):
    task = small_task(metrics={"odd": metric}, eval_batch_size=7)
    with pytest.raises(ValueError, match=said):
        evaluate(task, network(), task.test, Group(), 0)


class Recall:
    """The face of torcheval's metrics: `update`, `compute`, `reset`; of torchmetrics' in `Module`.

    The mean over updates, so that it shows how often it was updated.
    """

    def __init__(self) -> None:
        self.values: list[float] = []

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        ones = targets == 1
        self.values.append(float((outputs.argmax(1)[ones] == 1).double().mean()))

    def compute(self) -> torch.Tensor:
        return torch.tensor(self.values, dtype=torch.float64).mean()

    def reset(self) -> None:
        self.values.clear()


class Module(nn.Module, Recall):  # type: ignore[misc]
    """torchmetrics' are modules, which gather from all ranks in `compute` if they may."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        Recall.__init__(self)

    def distributed_available_fn(self) -> bool:
        return True

    def compute(self) -> torch.Tensor:
        assert not self.distributed_available_fn(), "would wait for ranks that do not call it"
        return Recall.compute(self)


@pytest.mark.parametrize("make", [Recall, Module])
@pytest.mark.parametrize("size", [1, 3])
def test_an_object_with_a_state_is_updated_once_and_stays_as_it_is(make, size):
    metric = make()
    metric.values.append(5.0)
    task = small_task(test=examples(30), metrics={"recall": metric}, eval_batch_size=4)
    model = network()
    with torch.no_grad():
        guesses = model(task.test.inputs).argmax(1)
    ones = task.test.targets == 1
    expected = float((guesses[ones] == 1).double().mean())

    def twice(group: Any) -> list[float]:
        own = copy.deepcopy(model)
        return [evaluate(task, own, task.test, group, step)["test_recall"] for step in range(2)]

    for found in on_ranks(size, twice):
        assert found == pytest.approx([expected] * 2)
    assert metric.values == [5.0]


def test_a_function_of_ones_own_that_calls_a_library_is_ones_own():
    def mine(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return float(sk.f1_score(targets, outputs.argmax(1), average="macro"))

    assert not is_of_a_library(mine)
    assert is_of_a_library(partial(sk.f1_score, average="macro"))
    task = small_task(
        metrics={"mine": mine, "theirs": partial(sk.f1_score, average="macro")}, eval_batch_size=4
    )
    found = evaluate(task, network(), task.test, Group(), 0)
    assert found["test_mine"] == found["test_theirs"]


def test_torchmetrics_work_as_they_are():
    torchmetrics = pytest.importorskip("torchmetrics")
    accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3, average="micro")
    f1 = partial(
        torchmetrics.functional.f1_score, task="multiclass", num_classes=3, average="macro"
    )
    theirs = {"accuracy": accuracy, "sum": accuracy + accuracy, "f1": f1}
    task = small_task(metrics=theirs, test=examples(30), eval_batch_size=4)
    expected = partial(sk.f1_score, average="macro")
    run = dure.train(task, dure.DataParallel(), dure.Processes(2), dure.Stop(epochs=1))
    with torch.no_grad():
        outputs = run.model(task.test.inputs)
    metrics = run.history.evaluations[-1].metrics
    correct, count = dure.accuracy(outputs, task.test.targets)
    assert metrics["test_accuracy"] == pytest.approx(float(correct / count))
    assert metrics["test_sum"] == pytest.approx(2 * float(correct / count))
    assert metrics["test_f1"] == pytest.approx(
        metric_of_all(expected, outputs, task.test.targets), abs=1e-6
    )
