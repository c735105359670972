"""Tensors as bytes: names of dtypes, alignment, and views of received memory.

A dtype's name in a message is looked up in a fixed list and never evaluated. Shapes are checked
before memory is allocated, and a received tensor is a view of the received bytes: no elements are
copied, and no code is executed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNED = 16
"""Alignment in bytes: the size of the largest element, a complex number in double precision.

Memory that Python allocates starts at a multiple of this number, so every element is aligned.
"""

_MOST_DIMENSIONS = 64
"""Maximum dimensions of a torch tensor. A product of many more large numbers would take hours."""

_MOST_ELEMENTS = 1 << 48
"""More elements than any memory has. For larger shapes torch raises other errors, even if empty."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex128,
        torch.complex64,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
"""Dtypes that a message may have, by name."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""Names of the dtypes in `DTYPES`."""

if sys.byteorder != "little":  # elements are sent in the byte order of memory
    raise ImportError("dure's messages are little-endian, but this machine is not")


def view_at(
    content: bytearray | memoryview,
    at: int,
    dtype: torch.dtype,
    shape: torch.Size | tuple[int, ...],
) -> Tensor:
    """Return the tensor whose elements begin at `at`; it shares the memory and keeps it alive."""
    count = math.prod(shape)
    if not count:  # a tensor without elements has no position in memory
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype, count=count, offset=at).view(shape)


def may_be_shape(shape: Sequence[int]) -> bool:
    """Return whether torch supports tensors of this shape."""
    if len(shape) > _MOST_DIMENSIONS or any(extent < 0 for extent in shape):
        return False
    return math.prod(extent for extent in shape if extent) <= _MOST_ELEMENTS


def aligned(at: int) -> int:
    """Return the next multiple of `ALIGNED`, at which a tensor may begin."""
    return -(-at // ALIGNED) * ALIGNED
