"""All outputs and targets of the test data, for metrics that need them at once.

Every rank stores those of its share on the CPU; a single rank then gets all of them, in the order
of the examples. They cost that rank the bytes of all outputs and targets, and of its own share
again; the others their share.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from dure.collectives.group import Group


class GatheredOutputs:
    """Outputs and targets of consecutive examples, batch by batch.

    Args:
        share: number of examples of this rank.
        examples: number of examples of all ranks.
        most: largest bytes of the outputs and targets of all ranks.
        metrics: names of the metrics that need them, for errors.
    """

    def __init__(self, share: int, examples: int, most: int, metrics: Sequence[str]) -> None:
        self.share = share
        self.examples = examples
        self.most = most
        self.metrics = metrics
        self.count = 0
        self._leaves: list[Any] = []

    def add(self, outputs: Any, targets: Any, count: int) -> None:
        """Store the outputs and targets of the next `count` examples.

        Raises ValueError if batches cannot be concatenated, or all would take too much memory.
        """
        leaves, spec = tree_flatten((outputs, targets))
        shapes = [self._of_an_example(leaf, count) for leaf in leaves]
        if not self.count:
            self._spec = spec
            self._shapes = shapes
            self._outputs = len(tree_flatten(outputs)[0])
            self._check_memory(leaves, count)
            self._leaves = [self._room(leaf, count) for leaf in leaves]
        if spec != self._spec:
            raise self._refusal(
                f"the model returns {spec} for one batch and {self._spec} for others"
            )
        for number, (leaf, shape) in enumerate(zip(leaves, shapes, strict=True)):
            if shape != self._shapes[number]:
                raise self._refusal(
                    f"{self._name(number)} differ between batches: {_told(shape)} and "
                    f"{_told(self._shapes[number])}"
                )
            if isinstance(leaf, Tensor):
                rows = len(leaf) // count
                start = self.count * rows
                self._leaves[number][start : start + len(leaf)] = leaf.detach()
        self.count += count

    def fingerprint(self) -> float:
        """Return a number that is equal on ranks whose outputs can be concatenated."""
        return float(zlib.crc32(repr((self._spec, self._shapes)).encode())) if self.count else 0.0

    def gathered(self, group: Group, counts: Sequence[int], root: int) -> tuple[Any, Any] | None:
        """Return (outputs, targets) of all ranks in order of rank, on the root; elsewhere None.

        counts: number of stored examples of each rank. Collective over all ranks with stored
        examples.
        """
        with group.during("gather of outputs for metrics"):
            # Unmetered, since an evaluation is no training traffic.
            quiet = group.unmetered()
            if group.rank == root:
                return self.trees(self._received(quiet, counts))
            for leaf in self._leaves:
                if isinstance(leaf, Tensor):
                    quiet.send(_bytes(leaf), root)
            return None

    def _received(self, group: Group, counts: Sequence[int]) -> list[Any]:
        """Return the leaves of all ranks, concatenated in order of rank."""
        whole = [
            torch.empty((len(leaf) // self.count * sum(counts), *leaf.shape[1:]), dtype=leaf.dtype)
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in self._leaves
        ]
        start = 0
        for rank, count in enumerate(counts):
            for mine, all_of_it in zip(self._leaves, whole, strict=True):
                if isinstance(mine, Tensor):
                    rows = len(mine) // self.count
                    part = all_of_it[start * rows : (start + count) * rows]
                    if rank == group.rank:
                        part.copy_(mine)
                    elif count:
                        group.receive(_bytes(part), rank)
            start += count
        return whole

    def trees(self, leaves: Sequence[Any] | None = None) -> tuple[Any, Any]:
        """Return (outputs, targets) of these leaves; by default of the stored leaves."""
        outputs, targets = tree_unflatten(list(leaves or self._leaves), self._spec)
        return outputs, targets

    def _of_an_example(self, leaf: Any, count: int) -> Any:
        """Return the invariant of all batches: dtype and shape; for a non-tensor, the value."""
        if not isinstance(leaf, Tensor):
            if leaf is None or isinstance(leaf, (bool, int, float, str)):
                return leaf
            raise self._refusal(f"a {type(leaf).__name__} cannot be concatenated")
        # Several rows an example, such as the positions of a text, are allowed too.
        if leaf.ndim and not len(leaf) % count and len(leaf) and leaf.layout == torch.strided:
            return leaf.dtype, (len(leaf) // count, *leaf.shape[1:])
        raise self._refusal(
            f"a tensor of shape {list(leaf.shape)} for {count} examples cannot be concatenated"
        )

    def _room(self, leaf: Any, count: int) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.empty((len(leaf) // count * self.share, *leaf.shape[1:]), dtype=leaf.dtype)

    def _check_memory(self, leaves: Sequence[Any], count: int) -> None:
        of_one = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor)) / count
        if of_one * self.examples > self.most:
            raise self._refusal(
                f"those of {self.examples:,} examples have {of_one * self.examples:,.0f} bytes, "
                f"more than the {self.most:,} of Task(metric_memory=...)"
            )

    def _name(self, number: int) -> str:
        if number < self._outputs:
            return f"outputs (tensor {number + 1} of {self._outputs})"
        return f"targets (tensor {number + 1 - self._outputs})"

    def _refusal(self, why: str) -> ValueError:
        return gathering_error(self.metrics, why)


def gathering_error(metrics: Sequence[str], why: str) -> ValueError:
    """Return the error for metrics that need everything at once, with the reason and the remedy."""
    return ValueError(
        f"the metric {' or '.join(map(repr, metrics))} needs all outputs and targets at once, but "
        f"{why}; define it as sums over batches: dure.SumMetric(update, compute), or a pair (sum, "
        "count)"
    )


def on_cpu(tree: Any) -> Any:
    """Return the tree with all tensors on the CPU, without gradients."""
    return tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, tree)


def _told(shape: Any) -> str:
    return f"{list(shape[1])} {shape[0]}" if isinstance(shape, tuple) else repr(shape)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the same memory as bytes, which every transport supports."""
    return tensor.view(-1).view(torch.uint8)
