"""A set of examples, and batches of it by index.

Strategies request batches as lists of indices, because they decide which worker trains on which
example. Tensors are indexed directly, which costs a gather a batch. `dure.data.conversion` converts
other types of data to examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from dure.data.arrays import as_tensors, columns_of
from dure.data.block_shuffling import BlockLayout, Order
from dure.data.keys import keys_of
from dure.data.sampling import SHUFFLED, Sampling
from dure.errors import DataError
from dure.machine.devices import is_cpu, to_device

LABELS = ("labels", "label", "label_ids")
"""Possible names of a dict's target column; the first that exists is the target."""


class Examples:
    """Examples held in tensors.

    Args:
        inputs: a tensor of shape (n, ...), or a tuple, list or dict of such tensors: the model's
            argument. NumPy arrays and pandas frames become tensors.
        targets: a tensor of shape (n, ...), or a structure of such tensors, which the loss compares
            with the outputs.
        keys: the natural owner of each example (a hospital, a speaking role), n texts or numbers
            (`dure.data.keys`); None without owners.
        classes: names of the labels, if the targets are labels.

    `draws` is whether reading an example may draw random numbers, as transforms do. If ranks have
    data of their own (`dure.data.rank_examples`), `first` is the index of an example of this rank,
    `rank_counts` has the number of examples of each rank, and `counted` is whether these numbers
    are known yet.

    Raises ValueError if the lengths differ, there is no example, keys are invalid, or the tensors
    are not in the CPU's memory.
    """

    first: int = 0
    rank_counts: tuple[int, ...] | None = None
    counted: bool = True
    sampling: Sampling = SHUFFLED
    columns: Sequence[str] | None = None
    """Names of the columns, if the inputs were a frame."""

    def __init__(
        self,
        inputs: Any,
        targets: Any,
        keys: Sequence[Any] | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        self.columns = columns_of(inputs)
        inputs, targets = as_tensors((inputs, targets))
        leaves = tree_leaves((inputs, targets))
        if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
            raise ValueError("examples have to be (inputs, targets), each tensors or arrays")
        if any(leaf.ndim == 0 for leaf in leaves):
            raise ValueError("examples need tensors of shape (n, ...), but one is a single number")
        away = next((leaf.device for leaf in leaves if leaf.device.type != "cpu"), None)
        if away is not None:
            raise ValueError(
                f"examples have to be in CPU memory, and these are on {away}: call cpu() on them; "
                "dure moves each batch to the model's device"
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
        """Return inputs and targets of the examples at `indices`, an int64 tensor of shape (b,)."""
        # The usual case without a tree traversal, in every batch of every client.
        if self._plain:
            return self.inputs.index_select(0, indices), self.targets.index_select(0, indices)
        return cast(
            "tuple[Any, Any]",
            tree_map(lambda leaf: leaf.index_select(0, indices), (self.inputs, self.targets)),
        )

    def arrangement(self) -> BlockLayout:
        """Return the layout of the examples in blocks."""
        return BlockLayout.whole(len(self))

    def order(self, part: Tensor | None = None) -> Order:
        """Return the order in which an epoch visits the examples, or a part of them.

        part: indices; the order then has positions within the part.
        """
        return self.sampling.order(len(self), part)

    def parts(self) -> Sequence[Tensor] | None:
        """Return the indices of each rank's examples, or None if ranks share the data."""
        return None

    def part(self, indices: Tensor, rank: int, ranks: int) -> Tensor:
        """Return a rank's share of a joint batch.

        The first ranks have another if the batch does not divide; of a small batch some ranks have
        none.
        """
        return indices.tensor_split(ranks)[rank]

    def labels(self) -> Tensor | None:
        """Return a class label for each example, int64 of shape (n,); None for other targets."""
        targets = self.targets
        if isinstance(targets, Tensor) and targets.ndim == 1 and not targets.is_floating_point():
            return targets.long()
        return None

    def sets(self) -> Mapping[str, Examples]:
        """Return the sets that a model is measured on, by name (`dure.data.validation_split`)."""
        return {"test": self}

    def to(self, dtype: torch.dtype) -> Examples:
        """Return the same examples with floating-point inputs in `dtype`; self if none changes.

        Targets keep their dtype.
        """
        inputs = as_dtype(self.inputs, dtype)
        same = zip(tree_leaves(inputs), tree_leaves(self.inputs), strict=True)
        if all(a is b for a, b in same):
            return self
        converted = Examples(inputs, self.targets, self.keys, self.classes)
        converted.columns = self.columns
        converted.sampling = self.sampling
        return converted


def as_dtype(inputs: Any, dtype: torch.dtype | None) -> Any:
    """Return the same structure with floating-point tensors in `dtype`; None changes none.

    The labels in a dict, for a model with a loss of its own, keep their dtype.
    """
    if dtype is None:
        return inputs
    converted = cast_floating(inputs, dtype)
    if isinstance(inputs, dict):
        converted.update({name: inputs[name] for name in LABELS if name in inputs})
    return converted


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """Return the same structure with every floating-point tensor in `dtype`."""

    def convert(leaf: Any) -> Any:
        floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if floating else leaf

    return tree_map(convert, tree)


def reader_on(examples: Examples, device: torch.device) -> Callable[[Tensor], tuple[Any, Any]]:
    """Return a function from indices to inputs and targets on a device."""
    if is_cpu(device):
        return examples.batch

    def read(indices: Tensor) -> tuple[Any, Any]:
        batch: tuple[Any, Any] = to_device(examples.batch(indices), device)
        return batch

    return read


class NoExamples(Examples):
    """Examples of a server whose clients have the data: none."""

    def __init__(self) -> None:
        self.inputs = self.targets = None
        self.keys = None
        self.classes = None
        self.draws = False
        self._length = 0

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        raise DataError("the task has no training data, and only a server can run without them")

    def labels(self) -> Tensor | None:
        return None

    def to(self, dtype: torch.dtype) -> Examples:
        return self
