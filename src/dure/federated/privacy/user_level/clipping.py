"""Clipping of a client's contribution, as a single vector.

    flat        Δ · min(1, S / |Δ|)
    layers      Δ_j · min(1, S_j / |Δ_j|),  S_j = S / √m for each of m tensors
    adaptive    flat, and S follows the median of the norms (Andrew et al. 2021):
                b = 1/2 + (Σ (b_k - 1/2) + N(0, σ_b²)) / (q·K),   b_k = 1 where |Δ_k| <= S
                S <- S · exp(-η (b - γ)),   η = 0.2, γ = 0.5, σ_b = max(q·K / 20, z)

A contribution contains all data of a client: changes of weights, changes of floating-point buffers,
and the algorithm's extras (SCAFFOLD's controls). They form a single vector and are clipped
together, since their noise has the same deviation. A contribution with a number that is not finite
counts as 0.

Adaptive clipping releases two values of a client, the contribution and b_k, and adds noise to both.
With z_Δ = (z^-2 - (2σ_b)^-2)^-1/2 on the sum, both together equal a single release with z.

Cost: a pass for the norm and a pass for the multiplication.

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
"""η, the learning rate of the clipping norm."""

QUANTILE = 0.5
"""γ, the target fraction of contributions that are shorter than S."""


def norm_of(tensors: Sequence[Tensor]) -> float:
    """Return the L2 norm of the tensors as a single vector; inf or NaN if a number is."""
    squares = [_norm(tensor) ** 2 for tensor in tensors]
    return math.sqrt(sum(squares))


def factor(norm: float, bound: float) -> float:
    """Return the factor that shortens a vector of this norm to `bound`; 0 if not finite."""
    if not math.isfinite(norm):
        return 0.0
    return 1.0 if norm <= bound else bound / norm


def factors(
    tensors: Sequence[Tensor], sizes: Sequence[Sequence[int]], bound: float
) -> list[list[float]]:
    """Return the factor of each piece of each tensor, so that their joint norm is at most `bound`.

    `sizes` are the numbers of elements of the consecutive pieces of each tensor.
    """
    each = bound / math.sqrt(max(1, sum(len(pieces) for pieces in sizes)))
    found = [
        [factor(_norm(piece), each) for piece in torch.split(tensor.reshape(-1), list(pieces))]
        for tensor, pieces in zip(tensors, sizes, strict=True)
    ]
    # A single non-finite piece invalidates the whole contribution.
    finite = all(math.isfinite(_norm(tensor)) for tensor in tensors)
    return found if finite else [[0.0] * len(pieces) for pieces in sizes]


def count_noise(expected: float, noise: float) -> float:
    """Return σ_b, the deviation of the noise on the count of short contributions.

    `expected` is q·K. `noise` is z of the whole release; 0 means no noise on the count either.
    """
    return max(expected / 20, noise) if noise else 0.0


def noise_beside_count(noise: float, counted: float) -> float:
    """Return z_Δ, the noise on the sum next to a count with noise σ_b; both together have z."""
    if not noise:
        return 0.0
    return float((noise**-2 - (2 * counted) ** -2) ** -0.5)


def followed(bound: float, share: float) -> float:
    """Return the next S. `share` is the noisy fraction of contributions no longer than S."""
    # Noise may move the fraction far outside of [0, 1]; the clamp bounds the step.
    return bound * math.exp(-RATE * (min(max(share, 0.0), 1.0) - QUANTILE))


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=_wide(tensor)))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64
