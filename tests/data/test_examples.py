"""A set of examples, and batches of it."""

from __future__ import annotations

import re

import numpy
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
)

from dure.data.conversion import as_examples
from dure.data.datasets import DatasetExamples
from dure.data.examples import Examples


class Pairs(Dataset):
    """Example i is ([i, i], target(i)); counts how often it is read."""

    def __init__(self, n=5, target=lambda i: i % 3):
        self.n, self.target, self.read = n, target, 0

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        self.read += 1
        return torch.full((2,), float(index)), self.target(index)


def test_a_batch_has_the_examples_at_its_indices_in_their_order():
    examples = Examples(torch.arange(10.0).view(5, 2), torch.arange(5))
    inputs, targets = examples.batch(torch.tensor([4, 0, 4]))
    assert inputs.tolist() == [[8, 9], [0, 1], [8, 9]]
    assert targets.tolist() == [4, 0, 4]


def test_inputs_and_targets_may_be_structures():
    inputs = {"image": torch.arange(6.0).view(3, 2), "pair": (torch.arange(3), [torch.arange(3)])}
    examples = Examples(inputs, (torch.zeros(3), torch.arange(3)))
    batch, (first, second) = examples.batch(torch.tensor([2, 1]))
    assert batch["image"].tolist() == [[4, 5], [2, 3]]
    assert isinstance(batch["pair"], tuple)
    assert batch["pair"][1][0].tolist() == second.tolist() == [2, 1]
    assert first.tolist() == [0, 0]
    assert len(examples) == 3
    assert examples.labels() is None


def test_a_data_set_gives_the_same_batches_as_its_tensors():
    tensors = TensorDataset(torch.randn(6, 2), torch.arange(6))
    direct, one_by_one = as_examples(tensors), DatasetExamples(tensors)
    assert type(direct) is Examples
    indices = torch.tensor([5, 2, 2])
    for a, b in zip(direct.batch(indices), one_by_one.batch(indices), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("targets", "labels"),
    [
        (torch.tensor([2, 0]), [2, 0]),
        (torch.tensor([1, 0], dtype=torch.uint8), [1, 0]),
        (torch.tensor([1.0, 0.0]), None),
        (torch.tensor([[1], [0]]), None),
    ],
)
def test_labels_are_whole_numbers_one_an_example(targets, labels):
    found = Examples(torch.zeros(2, 1), targets).labels()
    assert (found.tolist() if found is not None else None) == labels
    assert found is None or found.dtype == torch.int64


@pytest.mark.parametrize(
    ("target", "labels"),
    [
        (lambda i: i % 3, [0, 1, 2, 0, 1]),
        (lambda i: numpy.int64(i), [0, 1, 2, 3, 4]),
        (lambda i: torch.tensor(i), [0, 1, 2, 3, 4]),
        (lambda i: float(i), None),
        (lambda i: torch.tensor(float(i)), None),
        (lambda i: torch.ones(4), None),
        (lambda i: {"box": torch.ones(4)}, None),
        (lambda i: "cat", None),
    ],
)
def test_a_data_set_has_labels_only_if_its_targets_are_whole_numbers(target, labels):
    found = as_examples(Pairs(target=target)).labels()
    assert (found.tolist() if found is not None else None) == labels


def test_a_data_set_s_own_targets_are_taken_without_reading_its_examples():
    data = Pairs()
    data.targets = [1, 0, 1, 1, 0]
    examples = as_examples(data)
    assert examples.labels().tolist() == [1, 0, 1, 1, 0]
    assert data.read == 0
    data = Pairs()
    data.targets = ["cat", "dog", "cat", "cat", "dog"]
    assert as_examples(data).labels() is None


def test_labels_of_a_data_set_are_read_once():
    data = Pairs(5)
    examples = as_examples(data)
    for _ in range(3):
        examples.labels()
    assert data.read <= 6


def test_a_part_of_a_data_set_has_its_own_labels():
    assert as_examples(Subset(Pairs(5), [4, 2])).labels().tolist() == [1, 2]


@pytest.mark.parametrize(
    "make", [lambda data: data, lambda data: Examples(*data.batch(torch.arange(5)))]
)
def test_only_floating_point_tensors_change_their_dtype(make):
    data = make(DatasetExamples(Pairs()))
    inputs, targets = data.to(torch.float64).batch(torch.tensor([1]))
    assert (inputs.dtype, targets.dtype) == (torch.float64, torch.int64)
    assert data.batch(torch.tensor([1]))[0].dtype == torch.float32


def test_keys_and_classes_go_along():
    examples = Examples(
        torch.zeros(2, 1), torch.tensor([0, 1]), keys=("a", "b"), classes=("cat", "dog")
    )
    for same in (examples, examples.to(torch.float64), as_examples(examples)):
        assert (same.keys, same.classes) == (["a", "b"], ["cat", "dog"])
    assert examples.to(torch.float32) is examples
    data = Pairs(2)
    data.classes = ["cat", "dog"]
    listed = DatasetExamples(data, keys=["a", "b"]).to(torch.float64)
    assert (listed.keys, listed.classes) == (["a", "b"], ["cat", "dog"])


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


class CountedStream(Stream):
    def __len__(self):
        return 4


class NoItems(Dataset):
    """torch's own class gives it a `__getitem__`, which only raises."""

    def __len__(self):
        return 4


class NoLength(Pairs):
    def __len__(self):
        raise NotImplementedError("nobody knows")


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (
            lambda: Subset(CountedStream(), [0, 1]),
            "a CountedStream can only be read from its start",
        ),
        (
            lambda: Subset(Subset(NoItems(), [0, 1]), [0]),
            "a NoItems can only be read from its start",
        ),
        (lambda: ConcatDataset([Pairs(), NoItems()]), "a NoItems can only be read from its start"),
        (NoLength, "the dataset has no length (NotImplementedError: nobody knows)"),
    ],
)
def test_what_cannot_be_read_by_index_is_refused(make, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        as_examples(make())


def test_parts_of_lists_are_lists():
    both = ConcatDataset([Subset(Pairs(), [1, 3]), Pairs()])
    assert as_examples(both).batch(torch.tensor([0, 2]))[0].tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Examples(torch.zeros(3), torch.zeros(2)), "different lengths: [2, 3]"),
        (lambda: Examples(torch.zeros(2), torch.zeros(2), keys=["a"]), "different lengths: [1, 2]"),
        (lambda: Examples(torch.zeros(0), torch.zeros(0)), "there are no examples"),
        (lambda: Examples([1, 2], torch.zeros(2)), "examples have to be (inputs"),
        (lambda: Examples((), ()), "examples have to be (inputs"),
        (lambda: Examples(torch.tensor(1.0), torch.tensor(1)), "of shape (n, ...)"),
        (lambda: DatasetExamples(Pairs(0)), "the dataset has length 0"),
        (lambda: DatasetExamples(Pairs(2), keys=["a"]), "2 examples, but 1 keys"),
        (lambda: as_examples(Stream()), "has no length: give dure.StreamExamples"),
        (lambda: as_examples(3), "data of the type int are not supported"),
        (lambda: as_examples(None), "data of the type NoneType are not supported"),
    ],
)
def test_what_cannot_be_examples_is_refused(make, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        make()
