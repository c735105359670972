"""Blocks: memory is used again, and never while somebody has a tensor of it."""

from __future__ import annotations

import torch

from dure.tensors.block_allocator import LARGE, BlockAllocator


def test_memory_is_used_again_when_its_last_view_is_gone() -> None:
    blocks = BlockAllocator()
    first = blocks.empty(LARGE)
    view = first[5:9]
    address = first.data_ptr()
    del first
    other = blocks.empty(LARGE)
    assert other.data_ptr() != address  # a view of the first one lives
    del view
    assert blocks.empty(LARGE).data_ptr() == address


def test_a_copy_has_the_values_the_dtype_and_memory_of_its_own() -> None:
    blocks = BlockAllocator()
    for count in (3, LARGE):
        values = torch.arange(count, dtype=torch.float64).view(-1, 1)
        copy = blocks.copy(values)
        assert torch.equal(copy, values)
        assert copy.dtype == values.dtype
        assert copy.data_ptr() != values.data_ptr()
