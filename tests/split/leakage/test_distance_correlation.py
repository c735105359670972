"""Distance correlation, and its gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dure.split.leakage import NoPeek
from dure.split.leakage.distance_correlation import distance_correlation


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def turn(d: int) -> Tensor:
    return torch.linalg.qr(drawn(d, d, seed=9))[0]


def by_hand(x: Tensor, z: Tensor) -> float:
    """From the definition, number by number."""

    def centred(rows: Tensor) -> list[list[float]]:
        n = len(rows)
        a = [[float((rows[i] - rows[j]).norm()) for j in range(n)] for i in range(n)]
        mean = [sum(row) / n for row in a]
        every = sum(mean) / n
        return [[a[i][j] - mean[i] - mean[j] + every for j in range(n)] for i in range(n)]

    a, b = centred(x), centred(z)
    n = len(x)

    def product(c: list[list[float]], d: list[list[float]]) -> float:
        return sum(c[i][j] * d[i][j] for i in range(n) for j in range(n)) / n**2

    return float((product(a, b) / (product(a, a) * product(b, b)) ** 0.5) ** 0.5)


def test_it_is_what_the_definition_says() -> None:
    x, z = drawn(9, 4), drawn(9, 3, seed=1)
    assert float(distance_correlation(x, z)) == pytest.approx(by_hand(x, z), rel=1e-12)


def test_of_the_same_vectors_turned_moved_and_stretched_it_is_one() -> None:
    x = drawn(40, 5)
    assert float(distance_correlation(x, x)) == pytest.approx(1, abs=1e-12)
    assert float(distance_correlation(x, 3 * x @ turn(5) + 7)) == pytest.approx(1, abs=1e-12)


def test_to_turn_one_of_them_changes_nothing() -> None:
    x, z = drawn(40, 5), drawn(40, 3, seed=1).cumsum(dim=1) + drawn(40, 5)[:, :3]
    before = distance_correlation(x, z)
    assert torch.allclose(distance_correlation(x @ turn(5), z @ turn(3)), before, rtol=1e-12)
    assert 0.2 < float(before) < 1


def test_of_many_independent_vectors_it_is_small() -> None:
    few, many = (float(distance_correlation(drawn(n, 1), drawn(n, 1, seed=1))) for n in (50, 2000))
    assert many < 0.06 < few


def test_it_finds_a_dependence_that_correlation_does_not() -> None:
    x = drawn(500, 1)
    z = x.square()
    assert abs(float(torch.corrcoef(torch.cat([x, z], dim=1).T)[0, 1])) < 0.15
    assert float(distance_correlation(x, z)) > 0.4


def test_its_gradient_is_that_of_finite_differences() -> None:
    x, z = drawn(7, 3), drawn(7, 2, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda values: distance_correlation(x, values), (z,))


def test_what_does_not_vary_has_none_and_no_gradient_that_is_no_number() -> None:
    same = torch.ones(6, 2, dtype=torch.float64, requires_grad=True)
    found = distance_correlation(drawn(6, 3), same)
    found.backward()
    assert found.item() == 0
    assert same.grad is not None
    assert bool(same.grad.isfinite().all())


def test_no_peek_goes_down_its_term() -> None:
    x = drawn(30, 4)
    z = x[:, :2] + 0.1 * drawn(30, 2, seed=1)
    gradient = NoPeek(0.5).activations(x, z)
    leaf = z.clone().requires_grad_()
    (0.5 * distance_correlation(x, leaf)).backward()
    assert torch.equal(gradient, leaf.grad)
    assert distance_correlation(x, z - 0.1 * gradient) < distance_correlation(x, z)
    assert torch.equal(NoPeek().activations(x[:1], z[:1]), torch.zeros(1, 2).double())
