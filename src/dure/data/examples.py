"""A set of examples, and batches of it by index.

Strategies ask for batches as lists of indices, because who trains on which example is what they
decide. Tensors are indexed directly, which costs one gather a batch; any map-style
`torch.utils.data.Dataset` works too, example by example, as a DataLoader would do it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, cast

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from dure.data.arrangement import Arrangement, Order
from dure.data.keys import keys_of
from dure.errors import DataError, ExampleError, described
from dure.randomness.seeds import shuffled

_NO_LISTS = (str, bytes, Mapping, Tensor, numpy.ndarray)
"""What has a length and items, and is no list of pairs (input, target)."""


class Examples:
    """Examples held in tensors.

    inputs: a tensor of shape (n, ...), or a tuple, list or dict of such tensors: what the model is
        called with.
    targets: a tensor of shape (n, ...), or a structure of such: what the loss compares the outputs
        with.
    keys: the natural owner of each example (a hospital, a speaking role), n texts or numbers
        (`dure.data.keys`); None if there is none.
    classes: names of the labels, if the targets are labels.

    `draws` tells whether reading an example may draw random numbers, as transforms do.

    Raises ValueError if the lengths differ, there is no example, keys are none, or the tensors are
    not in the CPU's memory.

    Where ranks have data of their own (`dure.data.nodes`), `first` is the index of one that lies
    here, `lies` tells how many lie with each rank, and `counted` whether that is known yet.
    """

    first: int = 0
    lies: tuple[int, ...] | None = None
    counted: bool = True

    def __init__(
        self,
        inputs: Any,
        targets: Any,
        keys: Sequence[Any] | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        leaves = tree_leaves((inputs, targets))
        if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
            arrays = any(isinstance(leaf, numpy.ndarray) for leaf in leaves)
            hint = ", and torch.from_numpy() makes them of arrays" if arrays else ""
            raise ValueError(
                f"examples need tensors as inputs and targets: (inputs, targets){hint}"
            )
        if any(leaf.ndim == 0 for leaf in leaves):
            raise ValueError("examples need tensors of shape (n, ...), but one is a single number")
        away = next((leaf.device for leaf in leaves if leaf.device.type != "cpu"), None)
        if away is not None:
            raise ValueError(
                f"examples lie in the CPU's memory, and these are on {away}: call cpu() on them; "
                f"each batch goes to where the model is"
            )
        self.keys = keys_of(keys) if keys is not None else None
        lengths = {len(leaf) for leaf in leaves}
        if self.keys is not None:
            lengths.add(len(self.keys))
        if len(lengths) != 1:
            raise ValueError(f"inputs, targets and keys have different lengths: {sorted(lengths)}")
        if lengths == {0}:
            raise ValueError("there are no examples: inputs and targets have length 0")
        self.inputs = inputs
        self.targets = targets
        self.draws = False
        self.classes = list(classes) if classes is not None else None
        self._plain = isinstance(inputs, Tensor) and isinstance(targets, Tensor)
        self._length = lengths.pop()

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        """The inputs and targets of the examples at `indices`, an int64 tensor of shape (b,)."""
        # The usual case without a walk through a tree, in every batch of every client.
        if self._plain:
            return self.inputs.index_select(0, indices), self.targets.index_select(0, indices)
        return cast(
            "tuple[Any, Any]",
            tree_map(lambda leaf: leaf.index_select(0, indices), (self.inputs, self.targets)),
        )

    def arrangement(self) -> Arrangement:
        """How they lie."""
        return Arrangement.whole(len(self))

    def order(self, part: Tensor | None = None) -> Order:
        """In which order an epoch visits them, or a part of them.

        part: indices; then the order is of places in the part.
        """
        return partial(shuffled, len(self) if part is None else len(part))

    def parts(self) -> Sequence[Tensor] | None:
        """The indices of each rank's, where ranks have data of their own."""
        return None

    def part(self, indices: Tensor, rank: int, ranks: int) -> Tensor:
        """Which of a joint batch are a rank's.

        The first ranks have one more where it does not divide; of a small batch some have none.
        """
        return indices.tensor_split(ranks)[rank]

    def labels(self) -> Tensor | None:
        """One class label an example, int64 of shape (n,); None if targets are something else."""
        targets = self.targets
        if isinstance(targets, Tensor) and targets.ndim == 1 and not targets.is_floating_point():
            return targets.long()
        return None

    def sets(self) -> Mapping[str, Examples]:
        """The sets that a model is measured on, by the name of each (`dure.data.measured`)."""
        return {"test": self}

    def to(self, dtype: torch.dtype) -> Examples:
        """The same examples with floating-point tensors in `dtype`; self if nothing changes."""

        def convert(leaf: Tensor) -> Tensor:
            return leaf.to(dtype) if leaf.is_floating_point() else leaf

        inputs, targets = tree_map(convert, (self.inputs, self.targets))
        unchanged = all(
            a is b
            for a, b in zip(
                tree_leaves((inputs, targets)),
                tree_leaves((self.inputs, self.targets)),
                strict=True,
            )
        )
        return self if unchanged else Examples(inputs, targets, self.keys, self.classes)


