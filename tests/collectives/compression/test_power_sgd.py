"""PowerSGD: exact at full rank, linear, the same factors on all ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import on_ranks
from small_buckets import bucket, joined, numbers, sent
from torch import Tensor

from dure.collectives import Group
from dure.collectives.compression import PowerSGD
from dure.collectives.compression.power_sgd import PowerSGDCompressor, orthonormal
from dure.contracts.world import RankContext


def low_rank(n: int, m: int, rank: int, *position: int) -> Tensor:
    return numbers((n, rank), 1, *position) @ numbers((rank, m), 2, *position)


@given(
    n=st.integers(1, 12),
    m=st.integers(1, 12),
    ranks=st.lists(st.integers(0, 12), min_size=1, max_size=4),
)
def test_at_full_rank_every_sum_is_exact_even_after_gradients_of_lower_rank(
    n: int, m: int, ranks: list[int]
) -> None:
    compressor = PowerSGD(12, 0).compressor([torch.zeros(n, m, dtype=torch.float64)], 0)
    for call, rank in enumerate(ranks):
        matrix = low_rank(n, m, rank, call)
        arrived = sent(compressor, [matrix]).view(n, m)
        assert float((arrived - matrix).abs().max()) <= 1e-12 * (1 + float(matrix.abs().max()))


def test_full_rank_is_exact_over_ranks_and_all_hold_the_same() -> None:
    def program(context: RankContext) -> list[Tensor]:
        compressor = PowerSGD(99, 0).compressor(bucket(0, 0), 0)
        return [
            sent(compressor, bucket(context.group.rank, call), context.group) for call in range(3)
        ]

    per_rank = on_ranks(3, program)
    for call in range(3):
        exact = joined(
            [
                torch.stack(parts).sum(0)
                for parts in zip(*(bucket(rank, call) for rank in range(3)), strict=True)
            ]
        )
        assert float((per_rank[0][call] - exact).abs().max()) < 1e-12
        assert all(torch.equal(results[call], per_rank[0][call]) for results in per_rank)


def test_ranks_that_divide_a_gradient_get_what_one_rank_would_have_got() -> None:
    def program(context: RankContext) -> Tensor:
        compressor = PowerSGD(2, 0).compressor([torch.zeros(9, 7, dtype=torch.float64)], 4)
        calls = [[numbers((9, 7), call) / context.group.size] for call in range(4)]
        return torch.stack([sent(compressor, call, context.group) for call in calls])

    alone, together = on_ranks(1, program)[0], on_ranks(3, program)[2]
    assert float((alone - together).abs().max()) < 1e-12


def test_the_first_factors_are_those_of_the_seed() -> None:
    def program(context: RankContext) -> list[Tensor]:
        compressor = PowerSGD(2, 0).compressor([torch.zeros(9, 7)], 4)
        assert isinstance(compressor, PowerSGDCompressor)
        return compressor.factors

    first, second = on_ranks(2, program)
    assert torch.equal(first[0], second[0])
    other = PowerSGD(2, 0).compressor([torch.zeros(9, 7)], 5)
    assert isinstance(other, PowerSGDCompressor)
    assert not torch.equal(other.factors[0], first[0])


def test_warm_starts_approach_the_best_approximation_of_a_matrix_that_stays() -> None:
    matrix = low_rank(20, 15, 2, 1) + 0.1 * numbers((20, 15), 3)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    best = u[:, :2] @ s[:2].diag() @ v[:2]
    compressor = PowerSGD(2, 0).compressor([matrix], 0)
    assert isinstance(compressor, PowerSGDCompressor)
    differences = []
    for _ in range(6):
        compressor.feedback.error.zero_()
        differences.append(float((sent(compressor, [matrix]).view(20, 15) - best).norm()))
    assert differences[-1] < 1e-6 < differences[0]


def test_it_compresses_weights_that_become_smaller_by_enough_and_sends_the_rest_as_it_is() -> None:
    shapes = [(100, 50), (7,), (4, 3), (20, 3, 5, 5)]
    like = [torch.zeros(shape) for shape in shapes]
    compressed = 2 * (100 + 50) + 2 * (20 + 75)
    for size in (1, 2, 3):
        total = sum(PowerSGD(2).bytes_sent(like, size, rank) for rank in range(size))
        assert total == 2 * (size - 1) * 4 * (compressed + 7 + 12)
    assert PowerSGD(1, 3.0).bytes_sent([torch.zeros(4, 12)], 2) == 4 * 48, (
        "16 numbers are a third of 48, and not less"
    )
    assert PowerSGD(1, 2.9).bytes_sent([torch.zeros(4, 12)], 2) == 4 * 16


def test_the_first_calls_are_not_compressed() -> None:
    compressor = PowerSGD(1, 0, start_after=2).compressor([torch.zeros(8, 8)], 0)
    matrices = [numbers((8, 8), call, dtype=torch.float32) for call in range(3)]
    exact = [torch.equal(sent(compressor, [matrix]), matrix.view(-1)) for matrix in matrices]
    assert exact == [True, True, False]


@pytest.mark.parametrize("factor", [torch.zeros(2, 5), torch.ones(2, 5), torch.eye(5)[:2] * 1e-30])
def test_rows_are_orthonormal_whatever_the_rank(factor: Tensor) -> None:
    torch.testing.assert_close(orthonormal(factor) @ orthonormal(factor).t(), torch.eye(2))


def test_it_has_no_messages_for_one_receiver() -> None:
    with pytest.raises(ValueError, match="all ranks compute its factors together"):
        PowerSGD().encode([torch.ones(3, 3)])
    assert Group().size == 1
