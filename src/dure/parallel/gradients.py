"""Flat buffers for gradients, with a view for each gradient.

The buffers are in shared memory if the ranks share memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dure.collectives.group import Group
from dure.collectives.shared_memory.pool import empty_shared


@dataclass(frozen=True)
class FlatGradients:
    """A flat buffer and the views of gradients in it.

    views: views of the buffer, each with the shape and the strides of its parameter.
    """

    whole: Tensor
    views: list[Tensor]

    @classmethod
    def of(
        cls,
        parameters: Sequence[Tensor],
        group: Group,
        tail: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> FlatGradients:
        """Return a buffer of zeros for the gradients of `parameters`, followed by `tail` numbers.

        Args:
            parameters: Tensors of one dtype and device.
            group: Ranks that the buffer is shared with, if its backend uses shared memory.
            tail: Elements after the gradients.
            dtype: Dtype of the buffer if there are no parameters.
            device: Device of the buffer if there are no parameters.
        """
        like = parameters[0] if parameters else torch.empty(0, dtype=dtype, device=device)
        length = sum(parameter.numel() for parameter in parameters) + tail
        # in memory that peers can read; zeroed, because such memory is reused
        if length and group.backend(like.device) == "dure":
            whole = empty_shared(length, dtype=like.dtype).zero_()
        else:
            whole = torch.zeros(length, dtype=like.dtype, device=like.device)
        views = []
        start = 0
        for parameter in parameters:
            strides = parameter.stride()
            if not is_dense(parameter):  # a gradient has no gaps
                strides = torch.empty(parameter.shape, device="meta").stride()
            # With the parameter's strides, so that the elements of both are in one order.
            views.append(whole.as_strided(parameter.shape, strides, start))
            start += parameter.numel()
        return cls(whole, views)


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements fill a piece of memory without gaps, in any order."""
    if tensor.numel() == 0 or tensor.is_contiguous():
        return True
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    # the distance from the first to the last element is the number of elements minus 1
    return 1 + sum((size - 1) * stride for size, stride in steps) == tensor.numel()


def flat_view(gradient: Tensor) -> Tensor:
    """Return a dense tensor's elements as a vector, in memory order."""
    return gradient.as_strided((gradient.numel(),), (1,))


def as_dense(gradient: Tensor) -> Tensor:
    """Return a gradient as a dense tensor; a sparse gradient, as of an embedding, is expanded.

    Raises RuntimeError for a gradient that requires a gradient (`create_graph=True`).
    """
    if gradient.requires_grad:
        raise RuntimeError(
            "backward(create_graph=True) requires gradients of gradients, which an all-reduce "
            "does not support; compute the inner derivative with torch.autograd.grad, and call "
            "backward once, without create_graph"
        )
    return (gradient.to_dense() if gradient.is_sparse else gradient).resolve_conj().resolve_neg()
