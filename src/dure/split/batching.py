"""Concatenation of several clients' values to a batch, and division of its gradients by client.

The dimension of a value that counts examples is the dimension that grows between batches of two
sizes. A value without such a dimension, such as a common mask, must be equal at all clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dure.parallel.pipeline.cut import CutModel
from dure.parallel.pipeline.program import crossing
from dure.parallel.pipeline.trace import ValueSpec
from dure.split.leakage.guard import CutValue


class Batching:
    """Concatenation of clients' batches of these sizes, at all cuts.

    crossings: returns the `CutValue` of each value at each cut; called for several batches only.
    """

    def __init__(
        self, crossings: Callable[[], Sequence[Sequence[CutValue]]], sizes: Sequence[int]
    ) -> None:
        self.sizes = list(sizes)
        self.single = len(sizes) == 1
        if self.single:
            return
        into, *out = crossings()
        self._into = [one.dim for one in into]
        self._differentiable = [one.differentiable for one in into]
        # In the U-shape the server's part has outputs at the second cut.
        self._out = [one.dim for values in out for one in values]
        self._out_differentiable = [one.differentiable for values in out for one in values]

    def together(self, values: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the outputs of the heads, concatenated to the joint batch."""
        if self.single:
            return list(values[0])
        return [
            _cat(each, dim) for each, dim in zip(zip(*values, strict=True), self._into, strict=True)
        ]

    def gradients_apart(self, gradients: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the gradients of the heads' outputs, by client."""
        if self.single:
            return [list(gradients)]
        dims = [dim for dim, there in zip(self._into, self._differentiable, strict=True) if there]
        return self._split(gradients, dims)

    def apart_again(self, values: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the output of the server's part, by client."""
        return [list(values)] if self.single else self._split(values, self._out)

    def gradients_together(self, gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the gradients of the server's part's output for the joint batch."""
        if self.single:
            return list(gradients[0])
        dims = [
            dim for dim, there in zip(self._out, self._out_differentiable, strict=True) if there
        ]
        return [
            torch.cat(list(each), dim) if dim is not None else torch.stack(list(each)).sum(dim=0)
            for each, dim in zip(zip(*gradients, strict=True), dims, strict=True)
        ]

    def _split(self, values: Sequence[Tensor], dims: Sequence[int | None]) -> list[list[Tensor]]:
        parts = [
            [value] * len(self.sizes) if dim is None else list(torch.split(value, self.sizes, dim))
            for value, dim in zip(values, dims, strict=True)
        ]
        return [list(own) for own in zip(*parts, strict=True)] or [[] for _ in self.sizes]


def crossings(
    cut: CutModel,
    boundary: int,
    training: bool = True,
    sizes: tuple[int, int] | None = None,
) -> list[CutValue]:
    """Return the `CutValue` of each value at a cut.

    sizes: two batch sizes for the comparison; by default `cut.examples`, and twice that. Raises
    ValueError for a differentiable value of a whole batch.
    """
    few, many = sizes or (cut.examples, 2 * cut.examples)
    dims = _dims(cut, boundary, few, many, training)
    return [
        CutValue(dim, value.differentiable)
        for dim, value in zip(dims, values_at(cut, boundary, few, training), strict=True)
    ]


def values_at(
    cut: CutModel, boundary: int, examples: int, training: bool = True
) -> list[ValueSpec]:
    """Return the values at a cut for `examples` examples, in order."""
    trace = cut.trace(examples, training)
    nodes = crossing(trace, cut.homes(examples, training), cut.stages)[boundary]
    return [trace.value(node) for node in nodes]


def _dims(
    cut: CutModel, boundary: int, few: int, many: int, training: bool = True
) -> list[int | None]:
    """Return the dimension of each value that counts examples; None if there is none."""
    found: list[int | None] = []
    for one, other in zip(
        values_at(cut, boundary, few, training),
        values_at(cut, boundary, many, training),
        strict=True,
    ):
        grown = [n for n, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if a != b]
        if len(grown) > 1 or (grown and other.shape[grown[0]] * few != one.shape[grown[0]] * many):
            raise ValueError(
                f"a value at the cut has the shape {list(one.shape)} for {few} examples and "
                f"{list(other.shape)} for {many}: batches of several clients cannot be joined"
            )
        if not grown and one.differentiable:
            raise ValueError(
                f"a value at the cut, of shape {list(one.shape)}, belongs to a whole batch, so "
                "batches of several clients cannot be joined: cut the model elsewhere"
            )
        found.append(grown[0] if grown else None)
    return found


def _cat(values: Sequence[Tensor], dim: int | None) -> Tensor:
    if dim is not None:
        return torch.cat(list(values), dim)
    if any(not torch.equal(values[0], other) for other in values[1:]):
        raise ValueError(
            "a value at the cut that no dimension of examples has differs between clients: their "
            "batches cannot be joined"
        )
    return values[0]
