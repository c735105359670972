"""What all ways to clip the gradients of single examples have in common.

For a batch of examples with losses l_1 … l_b and a largest norm C:

    g_i     the gradient of l_i at the weights, over all trained parameters together
    sum   = Σ_i g_i · min(1, C / ‖g_i‖)

One example changes the sum by at most C. What rounding may add to an example's part of the sum is
counted in its norm, so that this holds for every input, also where products of large numbers cancel
(`layers`). So noise of deviation z·C hides any of them (Abadi et al.
2016); the noise, and the division by a batch size that the examples do not decide, are the
caller's.

    ghost        norms from what every layer keeps anyway     (`ghost`)
    functional   torch.func: all gradients of a few examples at once     (`functional`)
    looped       one example after another: slow, and right for every model     (`looped`)
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
"""Numbers whose squares are added up in their own dtype."""


class Clipped(NamedTuple):
    """Sums, norms and losses of a batch.

    sums: of the clipped gradients, one tensor a trained parameter, in the model's order. norms: of
    the gradients before, float64 of shape (b,), never below those of what is added (`norm_bounds`).
    losses: of the examples, shape (b,).
    """

    sums: list[Tensor]
    norms: Tensor
    losses: Tensor


class CannotClipError(Exception):
    """This way cannot compute the model; the message says why."""


class Way(ABC):
    """A way to clip the gradients of single examples."""

    name: ClassVar[str]

    @abstractmethod
    def clipped(self, inputs: Any, targets: Any, clip: float) -> Clipped:
        """Of the examples of a batch, at least one. clip: C; inf only adds gradients.

        The gradients in the model's parameters stay as they are. Raises CannotClipError for a model
        that this way cannot compute.
        """


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that have gradients, each once, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def factors(norms: Tensor, clip: float) -> Tensor:
    """Return the factors of gradients of these norms: min(1, C / norm)."""
    # An example without a gradient has a factor too, of any value.
    found = (clip / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1.0)
    # In float32 a smaller factor would be rounded by more than a norm's digits allow.
    return torch.where(found < torch.finfo(torch.float32).tiny, 0.0, found)


def count(batch: Any) -> int:
    """The examples of a batch of tensors, in whatever structure."""
    return next(len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def cut(batch: Any, start: int, end: int) -> Any:
    """The examples start … end - 1 of a batch."""
    return tree_map(lambda leaf: leaf[start:end] if isinstance(leaf, Tensor) else leaf, batch)


def norm_bounds(rows: Tensor) -> Tensor:
    """Return an upper bound of the norm over the last dimension, float64 of the other ones.

    It is above the norm of these very numbers, whatever they are, and by 3e-5 of it at most in
    float32: no order in which a chunk is added up loses more, and no square that is too small to be
    kept is more than the last term. Where squares overflow (norms above 1.8e19 in float32) it is
    infinite, and the example adds nothing.
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
    """Return norms over several tensors, of the norms over each: float64 of shape (b,)."""
    return torch.stack(list(norms)).square_().sum(0).sqrt_()
