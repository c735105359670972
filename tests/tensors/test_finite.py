"""Whether all numbers of a tensor are finite."""

from __future__ import annotations

import math

import pytest
import torch

from dure.tensors.elements import all_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.complex64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_is_seen(dtype: torch.dtype, bad: float) -> None:
    tensor = torch.ones(3, 4, dtype=dtype)
    assert all_finite(tensor)
    tensor[1, 2] = bad
    assert not all_finite(tensor)


def test_numbers_whose_squares_overflow_are_finite() -> None:
    assert all_finite(torch.tensor([1e300, -1e300], dtype=torch.float64))
    assert all_finite(torch.tensor([1e38, 1e38]))


def test_whole_numbers_and_nothing_are_finite() -> None:
    assert all_finite(torch.tensor([1, 2]))
    assert all_finite(torch.tensor(True))
    assert all_finite(torch.empty(0))
