"""Figures of how alike pictures are."""

from __future__ import annotations

import math

import pytest
import torch

from dure.tasks.image_similarity import psnr, squared_errors, ssim, ssim_each


def test_errors_are_means_of_each_and_decibels_of_their_range() -> None:
    true = torch.zeros(2, 1, 4, 4)
    found = torch.stack([torch.full((1, 4, 4), 0.1), torch.full((1, 4, 4), 0.2)])
    errors = squared_errors(found, true)
    assert errors.tolist() == pytest.approx([0.01, 0.04], rel=1e-6)
    assert psnr(errors, 1.0).tolist() == pytest.approx([20.0, 10 * math.log10(25)], rel=1e-6)
    # Twice the range: 6 dB more.
    assert float(psnr(errors, 2.0)[0]) == pytest.approx(20 + 20 * math.log10(2), rel=1e-6)
    assert float(psnr(torch.zeros(1, dtype=torch.float64), 3.0)) == pytest.approx(120)


def test_the_likeness_of_several_is_the_mean_of_each() -> None:
    draws = torch.Generator().manual_seed(0)
    true = torch.rand(3, 2, 9, 9, generator=draws)
    found = true + 0.1 * torch.rand(3, 2, 9, 9, generator=draws)
    each = ssim_each(found, true, 1.0)
    assert ssim(found, true, 1.0) == pytest.approx(float(each.mean()))
    alone = [ssim(found[i : i + 1], true[i : i + 1], 1.0) for i in range(3)]
    assert each.tolist() == pytest.approx(alone)
