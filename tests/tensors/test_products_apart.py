"""Products and sums that are rounded apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.tensors.unfused_multiply_add import BLOCK, add_multiple, square_root, sum_of_multiples

DTYPES = {torch.float32: np.float32, torch.float64: np.float64}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    length=st.sampled_from([0, 1, 7, 100, BLOCK, BLOCK + 1, 2 * BLOCK + 5]),
    factor=st.sampled_from([1.0, 0.1, 37.0, 1 / 3]),
)
def test_a_product_is_rounded_before_it_is_added(
    dtype: torch.dtype, length: int, factor: float
) -> None:
    total, tensor = normal(length, dtype=dtype), normal(length, dtype=dtype, seed=1)
    # NumPy knows no fused multiply-add: it rounds twice.
    right = total.numpy() + tensor.numpy() * DTYPES[dtype](factor)
    memory = total.data_ptr()
    assert add_multiple(total, tensor, factor) is total
    assert total.data_ptr() == memory
    assert np.array_equal(total.numpy(), right)


def test_what_is_narrower_is_counted_in_the_precision_of_the_sum() -> None:
    for length in (9, BLOCK + 9):
        total, tensor = normal(length), normal(length, seed=1).bfloat16()
        right = total.numpy() + tensor.float().numpy() * np.float32(0.1)
        assert np.array_equal(add_multiple(total, tensor, 0.1).numpy(), right)


def test_tensors_that_are_not_contiguous_are_added_in_place_too() -> None:
    whole, other = normal(600, 600), normal(600, 600, seed=1)
    right = whole.numpy().T + other.numpy() * np.float32(0.1)
    add_multiple(whole.T, other, 0.1)
    assert np.array_equal(whole.numpy().T, right)


@given(rows=st.integers(1, 9), columns=st.sampled_from([1, 8, 33]))
def test_rows_are_added_from_the_first_to_the_last(rows: int, columns: int) -> None:
    matrix = normal(rows, columns, dtype=torch.float64)
    factors = normal(rows, dtype=torch.float64, seed=1)
    products = matrix.numpy() * factors.numpy()[:, None]
    right = products[0].copy()
    for product in products[1:]:
        right += product
    assert np.array_equal(sum_of_multiples(matrix.clone(), factors).numpy(), right)


def test_square_roots_are_rounded_right() -> None:
    given = normal(5000, seed=2).abs()
    exact = given.double().numpy() ** 0.5
    assert np.array_equal(square_root(given).numpy(), exact.astype(np.float32))
    assert square_root(torch.tensor(4.0)) == 2
