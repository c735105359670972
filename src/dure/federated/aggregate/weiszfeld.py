"""Weiszfeld's iteration for the geometric median, in few dimensions.

The iteration finds the point z that minimises f(z) = (sum over i of w_i·|x_i - z|).

    z <- (sum of p_i·x_i) / (sum of p_i),   p_i = w_i / |x_i - z|

f falls with every step. If z is one of the points, the step is the step of Vardi and Zhang: with
the mean T of the other points as above, their pull R = (sum over the others of p_i·(x_i - z)), and
the weight eta of the points at z,

    z <- (1 - s)·T + s·z,   s = min(1, eta / |R|)

and z is the minimiser exactly if |R| <= eta. Convergence to a minimum at a point is slow, so the
points are tested first.

With smoothing nu, p_i = w_i / max(nu, |x_i - z|): f is then smooth, quadratic within nu of a point
(Pillutla).

Stopping criterion: f(z) - min f <= |g|·|z - z*| for the smallest subgradient g at z, and |z - z*|
<= 2 f(z) / (sum of w); so 2 |g| <= accuracy·(sum of w) makes f(z) right to that relative accuracy.
Unlike a difference of two values of f, the criterion is meaningful even if a point is at 1e30.

**Few dimensions.** m updates of d >> m parameters need only m coordinates each. The differences to
a centre c are the columns of a (d, m) matrix, whose QR decomposition, a block of rows at a time,
preserves all distances in R. Its errors are relative to each column, so an outlier at 1e30 disturbs
only itself; a Gram matrix would lose all digits of the other columns. For this, the centre has to
be among the honest updates: the centre is the median of each coordinate. One pass over the updates
replaces one or two passes per step: 2·m²·d operations.

Sources: Y. Vardi, C.-H. Zhang, "The multivariate L1-median and associated data depth", PNAS 2000;
K. Pillutla, S. Kakade, Z. Harchaoui, "Robust Aggregation for Federated Learning", IEEE TSP 2022; N.
Higham, "Accuracy and Stability of Numerical Algorithms", theorem 19.4 (columns).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dure.federated.aggregate.median import coordinate_median
from dure.federated.aggregate.rows import UpdateRows

ACCURACY = 1e-12
"""Relative accuracy of the objective at which the iteration stops."""

STEPS = 10_000
"""Largest number of steps.

Convergence to a minimum next to a point is slow: f may then be 1e-8 above the minimum.
"""

SAME = 1e-13
"""Distance, relative to the distance from the centre, below which points count as equal.

QR is not more accurate.
"""


Array = NDArray[np.float64]
"""Small float64 arrays with many steps: NumPy takes a fraction of torch's time per step."""


class WeiszfeldStep(NamedTuple):
    """A step of the iteration.

    coefficients: of the points, shape (m,); they sum to 1 and give the next z. slope: |R| - eta at
    z, which is |g| if positive.
    """

    coefficients: Array
    slope: float


def geometric_median(
    rows: UpdateRows, weights: Sequence[float], smoothing: float = 0.0
) -> list[Tensor]:
    """Return the vector with the least weighted sum of distances to finite rows."""
    points = coordinates(rows, coordinate_median(rows, dtype=torch.float64))
    return rows.combination(torch.from_numpy(minimiser(points, np.array(weights), smoothing)))


def coordinates(rows: UpdateRows, centre: Sequence[Tensor]) -> Array:
    """Return points in few dimensions with the distances of the rows, shape (m, min(m, d)).

    `centre` maps to zero.
    """
    triangle: Tensor | None = None
    # Wide blocks, because each QR includes the triangle of the blocks before, m rows.
    for slot, start, stop, values in rows.blocks(columns=4 * len(rows), measured=True):
        values -= centre[slot].reshape(-1)[start:stop]
        # R of [R_before; block] is R of all rows so far, up to signs, which change no distance.
        tall = values.T if triangle is None else torch.cat([triangle, values.T])
        triangle = torch.linalg.qr(tall, mode="r").R
    assert triangle is not None
    return np.ascontiguousarray(triangle.T.cpu().numpy())


def minimiser(points: Array, weights: Array, smoothing: float = 0.0) -> Array:
    """Return the coefficients, shape (m,), of the combination with the least sum of distances.

    points: shape (m, k). weights: shape (m,).
    """
    # Each point is tried as the minimum first. A slope within 1e-9 of the total weight is
    # undecided, because of rounding.
    unsure = []
    total = float(weights.sum())
    for point in points if smoothing == 0 else ():
        found = step(points, weights, point)
        if found.slope <= -1e-9 * total:  # the only minimum, whatever the rounding
            return found.coefficients
        if found.slope <= 1e-9 * total:
            unsure.append(found)
    *_, last = descent(points, weights, np.zeros_like(points[0]), smoothing)
    if not unsure:
        return last
    reached = step(
        points, weights, last @ points
    ).slope  # convergence to a point that is barely a minimum is slow
    if len(unsure) > 1 and reached <= 1e-9 * total:
        # All points between these are minima: do not return an end, which the order would select.
        return last
    return min([*unsure, WeiszfeldStep(last, reached)], key=lambda end: end.slope).coefficients


def descent(points: Array, weights: Array, start: Array, smoothing: float = 0.0) -> Iterator[Array]:
    """Yield the coefficients of z after each step from `start`.

    The iteration ends at `ACCURACY`, at a fixed point z, or after `STEPS` steps.
    """
    z = start
    limit = ACCURACY / 2 * float(weights.sum())
    for _ in range(STEPS):
        coefficients, slope = step(points, weights, z, smoothing)
        yield coefficients
        before = z
        z = coefficients @ points
        if slope <= limit or np.array_equal(before, z):
            return


def step(points: Array, weights: Array, z: Array, smoothing: float = 0.0) -> WeiszfeldStep:
    """Return the step from z, shape (k,)."""
    towards = points - z
    distances = _norms(towards)
    here = distances <= (SAME * _norms(points) if smoothing == 0 else -1)
    # The total weight of the points at z: the force that holds z there.
    eta = float(weights[here].sum())
    # All points are equal: z is the minimum, and there is no pull to divide by.
    if here.all():
        return WeiszfeldStep(weights / eta, -eta)
    # The inner `where` only avoids a division by 0; those places are 0 in the end.
    pulls = np.where(here, 0.0, weights / np.where(here, 1.0, np.maximum(distances, smoothing)))
    pull = float(np.linalg.norm(pulls @ towards))
    stay = 0.0 if eta == 0 else 1.0 if pull <= eta else eta / pull
    coefficients = (1 - stay) * pulls / pulls.sum()
    if stay > 0:
        coefficients += np.where(here, stay * weights / eta, 0.0)
    return WeiszfeldStep(coefficients, pull - eta)


def _norms(vectors: Array) -> Array:
    norms: Array = np.sqrt(np.einsum("ij,ij->i", vectors, vectors))
    return norms
