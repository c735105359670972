"""Mean of low-rank updates, and its best approximation of a rank.

    ΔW = Σ_i p_i·s_i·B_i A_i         B_i: outputs × r_i, A_i: r_i × inputs, Σ_i p_i = 1
    stacked: B = [√(p_i s_i) B_i], A likewise, one below the other: B A = ΔW, of rank Σ_i r_i
    best approximation of rank r: the r largest singular values and vectors of ΔW, from
        B = Q_B R_B,  Aᵀ = Q_A R_A  (thin QR),  R_B R_Aᵀ = U Σ Vᵀ,  ΔW = (Q_B U) Σ (Q_A V)ᵀ

The means of A_i and of B_i, each by itself, are not ΔW: their product has terms B_i A_j of two
clients.

Cost, with R = Σ_i r_i, m outputs and n inputs: O((m + n) R² + R³) time and O((m + n) R) memory; the
matrix ΔW, of m·n numbers, is never formed. `mean_matrix` forms it, and its SVD takes O(m n min(m,
n)).

Source: Z. Wang et al. 2024, "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous
Low-Rank Adaptations" (stacking); J. Bai et al. 2024, "Federated Fine-tuning of Large Language
Models under Heterogeneous Tasks and Client Resources" (SVD of the mean); Eckart and Young 1936.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class LowRank(NamedTuple):
    """Factors of an update s·B A. b: (outputs, rank); a: (rank, inputs)."""

    b: Tensor
    a: Tensor
    scaling: float = 1.0

    def matrix(self) -> Tensor:
        """Return the update, shape (outputs, inputs)."""
        return self.scaling * (self.b @ self.a)


class SingularTriples(NamedTuple):
    """Largest singular values of a matrix, descending, with their vectors.

    u: (outputs, k); values: (k,); v: (k, inputs), with orthonormal rows.
    """

    u: Tensor
    values: Tensor
    v: Tensor

    def first(self, rank: int) -> SingularTriples:
        """Return the first `rank` triples, or all if there are fewer."""
        return SingularTriples(self.u[:, :rank], self.values[:rank], self.v[:rank])


def shares_of(weights: Sequence[float]) -> list[float]:
    """Return p_i, the weights divided by their sum."""
    total = sum(weights)
    return [weight / total for weight in weights]


def stacked(updates: Sequence[LowRank], weights: Sequence[float]) -> LowRank:
    """Return factors whose product is the weighted mean of the updates."""
    roots = [
        (share * update.scaling) ** 0.5
        for share, update in zip(shares_of(weights), updates, strict=True)
    ]
    pairs = list(zip(roots, updates, strict=True))
    return LowRank(
        torch.cat([root * update.b for root, update in pairs], dim=1),
        torch.cat([root * update.a for root, update in pairs], dim=0),
    )


def mean_matrix(updates: Sequence[LowRank], weights: Sequence[float]) -> Tensor:
    """Return the weighted mean of the updates as a full matrix."""
    first = updates[0]
    total = first.b.new_zeros(first.b.shape[0], first.a.shape[1])
    for share, update in zip(shares_of(weights), updates, strict=True):
        total.addmm_(update.b, update.a, alpha=share * update.scaling)
    return total


def svd_of_product(factors: LowRank) -> SingularTriples:
    """Return the singular triples of s·B A, by the factors alone."""
    q_b, r_b = torch.linalg.qr(factors.b)
    q_a, r_a = torch.linalg.qr(factors.a.T)
    u, values, v = torch.linalg.svd(factors.scaling * (r_b @ r_a.T), full_matrices=False)
    return SingularTriples(q_b @ u, values, v @ q_a.T)


def svd_of_matrix(matrix: Tensor) -> SingularTriples:
    """Return the singular triples of a full matrix."""
    return SingularTriples(*torch.linalg.svd(matrix, full_matrices=False))


def split(triples: SingularTriples, like: LowRank, row_norm: float, rounding: float) -> LowRank:
    """Return factors of the best approximation, with the rank and the scaling of `like`.

    A and B share each singular value evenly, but rows of A are never shorter than `row_norm`: short
    rows would slow down the training of B. A direction without a singular value has zeros in B, as
    a new adapter has, and the row of A from `like`: it stays trainable, and does not depend on
    rounding.

    Args:
        triples: of the matrix to approximate.
        like: present factors.
        row_norm: least norm of the rows of A.
        rounding: relative error of the matrix's numbers; singular values below it, relative to the
            largest, count as zeros.
    """
    kept = triples.first(like.a.shape[0])
    least = rounding * max(like.b.shape[0], like.a.shape[1]) * float(triples.values[0])
    count = int((kept.values > least).sum())
    b, a = torch.zeros_like(like.b), like.a.clone()
    values = kept.values[:count] / like.scaling
    norms = values.sqrt().clamp(min=row_norm)
    a[:count] = norms[:, None] * kept.v[:count]
    b[:, :count] = kept.u[:, :count] * (values / norms)
    return LowRank(b, a, like.scaling)
