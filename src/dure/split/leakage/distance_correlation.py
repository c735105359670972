"""Distance correlation: a measure of any dependence between two sets of vectors.

A, B are the matrices of distances between examples, of X and of Z, double-centred (rows, columns
and total have mean 0)

    dCov²(X, Z) = mean of A B        dCor(X, Z)² = dCov²(X, Z) / sqrt(dCov²(X, X) dCov²(Z, Z))

The value is between 0 and 1: 1 if Z is a rotated, shifted and scaled X, and near 0 for independent
X and Z with many examples of low dimension. The estimate from n examples is biased upwards, and
more so in higher dimensions.

Cost: O(n² d), and memory for n² numbers.

Source: G. Székely, M. Rizzo, N. Bakirov, "Measuring and testing dependence by correlation of
distances", 2007.
"""

from __future__ import annotations

import torch
from torch import Tensor


def distance_correlation(x: Tensor, z: Tensor) -> Tensor:
    """Return dCor(X, Z), a differentiable scalar; 0 if X or Z is constant.

    x: of shape (n, d_x). z: of shape (n, d_z).
    """
    a = _centred(x)
    b = _centred(z)
    covariance = (a * b).mean()
    scale = (a * a).mean() * (b * b).mean()
    # The square root has no gradient at 0, where no dependence is left to reduce.
    if not bool(scale > 0) or not bool(covariance > 0):
        return (covariance * 0).sum()
    return (covariance / scale.sqrt()).sqrt()


def _centred(rows: Tensor) -> Tensor:
    """Return the distances between rows, of shape (n, n), double-centred."""
    # The formula with a matrix product has rounding errors, and gives distances of 0 as positive.
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    by_row = distances.mean(dim=0, keepdim=True)
    return distances - by_row - by_row.T + by_row.mean()
