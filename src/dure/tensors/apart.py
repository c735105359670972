"""Sums of multiples, multiplied and added apart, so that every x86 processor gives the same bits.

torch's `add(…, alpha=…)`, its `addcdiv` and matrix products round once for a product and a sum
where the processor can (fused multiply-add, with AVX2 and AVX-512), and twice where it cannot. A
product by itself, and a sum by itself, are rounded the same way everywhere (IEEE 754).

Sums over the elements of one tensor (norms, dot products) are another matter: their order follows
the width of a processor's vectors.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

BLOCK = 2**17
"""Elements that are multiplied before they are added: they stay in the processor's cache."""


def add_multiple(total: Tensor, tensor: Tensor, factor: float) -> Tensor:
    """total + factor·tensor, in the memory of `total`, which it returns.

    tensor: of the shape of `total`, and of a dtype that is not wider: it is counted in that of
    `total`. Memory: one block, or one tensor where they are not contiguous or not on the CPU.
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
    """The square root of each element, a new tensor.

    torch's own is that of a library of vector functions where it was built with one, whose last bit
    depends on the processor. NumPy's is the processor's instruction, which IEEE 754 defines.
    """
    if tensor.device.type != "cpu":
        return tensor.sqrt()
    root = torch.empty_like(tensor)
    np.sqrt(tensor.detach().numpy(), out=root.numpy())
    return root


def sum_of_multiples(rows: Tensor, factors: Tensor) -> Tensor:
    """(sum over i of factors[i]·rows[i]), from the first row to the last; `rows` is written over.

    rows: shape (m, b), m at least 1. factors: shape (m,), of the same dtype.
    """
    rows.mul_(factors.to(rows.device).unsqueeze(1))
    total = rows[0]
    for row in rows[1:]:
        total.add_(row)
    return total


def _in_one_piece(*tensors: Tensor) -> bool:
    return all(tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in tensors)
