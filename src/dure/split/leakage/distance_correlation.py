"""Distance correlation: how much two sets of vectors depend on each other, in any way.

A, B are the matrices of distances between examples, of X and of Z, with their rows, columns and all
of them centred

    dCov²(X, Z) = mean of A B        dCor(X, Z)² = dCov²(X, Z) / sqrt(dCov²(X, X) dCov²(Z, Z))

It lies between 0 and 1; 1 where Z is X turned, moved and stretched, and near 0 for independent ones
if there are many examples of few numbers: of n examples it is too large, the more so the more
numbers they have.

Cost: O(n² d), and memory for n² numbers.

Source: G. Székely, M. Rizzo, N. Bakirov, "Measuring and testing dependence by correlation of
distances", 2007.
"""

from __future__ import annotations

import torch
from torch import Tensor


def distance_correlation(x: Tensor, z: Tensor) -> Tensor:
    """dCor(X, Z), a scalar with its gradient; 0 where one of them does not vary.

    x: of shape (n, d_x). z: of shape (n, d_z).
    """
    a = _centred(x)
    b = _centred(z)
    covariance = (a * b).mean()
    scale = (a * a).mean() * (b * b).mean()
    # The square root has no gradient at 0, where nothing is left to be made less.
    if not bool(scale > 0) or not bool(covariance > 0):
        return (covariance * 0).sum()
    return (covariance / scale.sqrt()).sqrt()


def _centred(rows: Tensor) -> Tensor:
    """Distances between rows, of shape (n, n), less the means of row and column."""
    # Without the product of matrices, by which a distance of 0 is something else.
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    by_row = distances.mean(dim=0, keepdim=True)
    return distances - by_row - by_row.T + by_row.mean()
