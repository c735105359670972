"""Check of a tensor for NaN and infinity, in a single pass if possible."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def all_finite(tensor: Tensor) -> bool:
    """Return whether no element is NaN or infinite.

    The dot product of the tensor with itself decides in a single pass unless the product overflows.
    """
    flat = tensor.reshape(-1)
    if flat.dtype in (torch.float32, torch.float64) and math.isfinite(float(torch.dot(flat, flat))):
        return True
    return bool(tensor.isfinite().all())
