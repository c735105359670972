"""Interface of the ways to clip per-example gradients.

For a batch of examples with losses l_1 … l_b and a largest norm C:

    g_i     the gradient of l_i at the weights, over all trained parameters together
    sum   = Σ_i g_i · min(1, C / ‖g_i‖)

An example changes the sum by at most C. Its norm includes a bound on the rounding error of its part
of the sum, so that this holds for every input, even if products of large numbers cancel (`layers`).
So noise of standard deviation z·C hides any example (Abadi et al. 2016); the caller adds the noise
and divides by a batch size that does not depend on the data.

    ghost        norms from inputs and output gradients of every layer       (`ghost`)
    functional   torch.func: all gradients of a few examples at once         (`functional`)
    looped       one example after another: slow, and right for every model  (`looped`)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

CHUNK = 1024
"""Number of squares that are summed in their own dtype before float64."""


class ClippedSums(NamedTuple):
    """Sums, norms and losses of a batch.

    sums: of the clipped gradients, a tensor per trained parameter, in the model's order. norms:
    upper bounds before clipping, float64 of shape (b,), including rounding in the sums
    (`norm_bounds`). losses: of the examples, shape (b,).
    """

    sums: list[Tensor]
    norms: Tensor
    losses: Tensor


class CannotClipError(Exception):
    """This way cannot compute the model; the message gives the reason."""


class PerExampleClipping(ABC):
    """Way to clip the gradients of single examples."""

    name: ClassVar[str]

    @abstractmethod
    def clipped(self, inputs: Any, targets: Any, clip: float) -> ClippedSums:
        """Return the clipped sums of a batch of at least one example.

        clip: C; inf only adds gradients. The gradients in the model's parameters do not change.
        Raises CannotClipError for a model that this way cannot compute.
        """


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require gradients, each once, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def factors(norms: Tensor, clip: float) -> Tensor:
    """Return the factors of gradients of these norms: min(1, C / norm)."""
    # A norm of 0 would divide by 0; its factor has no effect.
    found = (clip / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1.0)
    # In float32 a smaller factor is subnormal, and its relative rounding error exceeds the bound.
    return torch.where(found < torch.finfo(torch.float32).tiny, 0.0, found)


def count(batch: Any) -> int:
    """Return the number of examples of a batch of tensors, in any structure."""
    return next(len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def cut(batch: Any, start: int, end: int) -> Any:
    """Return the examples start … end - 1 of a batch."""
    return tree_map(lambda leaf: leaf[start:end] if isinstance(leaf, Tensor) else leaf, batch)


def norm_bounds(rows: Tensor) -> Tensor:
    """Return an upper bound of the norm over the last dimension, float64 of the other dimensions.

    The bound exceeds the exact norm for any values, by a factor of at most 1 + 3e-5 in float32: the
    factor covers the rounding of a chunk's sum in any order, and the last term covers squares that
    underflow. If squares overflow (norms above 1.8e19 in float32) the bound is infinite, and the
    example adds nothing.
    """
    limits = torch.finfo(rows.dtype)
    elements = rows.shape[-1]
    whole = elements - elements % CHUNK
    squares = torch.zeros(rows.shape[:-1], dtype=torch.float64, device=rows.device)
    if whole:
        chunks = rows[..., :whole].reshape(*rows.shape[:-1], whole // CHUNK, CHUNK)
        squares += torch.linalg.vector_norm(chunks, dim=-1).double().square_().sum(-1)
    if elements - whole:
        rest: Tensor = torch.linalg.vector_norm(rows[..., whole:], dim=-1)
        squares += rest.double().square_()
    above = 1 + (CHUNK / 4 + 2) * limits.eps
    return squares.sqrt_().mul_(above).add_(math.sqrt(elements * limits.tiny))


def norms_of(norms: Sequence[Tensor]) -> Tensor:
    """Return norms over several tensors, from the norms over each: float64 of shape (b,)."""
    return torch.stack(list(norms)).square_().sum(0).sqrt_()
