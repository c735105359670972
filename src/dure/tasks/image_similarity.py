"""Similarity of a picture and its reconstruction.

    MSE     mean of (x - y)² over all numbers                          0 for the same
    PSNR    10 log10(span² / MSE), in decibels                         more is closer
    SSIM    ((2 mx my + a)(2 cxy + b)) / ((mx² + my² + a)(vx + vy + b))     1 for the same

SSIM compares means m, variances v and covariances c in windows of 7 pixels each way, and takes the
mean; a = (0.01 span)², b = (0.03 span)². span: the difference of the largest and the smallest
possible value.

Source: Z. Wang et al., "Image Quality Assessment: From Error Visibility to Structural Similarity",
2004.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def squared_errors(found: Tensor, true: Tensor) -> Tensor:
    """Return the mean squared error of each, float64 of shape (n,). found, true: shape (n, ...)."""
    return (found.double() - true.double()).flatten(1).square().mean(dim=1)


def psnr(errors: Tensor, span: float) -> Tensor:
    """Return the PSNR of mean squared errors, in decibels; at most 120, for an error of 0."""
    least = span**2 * 1e-12
    return 10 * torch.log10(span**2 / errors.clamp(min=least))


def ssim(found: Tensor, true: Tensor, span: float) -> float:
    """Return the mean SSIM over pictures of shape (n, channels, height, width)."""
    return float(ssim_each(found, true, span).mean())


def ssim_each(found: Tensor, true: Tensor, span: float) -> Tensor:
    """Return the SSIM of each picture, float64 of shape (n,)."""
    size = min(7, *true.shape[-2:])
    count = size * size

    def windows(pictures: Tensor) -> Tensor:
        return F.avg_pool2d(pictures.double(), size, stride=1)

    x = found.double()
    y = true.double()
    mean_x = windows(x)
    mean_y = windows(y)
    unbiased = count / max(count - 1, 1)
    var_x = unbiased * (windows(x * x) - mean_x**2)
    var_y = unbiased * (windows(y * y) - mean_y**2)
    both = unbiased * (windows(x * y) - mean_x * mean_y)
    one = (0.01 * span) ** 2
    two = (0.03 * span) ** 2
    upper = (2 * mean_x * mean_y + one) * (2 * both + two)
    lower = (mean_x**2 + mean_y**2 + one) * (var_x + var_y + two)
    ratio: Tensor = upper / lower
    return ratio.flatten(1).mean(dim=1)
