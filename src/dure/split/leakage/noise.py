"""Noise on gradients that does not depend on labels: two simple rules.

g_j is the gradient of example j at the cut, of d numbers, and g_max the longest of the batch

    max-norm:SCALE       g_j + sigma_j xi_j g_j,  xi_j ~ N(0, 1),
                         sigma_j² = (SCALE ‖g_max‖)²/‖g_j‖² - 1       E‖·‖² is the same of all
    isotropic:RATIO      g_j + N(0, (RATIO ‖g_max‖)²/d I)             noise as long as RATIO ‖g_max‖

Both have the mean g_j, so the gradients of weights stay unbiased. Max-norm hides lengths but keeps
the line through each gradient; isotropic noise hides both, with far more noise.

Cost: O(n d) for n examples.

Source: O. Li et al., "Label Leakage and Protection in Two-party Split Learning", ICLR 2022.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dure.arguments import above, at_least
from dure.split.leakage.defence import Defence, Memory


@dataclass(frozen=True)
class MaxNorm(Defence):
    """Noise along each gradient that makes all gradients of a batch equally long on average.

    scale: the common length over the batch's longest gradient; 1 in the paper.
    """

    name: ClassVar[str] = "max-norm"
    guards: ClassVar[Literal["gradients"]] = "gradients"
    scale: float = field(default=1.0, metadata=at_least(1, finite=True))

    def gradients(
        self, rows: Tensor, positive: Tensor | None, draws: torch.Generator, memory: Memory
    ) -> tuple[Tensor, Memory]:
        norms = rows.norm(dim=1, keepdim=True)
        longest = self.scale * norms.max()
        # A gradient of zero has no direction, so draw a random direction for it.
        zero = norms == 0
        drawn = gaussian(rows.shape, rows, draws)
        along = torch.where(zero, drawn / drawn.norm(dim=1, keepdim=True), rows)
        length = torch.where(zero, torch.ones_like(norms), norms)
        ratio = torch.where(zero, longest, (longest**2 / length**2 - 1).clamp(min=0).sqrt())
        return rows + gaussian((len(rows), 1), rows, draws) * ratio * along, memory


@dataclass(frozen=True)
class Isotropic(Defence):
    """Gaussian noise with the same variance in all directions, for all examples of a batch.

    ratio: length of the noise over the length of the longest gradient.
    """

    name: ClassVar[str] = "isotropic"
    guards: ClassVar[Literal["gradients"]] = "gradients"
    ratio: float = field(default=1.0, metadata=above(0, finite=True))

    def gradients(
        self, rows: Tensor, positive: Tensor | None, draws: torch.Generator, memory: Memory
    ) -> tuple[Tensor, Memory]:
        deviation = self.ratio * rows.norm(dim=1).max() / math.sqrt(rows.shape[1])
        return rows + deviation * gaussian(rows.shape, rows, draws), memory


def gaussian(shape: tuple[int, ...], like: Tensor, draws: torch.Generator) -> Tensor:
    """Return standard normal numbers, with the dtype and device of `like`."""
    return torch.randn(shape, generator=draws, dtype=like.dtype).to(like.device)
