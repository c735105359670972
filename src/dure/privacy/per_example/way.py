"""What all ways to clip the gradients of single examples have in common.

For a batch of examples with losses l_1 … l_b and a largest norm C:

    g_i     the gradient of l_i at the weights, over all trained parameters together
    sum   = Σ_i g_i · min(1, C / ‖g_i‖)

One example changes the sum by at most C. So noise of deviation z·C hides any of them (Abadi et al.
2016); the noise, and the division by a batch size that the examples do not decide, are the
caller's.

    ghost        norms from what every layer keeps anyway     (`ghost`)
    functional   torch.func: all gradients of a few examples at once     (`functional`)
    looped       one example after another: slow, and right for every model     (`looped`)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map


class Clipped(NamedTuple):
    """What a batch gives.

    sums: of the clipped gradients, one tensor a trained parameter, in the model's order. norms: of
    the gradients before, float64 of shape (b,). losses: of the examples, shape (b,).
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
    """What gradients of these norms are multiplied with: min(1, C / norm)."""
    # An example without a gradient has a factor too, of any value.
    return (clip / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1.0)


def count(batch: Any) -> int:
    """The examples of a batch of tensors, in whatever structure."""
    return next(len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def cut(batch: Any, start: int, end: int) -> Any:
    """The examples start … end - 1 of a batch."""
    return tree_map(lambda leaf: leaf[start:end] if isinstance(leaf, Tensor) else leaf, batch)


def norms_of(squares: Sequence[Tensor]) -> Tensor:
    """Norms over several tensors: of the sum of their squares, float64 of shape (b,)."""
    return torch.stack(list(squares)).sum(0, dtype=torch.float64).sqrt()
