"""Measured data of a run: test data, and optionally a validation set.

    test          measured, without influence on the run
    validation    measured too; ends a run early, and chooses its best model

A validation set that is a share of the training data is drawn once, under the run's seed, before
the data are divided among workers or clients: no worker trains on it. Of n examples ceil(share * n)
are drawn; for examples in memory with labels, the share of each class (`dure.data.holdout`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from dure.data.datasets import DatasetExamples
from dure.data.examples import Examples
from dure.data.holdout import hold_out

OWN = "give separate examples, Task(validation=examples)"


class EvaluationExamples(Examples):
    """Test examples with a validation set; in all other respects the test examples.

    test: None without test data; the examples of the validation set are then shown instead.
    """

    def __init__(self, test: Examples | None, validation: Examples) -> None:
        self.test = test
        self.validation = validation
        self.shown = validation if test is None else test
        self.keys = self.shown.keys
        self.classes = self.shown.classes
        self.draws = self.shown.draws

    def __len__(self) -> int:
        return len(self.shown)

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        return self.shown.batch(indices)

    def labels(self) -> Tensor | None:
        return self.shown.labels()

    def sets(self) -> Mapping[str, Examples]:
        tests = {} if self.test is None else self.test.sets()
        return {**tests, "validation": self.validation}

    def to(self, dtype: torch.dtype) -> Examples:
        test = None if self.test is None else self.test.to(dtype)
        return EvaluationExamples(test, self.validation.to(dtype))


def split_validation(train: Examples, share: float, seed: int) -> tuple[Examples, Examples]:
    """Return (training examples, validation set), with keys; a pure function of the seed.

    Raises ValueError for examples that cannot be split, or if no training examples would be left.
    """
    if type(train) not in (DatasetExamples, Examples):
        raise ValueError(
            f"validation={share} is a fraction of the training data, which are read in their own "
            f"order and cannot be divided ({type(train).__name__}): {OWN}"
        )
    # A dataset would have to be read as a whole to get its labels.
    labels = train.labels() if type(train) is Examples else None
    strata = [0] * len(train) if labels is None else labels.tolist()
    trained, kept = hold_out(strata, share, seed)
    if not len(trained):
        raise ValueError(f"validation={share} of {len(train)} examples leaves none to train on")
    rest = subset_of(train, trained)
    rest.sampling = train.sampling.of(trained)
    return rest, subset_of(train, kept)


def subset_of(whole: Examples, indices: Tensor) -> Examples:
    """Return the examples at `indices` as a set of its own, with keys, classes and labels."""
    keys = None if whole.keys is None else [whole.keys[index] for index in indices.tolist()]
    if isinstance(whole, DatasetExamples):
        part = _Part(whole.dataset, indices.tolist())
        return DatasetExamples(part, keys, whole.collate, whole.keeps_labels)
    inputs, targets = tree_map(
        lambda leaf: leaf.index_select(0, indices), (whole.inputs, whole.targets)
    )
    return Examples(inputs, targets, keys, whole.classes)


def _numbers(targets: Any, indices: Sequence[int], count: int) -> Tensor | None:
    """Return some of a dataset's targets, if they are numbers for each item; else None."""
    if targets is None:
        return None
    try:
        numbers = torch.as_tensor(targets)
    except (TypeError, ValueError, RuntimeError):  # names, structures
        return None
    return numbers[list(indices)] if numbers.ndim and len(numbers) == count else None


class _Part(Dataset[Any]):
    """Some items of a dataset, with its attributes about labels."""

    def __init__(self, dataset: Any, indices: Sequence[int]) -> None:
        self.dataset = dataset
        self.indices = indices
        self.classes = getattr(dataset, "classes", None)
        self.targets = _numbers(getattr(dataset, "targets", None), indices, len(dataset))

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.indices[index]]
