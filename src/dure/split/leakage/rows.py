"""Conversion of the values at a cut to a matrix with a row per example, and back.

Several tensors may cross, such as those of a skip connection; the row of an example concatenates
the example's numbers of all tensors. A complex number becomes two real numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def as_rows(tensors: Sequence[Tensor], dims: Sequence[int]) -> Tensor:
    """Return the matrix, of shape (n, d). dims: each tensor's dimension that counts examples."""
    parts = [
        _real(tensor).movedim(dim, 0).reshape(tensor.shape[dim], -1)
        for tensor, dim in zip(tensors, dims, strict=True)
    ]
    return torch.cat(parts, dim=1)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def from_rows(rows: Tensor, like: Sequence[Tensor], dims: Sequence[int]) -> list[Tensor]:
    """Return tensors of the shapes and dtypes of `like`; the inverse of `as_rows`."""
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
    """Return the floating-point inputs as a matrix; None if there are none.

    inputs: the leaves of a model's inputs, whose first dimension is the example.
    """
    floats = [one for one in inputs if isinstance(one, Tensor) and one.is_floating_point()]
    return as_rows(floats, [0] * len(floats)) if floats else None
