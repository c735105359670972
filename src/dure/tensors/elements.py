"""The elements of a tensor as plain memory."""

from __future__ import annotations

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
