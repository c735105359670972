"""Buckets of a few small tensors, and what the tests of compression ask of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dure.collectives import Group
from dure.collectives.compression import (
    QSGD,
    Cast,
    Compression,
    Compressor,
    Int8,
    NoCompression,
    OneBit,
    PowerSGD,
    Sign,
    TopK,
)

Shape = tuple[int, ...]

SHAPES: list[Shape] = [(3, 4), (5,), (2, 3, 2, 2), (), (10, 9)]

ALL: list[Compression] = [
    NoCompression(),
    Cast("bfloat16"),
    Cast("float16"),
    TopK(0.1),
    QSGD(1, 8),
    QSGD(7, 16),
    QSGD(1000),
    Int8(),
    OneBit(),
    Sign(),
    PowerSGD(1, 0),
    PowerSGD(2, 1.5, 1),
]
REMEMBERING = [compression for compression in ALL if compression.remembers]


def numbers(shape: Shape, *position: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers that are a function of the position."""
    seed = sum(place * 1009**power for power, place in enumerate(position)) + 7919 * len(shape)
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def bucket(
    rank: int, call: int, shapes: Sequence[Shape] = SHAPES, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """The tensors of a rank in a call."""
    return [numbers(shape, index, rank, call, dtype=dtype) for index, shape in enumerate(shapes)]


def joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def sent(compressor: Compressor, tensors: Sequence[Tensor], group: Group | None = None) -> Tensor:
    """The sum that the compressor makes of the tensors, which are left as they are, as a vector."""
    copies = [tensor.clone() for tensor in tensors]
    compressor.all_reduce(copies, Group() if group is None else group)
    return joined(copies)


def error_of(compressor: Compressor) -> Tensor:
    error = compressor.state()["error"]
    assert isinstance(error, Tensor)
    return error
