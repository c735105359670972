"""Marvell: the noise of least power that hides which of two classes a gradient belongs to.

Gradients at the cut are modelled as two Gaussians, of the negative and of the positive examples:
means that differ by D, variances u and v in every direction, fractions 1-p and p. Noise of
covariance S0 and S1 is added so that the two distributions are as similar as possible

    minimise    sumKL = KL(1 ‖ 0) + KL(0 ‖ 1)
    subject to  p tr(S1) + (1-p) tr(S0) <= P = s ‖D‖²

The best S0 and S1 have one eigenvalue along D, lam1, and one for all d-1 other directions, lam2.
With g = ‖D‖²

    2 (sumKL + d) = (d-1) [(lam20+u)/(lam21+v) + (lam21+v)/(lam20+u)]
                    + (lam10+u+g)/(lam11+v) + (lam11+v+g)/(lam10+u)
    p (lam11 + (d-1) lam21) + (1-p) (lam10 + (d-1) lam20) = P,   lam1 >= lam2 >= 0

In a = lam10+u, b = lam11+v, c = lam20+u, e = lam21+v all terms are positive products of powers: a
geometric program, which is convex in the logarithms, so a local minimum is the global minimum. The
class with the larger variance gets no noise in other directions. The remaining search is along c;
for each c the best a and b are on a line, b/a = sqrt((C + (1-p) g)/(C + p g)), C = p b + (1-p) a.

sumKL < (2 - 4 eps)² makes the error of any detector, the mean of its false positive and false
negative rates, at least eps. Noise has mean zero: gradients stay unbiased.

Marvell protects gradients, and not activations. A batch of a single class gives no estimate of D;
such a batch gets the noise of the party's last batch with both classes. Before the first batch with
both classes, D is computed as if the other class had the opposite gradient.

Cost: a hundred steps of arithmetic a batch, and O(n d).

Source: O. Li et al., "Label Leakage and Protection in Two-party Split Learning", ICLR 2022.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from dure.arguments import above
from dure.data.examples import Examples
from dure.split.leakage.defence import Defence, Memory, binary, class_labels
from dure.split.leakage.noise import gaussian

_STEPS = 100
"""Steps of the golden-section search: each leaves 0.62 of the interval, and 0.62^100 < 1e-20."""

_GOLDEN = (math.sqrt(5) - 1) / 2


class NoiseVariances(NamedTuple):
    """Variances of the noise, and the sum of divergences that results.

    lam1: along the difference of means; lam2: in other directions; suffix 0: of the negative class,
    1: of the positive class. sum_kl: KL(1 ‖ 0) + KL(0 ‖ 1) with this noise.
    """

    lam10: float
    lam20: float
    lam11: float
    lam21: float
    sum_kl: float


@dataclass(frozen=True)
class Marvell(Defence):
    """Noise that makes the gradients of two classes most similar.

    power: power s of the noise, over ‖D‖².
    """

    name: ClassVar[str] = "marvell"
    guards: ClassVar[Literal["gradients"]] = "gradients"
    power: float = field(default=4.0, metadata=above(0, finite=True))

    def check(self, examples: Examples, labels_stay: bool) -> None:
        super().check(examples, labels_stay)
        labels = class_labels(examples)
        if labels is None or binary(labels) is None:
            raise ValueError(
                "marvell needs two classes, with the labels 0 and 1, but the task has others: "
                "use isotropic:1"
            )

    def gradients(
        self, rows: Tensor, positive: Tensor | None, draws: torch.Generator, memory: Memory
    ) -> tuple[Tensor, Memory]:
        if positive is None:
            raise ValueError("marvell needs two classes, with the labels 0 and 1")
        positive = positive.to(rows.device)
        both = bool(positive.any()) and not bool(positive.all())
        if both or memory is None:
            memory = self._remembered(rows, positive, both)
        return noisy(
            rows, positive, memory["difference"], NoiseVariances(*memory["spread"]), draws
        ), memory

    def _remembered(self, rows: Tensor, positive: Tensor, both: bool) -> dict[str, Any]:
        """Return the difference of a batch's class means, and the noise for it."""
        exact = rows.double()
        if both:
            one = exact[positive]
            zero = exact[~positive]
            difference = one.mean(dim=0) - zero.mean(dim=0)
            u = _variance(zero)
            v = _variance(one)
            p = len(one) / len(exact)
        else:
            difference = (2 if bool(positive.any()) else -2) * exact.mean(dim=0)
            u = v = _variance(exact)
            p = 0.5
        g = float(difference.square().sum())
        spread = solve(u=u, v=v, d=rows.shape[1], g=g, p=p, power=self.power * g)
        return {"difference": difference.to(rows.dtype), "spread": list(spread)}


def _variance(rows: Tensor) -> float:
    """Return the variance of the rows about their mean, averaged over directions."""
    return float((rows - rows.mean(dim=0)).square().mean())


