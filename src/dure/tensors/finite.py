"""Whether all numbers of a tensor are finite, in one pass where that is possible."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite.

    A product with itself says so in one pass, where it does not overflow.
    """
    flat = tensor.reshape(-1)
    if flat.dtype in (torch.float32, torch.float64) and math.isfinite(float(torch.dot(flat, flat))):
        return True
    return bool(tensor.isfinite().all())
