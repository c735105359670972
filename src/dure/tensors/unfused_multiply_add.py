"""Sums of multiples with separate multiplication and addition: the same bits on every x86 CPU.

torch's `add(…, alpha=…)`, `addcdiv` and matrix products round the product and the sum once on
processors with fused multiply-add (AVX2 and AVX-512), and twice on processors without. A product
alone and a sum alone are rounded the same way everywhere (IEEE 754).

Sums over the elements of a tensor (norms, dot products) are not covered: their order follows the
width of the processor's vectors.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

BLOCK = 2**17
"""Elements multiplied before the addition; a block of products stays in the processor's cache."""


def add_multiple(total: Tensor, tensor: Tensor, factor: float) -> Tensor:
    """Add factor·tensor to `total` in place and return `total`.

    tensor: the shape of `total`, and a dtype that is not wider than the dtype of `total`, in which
    the product is computed. Memory: a block, or a tensor if an argument is not contiguous or not on
    the CPU.
    """
    if factor == 1:
        return total.add_(tensor)
    if total.numel() <= BLOCK or not _in_one_piece(total, tensor):
        return total.add_(tensor.to(total.dtype) * factor)
    products = torch.empty(BLOCK, dtype=total.dtype)
    sums = total.view(-1)
    flat = tensor.view(-1)
    for start in range(0, len(sums), BLOCK):
        length = min(BLOCK, len(sums) - start)
        part = flat.narrow(0, start, length).to(total.dtype)
        product = torch.mul(part, factor, out=products[:length])
        sums.narrow(0, start, length).add_(product)
    return total


def square_root(tensor: Tensor) -> Tensor:
    """Return the square root of each element, as a new tensor.

    `torch.sqrt` may use a library of vector functions, whose last bit depends on the processor.
    NumPy uses the processor's instruction, which IEEE 754 defines.
    """
    if tensor.device.type != "cpu":
        return tensor.sqrt()
    root = torch.empty_like(tensor)
    np.sqrt(tensor.detach().numpy(), out=root.numpy())
    return root


def sum_of_multiples(rows: Tensor, factors: Tensor) -> Tensor:
    """Return (sum over i of factors[i]·rows[i]), from the first row to the last; overwrites `rows`.

    rows: shape (m, b), m at least 1. factors: shape (m,), of the same dtype.
    """
    rows.mul_(factors.to(rows.device).unsqueeze(1))
    total = rows[0]
    for row in rows[1:]:
        total.add_(row)
    return total


def _in_one_piece(*tensors: Tensor) -> bool:
    return all(tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in tensors)
