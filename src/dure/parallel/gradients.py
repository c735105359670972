"""Gradients and the memory they travel in: flat buffers with a view for each.

The buffers lie in shared memory where ranks share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dure.collectives.group import Group
from dure.collectives.shared_memory.pool import empty_shared


@dataclass(frozen=True)
class Flat:
    """A buffer, and the places of gradients in it.

    views: of the buffer, each with the shape and the strides of its parameter.
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
    ) -> Flat:
        """Zeros for the gradients of `parameters`, of one dtype and device, then `tail` numbers.

        dtype, device: of the buffer where there are no parameters.
        """
        like = parameters[0] if parameters else torch.empty(0, dtype=dtype, device=device)
        length = sum(parameter.numel() for parameter in parameters) + tail
        # where peers can read it; zeroed, since such memory is used again
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
            # With the parameter's own strides, so that the elements of both lie in one order.
            views.append(whole.as_strided(parameter.shape, strides, start))
            start += parameter.numel()
        return cls(whole, views)


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a piece of memory without gaps, in whatever order."""
    if tensor.numel() == 0 or tensor.is_contiguous():
        return True
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    # the distance from the first element to the last one is the number of elements less one
    return 1 + sum((size - 1) * stride for size, stride in steps) == tensor.numel()


def flat_view(gradient: Tensor) -> Tensor:
    """A dense tensor's elements as they lie in memory."""
    return gradient.as_strided((gradient.numel(),), (1,))


def as_dense(gradient: Tensor) -> Tensor:
    """The gradient itself; of a sparse one, such as embeddings have, all elements.

    Raises RuntimeError for one that is differentiated further.
    """
    if gradient.requires_grad:
        raise RuntimeError(
            "backward(create_graph=True) asks for gradients of gradients, which an all-reduce does "
            "not have; take the inner derivative by torch.autograd.grad, and call backward once, "
            "without create_graph"
        )
    return (gradient.to_dense() if gradient.is_sparse else gradient).resolve_conj().resolve_neg()
