"""How much any one client may say: its contribution clipped, as one vector.

    flat        Δ · min(1, S / |Δ|)
    layers      Δ_j · min(1, S_j / |Δ_j|),  S_j = S / √m for each of m tensors
    adaptive    flat, and S follows the median of the norms (Andrew et al. 2021):
                b = 1/2 + (Σ (b_k - 1/2) + N(0, σ_b²)) / (q·K),   b_k = 1 where |Δ_k| <= S
                S <- S · exp(-η (b - γ)),   η = 0.2, γ = 0.5, σ_b = max(q·K / 20, z)

A contribution is all that a client says: how its weights moved, how floating-point buffers moved,
and what an algorithm sends besides (SCAFFOLD's controls). They are one vector and are clipped
together, since they are all noised with one deviation. One with a number that is not finite counts
as 0.

Adaptive clipping says two things of a client, its contribution and its b_k, and has noise for both.
With z_Δ = (z^-2 - (2σ_b)^-2)^-1/2 on the sum the two together tell as much as one release with z.

Cost: a pass for the norm and one that multiplies.

Sources: H. B. McMahan, D. Ramage, K. Talwar, L. Zhang, "Learning Differentially Private Recurrent
Language Models", ICLR 2018; G. Andrew, O. Thakkar, H. B. McMahan, S. Ramaswamy, "Differentially
Private Learning with Adaptive Clipping", NeurIPS 2021.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

RATE = 0.2
"""η, by which the norm follows."""

QUANTILE = 0.5
"""γ, the share of contributions that is to be shorter than S."""


def norm_of(tensors: Sequence[Tensor]) -> float:
    """The length of tensors as one vector; inf or NaN where a number is."""
    squares = [_norm(tensor) ** 2 for tensor in tensors]
    return math.sqrt(sum(squares))


def factor(norm: float, bound: float) -> float:
    """By what a vector of this norm is multiplied to be no longer than `bound`.

    0 for one that is not finite.
    """
    if not math.isfinite(norm):
        return 0.0
    return 1.0 if norm <= bound else bound / norm


def factors(
    tensors: Sequence[Tensor], sizes: Sequence[Sequence[int]], bound: float
) -> list[list[float]]:
    """As `factor`, for each piece of each tensor, so that all together are no longer than `bound`.

    sizes: elements of the pieces of each tensor, one after another.
    """
    each = bound / math.sqrt(max(1, sum(len(pieces) for pieces in sizes)))
    found = [
        [factor(_norm(piece), each) for piece in torch.split(tensor.reshape(-1), list(pieces))]
        for tensor, pieces in zip(tensors, sizes, strict=True)
    ]
    # One piece that is not finite makes nonsense of the others too.
    finite = all(math.isfinite(_norm(tensor)) for tensor in tensors)
    return found if finite else [[0.0] * len(pieces) for pieces in sizes]


def count_noise(expected: float, noise: float) -> float:
    """σ_b, the deviation of the noise on the count of short contributions.

    expected: q·K. noise: z of the release as a whole; 0 is no noise on the count either.
    """
    return max(expected / 20, noise) if noise else 0.0


def noise_beside_count(noise: float, counted: float) -> float:
    """z_Δ, the noise on the sum beside a count with noise σ_b, so that both together have z."""
    if not noise:
        return 0.0
    return float((noise**-2 - (2 * counted) ** -2) ** -0.5)


def followed(bound: float, share: float) -> float:
    """The next S. share: of the contributions that were not longer than S, as far as is told."""
    # Noise may put it far outside of [0, 1], where one step would go too far.
    return bound * math.exp(-RATE * (min(max(share, 0.0), 1.0) - QUANTILE))


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=_wide(tensor)))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64
