"""Marvell's noise: the best of its power, of mean zero, and what it does to a detector."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import pytest
import torch

from dure.split.leakage.labels import norm_auc
from dure.split.leakage.marvell import Marvell, NoiseVariances, noisy, solve, sum_kl


class Problem(NamedTuple):
    """As `solve` takes it."""

    u: float
    v: float
    d: int
    g: float
    p: float


def problems(count: int = 100) -> list[Problem]:
    """Of all sizes, with all kinds of ratios."""
    draws = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        u, v, g = (10 ** (9 * torch.rand(3, generator=draws).double() - 6)).tolist()
        d = int(torch.randint(1, 300, (), generator=draws))
        found.append(Problem(u, v, d, g, 0.01 + 0.98 * float(torch.rand((), generator=draws))))
    return [*found, Problem(0.0, 1.0, 5, 1.0, 0.3), Problem(1.0, 0.0, 5, 1.0, 0.3)]


def spent(found: NoiseVariances, d: int, p: float) -> float:
    """The power of the noise."""
    one = found.lam11 + (d - 1) * found.lam21
    zero = found.lam10 + (d - 1) * found.lam20
    return p * one + (1 - p) * zero


@pytest.mark.parametrize("s", [0.1, 1.0, 10.0])
def test_all_of_the_power_is_spent_and_no_variance_is_negative(s: float) -> None:
    for u, v, d, g, p in problems():
        found = solve(u=u, v=v, d=d, g=g, p=p, power=s * g)
        scale = s * g + d * (u + v)
        assert spent(found, d, p) == pytest.approx(s * g, rel=1e-9, abs=1e-12 * scale)
        assert found.lam10 >= found.lam20 - 1e-12 * scale >= -1e-12 * scale
        assert found.lam11 >= found.lam21 - 1e-12 * scale >= -1e-12 * scale


def test_more_power_makes_the_classes_more_alike() -> None:
    for one in problems():
        powers = [s * one.g for s in (0, 0.1, 1, 10, 100)]
        found = [solve(**one._asdict(), power=power).sum_kl for power in powers]
        assert all(b < a for a, b in itertools.pairwise(found)), one


def test_no_other_noise_of_that_power_makes_them_more_alike() -> None:
    draws = torch.Generator().manual_seed(0)
    for u, v, d, g, p in problems(40):
        power = 2 * g
        best = solve(u=u, v=v, d=d, g=g, p=p, power=power)
        for near in (False, True) * 50:
            # Shares of the power: both classes, along the difference and elsewhere.
            if near:
                changed = torch.tensor(best[:4]).double()
                changed = changed * (1 + 0.1 * torch.randn(4, generator=draws).double()).abs()
                zero, zero_elsewhere, one, one_elsewhere = changed.tolist()
            else:
                zero, one, less, few = torch.rand(4, generator=draws).tolist()
                zero_elsewhere, one_elsewhere = less * zero, few * one
            other = NoiseVariances(
                zero, min(zero, zero_elsewhere), one, min(one, one_elsewhere), 0.0
            )
            scale = power / spent(other, d, p)
            a, b = u + scale * other.lam10, v + scale * other.lam11
            c, e = u + scale * other.lam20, v + scale * other.lam21
            assert sum_kl(a, b, c, e, d, g) >= best.sum_kl * (1 - 1e-9) - 1e-12


def test_the_sum_of_divergences_is_that_of_two_gaussians() -> None:
    a, b, c, e, d, g = 0.7, 1.9, 0.4, 0.6, 5, 2.5
    difference = torch.zeros(d, dtype=torch.float64)
    difference[0] = math.sqrt(g)
    zero = torch.tensor([a, *[c] * (d - 1)], dtype=torch.float64).diag()
    one = torch.tensor([b, *[e] * (d - 1)], dtype=torch.float64).diag()
    normal = torch.distributions.MultivariateNormal
    first, second = normal(torch.zeros_like(difference), zero), normal(difference, one)
    both = torch.distributions.kl_divergence(first, second)
    both = both + torch.distributions.kl_divergence(second, first)
    assert sum_kl(a, b, c, e, d, g) == pytest.approx(float(both), rel=1e-12)


def test_classes_without_variance_get_noise_along_their_difference_alone() -> None:
    found = solve(u=0, v=0, d=8, g=2.0, p=0.3, power=4.0)
    assert found.lam20 == found.lam21 == 0
    assert spent(found, 8, 0.3) == pytest.approx(4.0, rel=1e-12)
    assert math.isfinite(found.sum_kl)


def gradients(n: int = 400, d: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    """Rare positives with long gradients the other way, as a softmax has them."""
    draws = torch.Generator().manual_seed(1)
    positive = torch.arange(n) % 10 == 0
    way = torch.randn(d, generator=draws, dtype=torch.float64)
    length = torch.where(positive, -0.9, 0.1).double().unsqueeze(1)
    noise = 0.05 * torch.randn(n, d, generator=draws, dtype=torch.float64)
    return length * (way + noise), positive


def test_the_noise_has_mean_zero_and_the_covariance_that_was_found() -> None:
    rows, positive = gradients(20, 3)
    one = rows[positive].mean(dim=0) - rows[~positive].mean(dim=0)
    spread = NoiseVariances(2.0, 0.5, 1.0, 0.1, 0.0)
    draws = torch.Generator().manual_seed(2)
    times = 20_000
    seen = noisy(rows.repeat(times, 1), positive.repeat(times), one, spread, draws)
    noise = seen.reshape(times, 20, 3) - rows
    assert noise.mean(dim=0).abs().max() < 0.05
    way = one / one.norm()
    for row, lam1, lam2 in ((0, 1.0, 0.1), (1, 2.0, 0.5)):
        expected = (lam1 - lam2) * torch.outer(way, way) + lam2 * torch.eye(3)
        assert torch.allclose(noise[:, row].T.cov(), expected.double(), atol=0.06)


def test_a_detector_is_left_with_a_guess_as_the_power_grows() -> None:
    rows, positive = gradients()
    found = []
    for power in (0.01, 1.0, 10_000.0):
        aucs = []
        for seed in range(5):
            draws = torch.Generator().manual_seed(seed)
            seen, _ = Marvell(power).gradients(rows, positive, draws, None)
            aucs.append(norm_auc(seen, positive.long(), 2))
        found.append(abs(sum(aucs) / len(aucs) - 0.5))
    assert norm_auc(rows, positive.long(), 2) == 1.0
    assert found[0] > 0.4
    assert found[1] < found[0]
    assert found[2] < 0.06


def test_a_batch_of_one_class_has_the_noise_of_the_last_with_both() -> None:
    rows, positive = gradients()
    draws = torch.Generator().manual_seed(3)
    _, memory = Marvell(4.0).gradients(rows, positive, draws, None)
    assert memory is not None
    alone = rows[~positive]
    seen, after = Marvell(4.0).gradients(alone, positive[~positive], draws, memory)
    assert after == memory
    way = memory["difference"] / memory["difference"].norm()
    along = ((seen - alone) @ way).var()
    assert float(along) == pytest.approx(memory["spread"][0], rel=0.2)


def test_the_first_batch_of_one_class_is_not_left_bare() -> None:
    rows, positive = gradients()
    alone = rows[~positive]
    draws = torch.Generator().manual_seed(4)
    seen, _ = Marvell(4.0).gradients(alone, positive[~positive], draws, None)
    assert (seen - alone).norm(dim=1).median() > alone.norm(dim=1).median()
