"""1-bit SGD: what a column decodes to."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from small_buckets import Shape, joined, numbers, sent
from torch import Tensor

from dure.collectives.compression import OneBit
from dure.collectives.compression.one_bit import columns_of
from dure.collectives.compression.packing import BLOCK


def decoded_slowly(tensor: Tensor) -> Tensor:
    """Every column's mean of what is at least 0, and mean of the rest."""
    matrix = tensor.reshape(columns_of(tensor.shape)).clone()
    for row in matrix:
        above = row >= 0
        for which in (above, ~above):
            if which.any():
                row[which] = row[which].mean()
    return matrix.view(tensor.shape)


SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=4)


@given(SHAPES)
def test_a_number_decodes_to_the_mean_of_those_of_its_sign_in_its_column(
    shapes: list[Shape],
) -> None:
    tensors = [numbers(shape, index) for index, shape in enumerate(shapes)]
    arrived = sent(OneBit().compressor(tensors, 0), tensors)
    torch.testing.assert_close(
        arrived, joined([decoded_slowly(tensor) for tensor in tensors]), rtol=0, atol=1e-14
    )


def test_long_columns_are_averaged_over_all_their_pieces() -> None:
    for shape in [(2 * BLOCK + 13,), (3, BLOCK + 5), (BLOCK // 10, 33)]:
        tensor = numbers(shape, 1)
        arrived = sent(OneBit().compressor([tensor], 0), [tensor]).view(columns_of(tensor.shape))
        rows = tensor.view(columns_of(tensor.shape))[:3]
        torch.testing.assert_close(arrived[:3], decoded_slowly(rows), rtol=0, atol=1e-13)


@given(SHAPES)
def test_a_column_is_a_byte_for_8_numbers_and_8_for_its_means(shapes: list[Shape]) -> None:
    tensors = [torch.zeros(shape) for shape in shapes]
    columns = [columns_of(tensor.shape) for tensor in tensors]
    expected = sum(count * (-(-length // 8) + 8) for count, length in columns)
    assert OneBit().payload_bytes(tensors) == expected


def test_zeros_and_columns_of_one_sign_arrive_as_they_are() -> None:
    tensors = [torch.zeros(3, 5), torch.full((2, 2), -3.0), torch.ones(4)]
    assert torch.equal(sent(OneBit().compressor(tensors, 0), tensors), joined(tensors))
