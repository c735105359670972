"""The task, and the accuracy it measures by default."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import dure
from dure.contracts.task import Task, accuracy
from dure.data.datasets import DatasetExamples
from dure.data.examples import Examples
from small import network, small_task


@given(
    st.integers(1, 6), st.integers(1, 4), st.lists(st.integers(1, 3), max_size=2), st.integers(0, 9)
)
def test_accuracy_counts_correct_predictions_but_not_the_ignored(batch, classes, rest, seed):
    random = torch.Generator().manual_seed(seed)
    outputs = torch.randn(batch, classes, *rest, generator=random)
    targets = torch.randint(-1, classes, (batch, *rest), generator=random)
    correct, count = accuracy(outputs, targets, ignore_index=-1)
    pairs = zip(
        outputs.movedim(1, -1).reshape(-1, classes).tolist(),
        targets.reshape(-1).tolist(),
        strict=True,
    )
    kept = [(scores, target) for scores, target in pairs if target != -1]
    assert int(count) == len(kept)
    assert int(correct) == sum(scores.index(max(scores)) == target for scores, target in kept)


def test_data_become_examples_whatever_they_were():
    pair = (torch.zeros(3, 6), torch.zeros(3, dtype=torch.int64))
    task = small_task(train=pair, test=[(torch.zeros(6), 0)] * 3)
    assert isinstance(task.train, Examples)
    assert isinstance(task.test, DatasetExamples)
    assert small_task(test=None).test is None


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"model": nn.Linear(2, 2)},
            r"Task\(model=...\) has to be a function that returns a new one",
        ),
        ({"model": None}, r"Task\(model=...\) has to be a function"),
        ({"loss": "cross_entropy"}, r"Task\(loss=...\) has to be a function"),
        (
            {"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)},
            r"Task\(optimizer=...\) has to be a function",
        ),
        ({"train": 3}, "data of the type int are not supported"),
        ({"test": (torch.zeros(2), torch.zeros(3))}, "different lengths"),
        ({"metrics": [accuracy]}, r"Task\(metrics=...\) is a list: give a dict"),
        ({"metrics": {1: accuracy}}, "the name 1 has to be a str"),
        ({"metrics": {"f1": 3}}, "the metric 'f1' is .*, but has to be a function"),
        (
            {"metrics": {"mse": nn.MSELoss}},
            "the metric 'mse' is the class MSELoss: give an instance",
        ),
        ({"metrics": {"loss": accuracy}}, "the metric 'loss' would be reported as test_loss"),
        (
            {"metrics": {"a": accuracy, "a_p10": accuracy}},
            "the metric 'a_p10' has the name under which the",
        ),
        ({"metric_memory": 1.5}, "metric_memory=1.5"),
    ],
)
def test_what_does_not_make_a_task_is_refused(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        small_task(**changes)


def test_a_loss_may_be_a_module():
    assert small_task(loss=nn.CrossEntropyLoss()).loss is not None


def test_class_indices_are_measured_by_accuracy_and_numbers_by_the_loss_alone():
    numbers = (torch.zeros(3, 6), torch.zeros(3, 3))
    assert list(small_task().measures) == ["accuracy"]
    assert list(small_task(test=None).measures) == ["accuracy"]
    assert list(small_task(train=numbers, test=numbers, loss=F.mse_loss).measures) == []
    assert list(small_task(metrics={}).measures) == []
    assert list(small_task(metrics={"f1": accuracy}).measures) == ["f1"]


def test_a_task_is_a_value_that_can_be_changed_by_replacing_and_travels():
    task = small_task()
    task.measures  # noqa: B018, computed once and kept
    other = dataclasses.replace(task, name="other", metrics={})
    assert (other.name, list(other.measures), list(task.measures)) == ("other", [], ["accuracy"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        task.name = "changed"
    again = pickle.loads(pickle.dumps(task))
    assert (again.name, again.model, len(again.train)) == ("small", network, len(task.train))


def test_the_optimizer_is_sgd_unless_another_is_named():
    optimizer = Task(network, F.cross_entropy, small_task().train).optimizer([torch.zeros(1)])
    assert isinstance(optimizer, torch.optim.SGD)


@pytest.mark.parametrize(
    ("outputs", "targets", "counted"),
    [
        (torch.randn(6, 3), torch.arange(6) % 3, 6),
        (torch.randn(6, 3, 4), torch.zeros(6, 4, dtype=torch.long), 24),
        (torch.randn(6, 1), torch.ones(6, 1, dtype=torch.long), 0),
        (torch.randn(6, 1), torch.ones(6, dtype=torch.long), 0),
        (torch.randn(6), torch.ones(6, dtype=torch.long), 0),
        (torch.randn(6, 4, 3), torch.zeros(6, 4, dtype=torch.long), 0),
        ({"scores": torch.randn(6, 3)}, torch.arange(6) % 3, 0),
    ],
)
def test_the_accuracy_that_nobody_asked_for_is_that_of_scores_of_classes(outputs, targets, counted):
    task = small_task(train=(torch.randn(6, 6, dtype=torch.float64), targets), test=None)
    assert float(task.measures["accuracy"](outputs, targets)[1]) == counted
    several = torch.rand(6, 3) > 0.5
    assert not small_task(train=(torch.randn(6, 6), several), test=None, loss=F.mse_loss).measures


class Listed:
    """A map-style dataset of what it is given."""

    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ((torch.ones(6), torch.ones(6), 1), "item 0 of the dataset is a tuple of 3: give"),
        (
            {"features": torch.ones(6), "size": 1},
            "a dict needs a column labels for the targets; it has features, size",
        ),
        ((torch.ones(6), "cat"), "the target of item 0 is the str 'cat': give the index"),
    ],
)
def test_items_that_are_no_pairs_are_told_before_any_work(item, said):
    with pytest.raises(ValueError, match=said):
        dure.train(
            small_task(train=Listed(item, item), test=None), dure.DataParallel(2), dure.Processes(2)
        )
