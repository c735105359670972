"""Similarity of rebuilt examples and originals: assignment, error figures and intervals.

Rebuilt examples have no order. Each original is paired with a rebuilt example so that the sum of
squared errors is least (the assignment problem). The assignment favours the attacker, who does not
know the pairs; the table therefore also shows the result of a guess without any update, the mean of
public inputs.

Cost: O(n²) distances and O(n³) for the assignment.

Source: H. W. Kuhn, "The Hungarian Method for the Assignment Problem", 1955; B. Efron, "Bootstrap
Methods", 1979 (intervals).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from dure.randomness.seeds import generator
from dure.tasks.image_similarity import psnr, squared_errors, ssim_each

BOOTSTRAPS = 1000
"""Number of samples of a bootstrap."""


class Interval(NamedTuple):
    """Estimate and the two ends of its 95 % confidence interval."""

    value: float
    low: float
    high: float


class Likeness(NamedTuple):
    """Figures of each original and the rebuilt example that was matched to it.

    Args:
        mse: mean squared errors, of shape (n,).
        psnr: peak signal-to-noise ratios in dB, of shape (n,).
        ssim: structural similarities, of shape (n,); empty if inputs are not pictures.
    """

    mse: Tensor
    psnr: Tensor
    ssim: Tensor


def matched(found: Tensor, true: Tensor) -> Tensor:
    """Return the rebuilt example of each original, of the shape of `true`.

    `found` has the shape (m, ...); with m below the number of originals, rebuilt examples repeat.
    Raises ValueError if `found` is empty.
    """
    if not len(found):
        raise ValueError("no example was reconstructed, so there is nothing to match")
    copies = -(-len(true) // len(found))
    costs = torch.cdist(true.flatten(1).double(), found.flatten(1).double()).square()
    rows, columns = linear_sum_assignment(costs.repeat(1, copies).numpy())
    order = torch.as_tensor(columns)[torch.as_tensor(rows).argsort()] % len(found)
    return found[order]


def likeness(found: Tensor, true: Tensor, span: float) -> Likeness:
    """Return the figures of matched examples. `span` is the range of inputs."""
    errors = squared_errors(found, true)
    is_picture = true.ndim == 4 and min(true.shape[-2:]) > 1
    similar = ssim_each(found, true, span) if is_picture else torch.zeros(0, dtype=torch.float64)
    return Likeness(errors, psnr(errors, span), similar)


def mean_with_interval(values: Sequence[float] | Tensor, seed: int = 0) -> Interval:
    """Return the mean and its 95 % interval, by the percentiles of a bootstrap."""
    numbers = torch.as_tensor(values, dtype=torch.float64)
    if len(numbers) < 2:
        only = float(numbers.mean())
        return Interval(only, only, only)
    draws = generator(seed, "bootstrap")
    chosen = torch.randint(len(numbers), (BOOTSTRAPS, len(numbers)), generator=draws)
    means = numbers[chosen].mean(dim=1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(float(numbers.mean()), low, high)