class DatasetExamples(Examples):
    """Examples read one by one from a map-style dataset of (input, target) pairs.

    Its transforms are applied at every reading.
    """

    def __init__(self, dataset: Dataset[Any], keys: Sequence[Any] | None = None) -> None:
        items: Any = dataset
        self.dataset = items
        _check_by_index(dataset)
        self.draws = True
        self.keys = keys_of(keys) if keys is not None else None
        if self.keys is not None and len(self.keys) != len(items):
            raise ValueError(f"{len(items)} examples, but {len(self.keys)} keys")
        classes = getattr(dataset, "classes", None)
        self.classes = list(map(str, classes)) if isinstance(classes, (list, tuple)) else None
        self._convert: Callable[[Tensor], Tensor] = lambda leaf: leaf

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        items = [self._item(index) for index in indices.tolist()]
        # Checked here: `default_collate` would say what it cannot collate, and not which example.
        for index, item in zip(indices.tolist(), items, strict=True):
            _check_pair(index, item)
        inputs, targets = default_collate(items)
        return cast("tuple[Any, Any]", tree_map(self._convert, (inputs, targets)))

    def labels(self) -> Tensor | None:
        return self._labels

    @cached_property
    def _labels(self) -> Tensor | None:
        targets = getattr(self.dataset, "targets", None)
        if targets is None:
            # One example is read to see what targets are; all are read only if they are numbers.
            if not self._is_number(self._target(0)):
                return None
            targets = list(map(self._target, range(len(self))))
        try:
            # Whatever a dataset keeps as `targets` (lists, arrays, tensors) if it is numbers, one
            # an example.
            labels = torch.as_tensor(targets)
        except (TypeError, ValueError, RuntimeError):  # names, structures, tensors of many elements
            return None
        return labels.long() if labels.ndim == 1 and not labels.is_floating_point() else None

    def _target(self, index: int) -> Any:
        return self._item(index)[1]

    def _item(self, index: int) -> Any:
        """What the dataset has there. Raises ExampleError, which names it, where that raises."""
        try:
            return self.dataset[index]
        except Exception as error:
            raise ExampleError(
                f"the dataset cannot give example {index}: {described(error)}"
            ) from error

    @staticmethod
    def _is_number(target: Any) -> bool:
        return isinstance(target, (int, numpy.integer)) or (
            isinstance(target, Tensor) and target.ndim == 0
        )

    def to(self, dtype: torch.dtype) -> Examples:
        copy = DatasetExamples(self.dataset, self.keys)
        copy._convert = lambda leaf: (
            leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
        )
        return copy


class NoExamples(Examples):
    """What a server has whose clients have the data."""

    def __init__(self) -> None:
        self.inputs = self.targets = None
        self.keys = None
        self.classes = None
        self.draws = False
        self._length = 0

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        raise DataError("the task has no training data: only a server does without")

    def labels(self) -> Tensor | None:
        return None

    def to(self, dtype: torch.dtype) -> Examples:
        return self


def _check_by_index(dataset: Any) -> None:
    """Raises ValueError for a dataset that is no list of examples to be read by index."""
    kind = type(dataset)
    # torch's own class has the method, which only raises.
    by_index = getattr(kind, "__getitem__", Dataset.__getitem__) is not Dataset.__getitem__
    if isinstance(dataset, IterableDataset) or not by_index or not hasattr(kind, "__len__"):
        raise ValueError(
            f"a {kind.__name__} is read from its start: a dataset needs __len__ and __getitem__; "
            f"iterable datasets cannot be divided by index"
        )
    # What is made of a stream, such as a part of one, can be read no other way.
    for part in _parts_of(dataset):
        _check_by_index(part)
    try:
        length = len(dataset)
    except Exception as error:
        raise ValueError(
            f"the dataset has no length ({described(error)}), and what has none "
            f"cannot be divided by index"
        ) from error
    if length == 0:
        raise ValueError("there are no examples: the dataset has length 0")


def _parts_of(dataset: Any) -> Sequence[Any]:
    """The datasets that one of torch's is made of."""
    if isinstance(dataset, Subset):
        return [dataset.dataset]
    if isinstance(dataset, (ConcatDataset, StackDataset)):
        return [one for one in tree_leaves(dataset.datasets) if isinstance(one, Dataset)]
    return []


def _check_pair(index: int, item: Any) -> None:
    """Raises ValueError for an item that is no pair of an input and a target."""
    # Checked here: `default_collate` would say what it cannot collate, and not which example.
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        what = f"{type(item).__name__}{f' of {len(item)}' if hasattr(item, '__len__') else ''}"
        raise ValueError(
            f"item {index} of the dataset is a {what}: give (input, target), of which either may "
            f"be a tuple or a dict"
        )
    if isinstance(item[1], str):
        raise ValueError(
            f"the target of item {index} is the text {item[1]!r}: give the index of its class"
        )


def as_examples(data: Any) -> Examples:
    """Examples from what users have.

    data: Examples, (inputs, targets), a TensorDataset, or a map-style Dataset.

    Raises ValueError if `data` is none of these.
    """
    if isinstance(data, Examples):
        return data
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        return Examples(*data.tensors)
    if isinstance(data, (tuple, list)) and len(data) == 2:
        return Examples(*data)
    by_index = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    # These have both, and are no lists of examples.
    if isinstance(data, Dataset) or (by_index and not isinstance(data, _NO_LISTS)):
        return DatasetExamples(data)
    raise ValueError(
        f"a {type(data).__name__} cannot be trained on: give (inputs, targets), dure.Examples or a "
        f"map-style Dataset"
    )
