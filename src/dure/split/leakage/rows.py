"""What crosses a cut as one matrix, a row an example, and back.

Several tensors may cross, such as those of a skip connection; the row of an example is all that is
its own, one tensor after another. A complex number is two real ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def as_rows(tensors: Sequence[Tensor], dims: Sequence[int]) -> Tensor:
    """The matrix, of shape (n, d). dims: which dimension of each tensor counts examples."""
    parts = [
        _real(tensor).movedim(dim, 0).reshape(tensor.shape[dim], -1)
        for tensor, dim in zip(tensors, dims, strict=True)
    ]
    return torch.cat(parts, dim=1)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def from_rows(rows: Tensor, like: Sequence[Tensor], dims: Sequence[int]) -> list[Tensor]:
    """The inverse of `as_rows`: tensors of the shapes and dtypes of `like`."""
    real = [_real(tensor) for tensor in like]
    widths = [tensor.numel() // tensor.shape[dim] for tensor, dim in zip(real, dims, strict=True)]
    parts = torch.split(rows, widths, dim=1)
    found = [
        part.reshape(tensor.movedim(dim, 0).shape).movedim(0, dim).to(tensor.dtype).contiguous()
        for part, tensor, dim in zip(parts, real, dims, strict=True)
    ]
    return [
        torch.view_as_complex(part) if tensor.is_complex() else part
        for part, tensor in zip(found, like, strict=True)
    ]


def numbers_of(inputs: Sequence[object]) -> Tensor | None:
    """The inputs that are floating-point numbers as a matrix; None where there are none.

    inputs: the leaves of a model's inputs, whose first dimension is the example.
    """
    floats = [one for one in inputs if isinstance(one, Tensor) and one.is_floating_point()]
    return as_rows(floats, [0] * len(floats)) if floats else None