def noisy(
    rows: Tensor,
    positive: Tensor,
    difference: Tensor,
    spread: NoiseVariances,
    draws: torch.Generator,
) -> Tensor:
    """Return the gradients with noise.

    Args:
        rows: gradients, of shape (n, d).
        positive: whether each example has the label 1, of shape (n,).
        difference: difference of the class means, of shape (d,).
        spread: variances of the noise.
        draws: generator of the noise.
    """
    # The state may come from a file.
    difference = difference.to(rows.device)
    length = float(difference.norm())
    if not length:
        return rows
    along = gaussian((len(rows), 1), rows, draws)
    elsewhere = gaussian(rows.shape, rows, draws)

    def each(one: float, zero: float) -> Tensor:
        """Return a standard deviation for every row, from the variances of the two classes."""
        of_class = torch.tensor([zero, one], dtype=torch.float64).clamp(min=0).sqrt()
        return of_class.to(rows.device, rows.dtype)[positive.long()].unsqueeze(1)

    # Two independent terms: lam2 in all directions, and lam1 - lam2 more along the difference.
    more = each(spread.lam11 - spread.lam21, spread.lam10 - spread.lam20)
    everywhere = each(spread.lam21, spread.lam20)
    return rows + more * along * (difference / length) + everywhere * elsewhere


def solve(u: float, v: float, d: int, g: float, p: float, power: float) -> NoiseVariances:
    """Return the best variances of noise of this power.

    Args:
        u: variance of negative gradients, in every direction.
        v: variance of positive gradients, in every direction.
        d: number of directions.
        g: ‖D‖².
        p: fraction of positive examples, between 0 and 1.
        power: P.
    """
    if u > v:
        other = solve(u=v, v=u, d=d, g=g, p=1 - p, power=power)
        return NoiseVariances(other.lam11, other.lam21, other.lam10, other.lam20, other.sum_kl)
    if g <= 0 or power <= 0:
        return NoiseVariances(0.0, 0.0, 0.0, 0.0, sum_kl(u, v, u, v, d, g))
    # Here e = v: the positive class gets noise along D alone.
    whole = power + d * (p * v + (1 - p) * u)

    def line(c: float) -> tuple[float, float]:
        """Return the best (a, b) for this c."""
        left = whole - (d - 1) * ((1 - p) * c + p * v)
        ratio = math.sqrt((left + (1 - p) * g) / (left + p * g))
        most = (left - p * v) / (1 - p)
        a = min(max(left / (p * ratio + 1 - p), c), most)
        return a, (left - (1 - p) * a) / p

    def divergence(c: float) -> float:
        a, b = line(c)
        return sum_kl(a, b, c, v, d, g)

    # c above v would only separate the classes again; the power limits c as well.
    highest = min(v, u + power / ((1 - p) * d))
    c = u if d == 1 or highest <= u else least(divergence, max(u, highest * 1e-12), highest)
    a, b = line(c)
    return NoiseVariances(
        max(a - u, 0.0), max(c - u, 0.0), max(b - v, 0.0), 0.0, sum_kl(a, b, c, v, d, g)
    )


def sum_kl(a: float, b: float, c: float, e: float, d: int, g: float) -> float:
    """Return KL(1 ‖ 0) + KL(0 ‖ 1) of two Gaussians with means sqrt(g) apart along a direction.

    Args:
        a: variance of the negative class along that direction.
        b: variance of the positive class along that direction.
        c: variance of the negative class in the d-1 other directions.
        e: variance of the positive class in the d-1 other directions.
        d: number of directions.
        g: squared distance of the means.
    """
    return 0.5 * ((d - 1) * _excess(c, e) + _excess(a, b) + _ratio(g, a) + _ratio(g, b))


def _excess(x: float, y: float) -> float:
    """Return x/y + y/x - 2, without cancellation."""
    return 0.0 if x == y else _ratio((x - y) ** 2, x * y)


def _ratio(x: float, y: float) -> float:
    if not x:
        return 0.0
    return x / y if y else math.inf


def least(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the minimum point of a function between two positive numbers.

    The function is convex in the logarithm of its argument; the method is golden-section search.
    """
    left = math.log(low)
    right = math.log(high)
    near = right - _GOLDEN * (right - left)
    far = left + _GOLDEN * (right - left)
    at_near = function(math.exp(near))
    at_far = function(math.exp(far))
    for _ in range(_STEPS):
        if at_near <= at_far:
            right = far
            far = near
            at_far = at_near
            near = right - _GOLDEN * (right - left)
            at_near = function(math.exp(near))
        else:
            left = near
            near = far
            at_near = at_far
            far = left + _GOLDEN * (right - left)
            at_far = function(math.exp(far))
    # The search approaches the ends but never returns them, so compare them too.
    return min([low, high, math.exp((left + right) / 2)], key=function)
