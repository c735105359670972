"""The elements of a tensor as plain memory, and their check for NaN and infinity."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def materialised(tensor: Tensor) -> Tensor:
    """Return the tensor with its elements in memory as they are, one after another.

    torch keeps the conjugation and the sign of complex tensors as flags, which raw bytes would
    lose. The result is the tensor itself where it has neither flags nor gaps.
    """
    return tensor.resolve_conj().resolve_neg().contiguous()


def element_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of the elements, uint8 of shape (nbytes,).

    The result is a view of the tensor's memory, or a copy if the tensor has flags or gaps.
    """
    return materialised(tensor.detach()).view(-1).view(torch.uint8)


def all_finite(tensor: Tensor) -> bool:
    """Return whether no element is NaN or infinite.

    The dot product of the tensor with itself decides in a single pass unless the product overflows.
    """
    flat = tensor.reshape(-1)
    if flat.dtype in (torch.float32, torch.float64) and math.isfinite(float(torch.dot(flat, flat))):
        return True
    return bool(tensor.isfinite().all())
