"""Columns in order."""

from __future__ import annotations

import pytest
import torch
from update_matrices import tied

from dure.federated.aggregate.sorting_network import MOST, comparators, sorted_rows


@pytest.mark.parametrize("n", range(1, 17))
def test_the_network_sorts_all_columns_of_zeros_and_ones_and_so_everything(n):
    """The zero-one principle: comparators that sort every sequence of zeros and ones sort every
    sequence."""
    columns = (torch.arange(2**n) >> torch.arange(n)[:, None]) & 1
    assert torch.equal(torch.stack(sorted_rows(columns.clone())), columns.sort(0).values)


@pytest.mark.parametrize("n", [33, 100, MOST, MOST + 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_many_rows_are_sorted(n, dtype):
    columns = tied(n, 50, 0).to(dtype)
    assert torch.equal(torch.stack(sorted_rows(columns.clone())), columns.sort(0).values)


def test_twenty_rows_take_97_comparators():
    assert len(comparators(20)) == 97
