"""Test whether tensors share memory, element by element.

Start and end addresses decide most cases. Interleaved tensors, such as the columns of a matrix, are
painted into a mask of the memory that they span.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def end_address(tensor: Tensor) -> int:
    """Return the address after the last byte of a tensor with at least one element."""
    if tensor.is_contiguous():
        return tensor.data_ptr() + tensor.nbytes
    return tensor.data_ptr() + _span(tensor) * tensor.element_size()


def _span(tensor: Tensor) -> int:
    """Return the number of elements from a tensor's first to its last element in memory."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((length - 1) * stride for length, stride in steps)


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether two elements of a strided tensor share an address, as after `expand`."""
    if tensor.is_contiguous() or not tensor.numel():
        return False
    steps = sorted(
        (stride, length)
        for stride, length in zip(tensor.stride(), tensor.shape, strict=True)
        if length > 1
    )
    reach = 0
    for stride, length in steps:
        if stride == 0:
            return True
        if stride <= reach:  # a step of this stride may reach an address of the inner dimensions
            return _is_painted_twice([tensor])
        reach += stride * (length - 1)
    return False


def is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether both tensors are the same contiguous elements in the same order."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.numel() == other.numel()
        and one.dtype == other.dtype
        and one.is_contiguous()
        and other.is_contiguous()
    )


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share an element."""
    if not one.numel() or not other.numel():
        return False
    if one.data_ptr() >= end_address(other) or other.data_ptr() >= end_address(one):
        return False
    return _is_painted_twice([one, other])


def any_overlap(tensors: Iterable[Tensor]) -> bool:
    """Return whether any two of the tensors share an element."""
    near: list[Tensor] = []
    reach = 0
    for tensor in sorted((t for t in tensors if t.numel()), key=Tensor.data_ptr):
        if tensor.data_ptr() >= reach:
            if _is_painted_twice(near):
                return True
            near = []
        near.append(tensor)
        reach = max(reach, end_address(tensor))
    return _is_painted_twice(near)


def _is_painted_twice(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors with adjoining memory share an element.

    Tensors with different element sizes, or at unaligned offsets, count as overlapping.
    """
    if len(tensors) < 2 and all(tensor.is_contiguous() for tensor in tensors):
        return False
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    begin = min(map(Tensor.data_ptr, tensors))
    size = tensors[0].element_size()
    if any(t.element_size() != size or (t.data_ptr() - begin) % size for t in tensors):
        return True
    mask = torch.zeros((max(map(end_address, tensors)) - begin) // size, dtype=torch.bool)
    elements = 0
    for tensor in tensors:
        place = (tensor.data_ptr() - begin) // size
        mask.as_strided(tensor.shape, tensor.stride(), place).fill_(True)
        elements += tensor.numel()
    return int(mask.sum()) < elements
