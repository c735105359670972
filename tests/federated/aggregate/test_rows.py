"""The updates of a round as rows: sums and distances in blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from update_matrices import DIMENSIONS, SEEDS, close, normal, rows, update, vector

from dure.federated.aggregate import UpdateRows

ROWS = st.integers(1, 9)
BLOCKS = st.integers(1, 200)


@given(ROWS, DIMENSIONS, SEEDS, BLOCKS)
def test_distances_and_sums_are_those_of_the_matrix_whatever_the_block(m, d, seed, numbers):
    matrix, weights = normal(m, d, seed), normal(1, m, seed + 1)[0]
    made = rows(matrix, numbers=numbers)
    close(made.squared_distances(), (matrix[:, None] - matrix[None]).square().sum(2))
    close(made.distances(), matrix.norm(dim=1))
    close(made.distances(update(matrix[0])), (matrix - matrix[0]).norm(dim=1))
    close(vector(made.combination(weights)), weights @ matrix)
    close(vector(made.map(lambda values: values.amax(0))), matrix.amax(0))


@given(ROWS, ROWS, DIMENSIONS, SEEDS, BLOCKS)
def test_mixtures_are_rows_like_others(new, m, d, seed, numbers):
    matrix, mix, again = normal(m, d, seed), normal(new, m, seed + 1), normal(3, new, seed + 2)
    made = rows(matrix, numbers=numbers).mixed(mix, [1.0] * new)
    close(
        made.squared_distances(), (mix @ matrix)[:, None].sub((mix @ matrix)[None]).square().sum(2)
    )
    close(vector(made.row(new - 1)), (mix @ matrix)[new - 1])
    close(vector(made.mixed(again, [1.0] * 3).only([2, 0]).row(1)), (again @ mix @ matrix)[0])
    close(vector(made.map(lambda values: values.amax(0), own_dtype=True)), (mix @ matrix).amax(0))


@given(DIMENSIONS, SEEDS)
def test_a_group_is_the_mean_by_weight_and_weighs_as_much_as_its_rows(d, seed):
    matrix = normal(4, d, seed)
    made = rows(matrix, [1, 2, 3, 4]).grouped([[3, 0], [1, 2]])
    assert made.weights == [5, 5]
    close(vector(made.row(0)), (matrix[0] + 4 * matrix[3]) / 5)
    close(vector(made.row(1)), (2 * matrix[1] + 3 * matrix[2]) / 5)


@pytest.mark.parametrize("size", [1, 100])
def test_distances_of_nearly_equal_float32_models_are_right_to_a_thousandth(size):
    d, base = 1_000_000, normal(1, 1_000_000, 0)[0]
    models = [(size * base + 1e-4 * normal(1, d, seed)[0]).float() for seed in range(1, 5)]
    made = UpdateRows([[model] for model in [*models, torch.full((d,), 1e30)]], [1.0] * 5)
    squared = made.squared_distances()
    for i in range(4):
        for j in range(4):
            true = float((models[i].double() - models[j].double()).square().sum())
            assert squared[i, j] >= 0
            assert float(squared[i, j]) == pytest.approx(true, rel=1e-3)
    assert torch.isfinite(squared).all()


def test_one_coefficient_among_zeros_gives_the_row_to_the_bit_in_its_dtypes():
    updates = [
        [torch.randn(5).to(dtype) for dtype in (torch.float16, torch.float32, torch.float64)]
        for _ in range(3)
    ]
    for tensor, like in zip(UpdateRows(updates, [1, 1, 1]).row(1), updates[1], strict=True):
        assert tensor.dtype == like.dtype
        assert torch.equal(tensor, like)


def test_tensors_keep_their_shapes():
    updates = [[torch.randn(2, 3), torch.randn(()), torch.randn(0)] for _ in range(3)]
    assert [t.shape for t in UpdateRows(updates, [1, 1, 1]).row(1)] == [(2, 3), (), (0,)]


def test_rows_are_finite_if_all_numbers_and_the_weight_are():
    matrix = torch.ones(9, 4, dtype=torch.float64)
    matrix[1, 0], matrix[2, 3], matrix[3, 1], matrix[4, 2] = torch.nan, torch.inf, -torch.inf, 1e200
    matrix[5] = 1e100
    assert rows(matrix, [1, 1, 1, 1, 1, 1, torch.nan, torch.inf, 0]).finite() == [0, 5]


def test_a_half_precision_row_is_not_lost_where_its_square_would_overflow():
    assert UpdateRows([[torch.full((4,), 6e4, dtype=torch.float16)]], [1]).finite() == [0]


@given(st.permutations(range(5)))
def test_equal_keys_are_ordered_by_value(permutation):
    matrix = torch.tensor(
        [[0, 1, 2.0], [0, 1, 3], [0, 2, 0], [1, 0, 0], [0, 0, 9]], dtype=torch.float64
    )
    keys = torch.tensor([7.0, 7, 7, 7, 8])
    order = rows(matrix[list(permutation)], numbers=2).order(keys[list(permutation)])
    assert [permutation[place] for place in order] == [0, 1, 2, 3, 4]


def test_updates_that_are_no_rows_are_refused():
    with pytest.raises(ValueError, match="no updates"):
        UpdateRows([], [])
    with pytest.raises(ValueError, match="update 1 differs"):
        UpdateRows([[torch.zeros(2)], [torch.zeros(3)]], [1, 1])
    with pytest.raises(ValueError, match="update 1 differs"):
        UpdateRows([[torch.zeros(2)], [torch.zeros(2).half()]], [1, 1])
    with pytest.raises(ValueError, match="as many weights"):
        UpdateRows([[torch.zeros(2)]], [1, 1])
    with pytest.raises(ValueError, match="floating point"):
        UpdateRows([[torch.zeros(2, dtype=torch.int64)]], [1])
