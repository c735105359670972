"""Bits side by side, and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dure.collectives.compression.packing import (
    BLOCK,
    bits_table,
    in_blocks,
    pack,
    pack_in_torch,
    pack_signs,
    pack_signs_in_torch,
    packed_bytes,
    unpack,
    unpack_in_torch,
    unpack_signs,
)


def codes_of(n: int, bits: int) -> Tensor:
    random = torch.Generator().manual_seed(n)
    return torch.randint(0, 1 << bits, (n,), generator=random).to(
        torch.uint8 if bits <= 8 else torch.int32
    )


@given(n=st.integers(0, 300), bits=st.integers(1, 16))
def test_numbers_come_back_from_as_many_bytes_as_their_bits_need(n: int, bits: int) -> None:
    codes, packed = codes_of(n, bits), torch.empty(packed_bytes(n, bits), dtype=torch.uint8)
    pack(codes, bits, packed)
    assert packed_bytes(n, bits) == -(-n * bits // 8)
    assert torch.equal(unpack(packed, bits, n), codes)


@given(n=st.integers(1, 100), bits=st.integers(1, 8))
def test_number_i_is_in_the_bits_from_b_i_upwards(n: int, bits: int) -> None:
    codes, packed = codes_of(n, bits), torch.empty(packed_bytes(n, bits), dtype=torch.uint8)
    pack(codes, bits, packed)
    whole = int.from_bytes(packed.numpy().tobytes(), "little")
    assert whole == sum(code << (bits * place) for place, code in enumerate(codes.tolist()))


@given(n=st.integers(1, 100), bits=st.integers(1, 7))
def test_torch_makes_the_bytes_that_numpy_makes(n: int, bits: int) -> None:
    codes, packed = codes_of(n, bits), torch.empty(packed_bytes(n, bits), dtype=torch.uint8)
    in_torch = packed.clone()
    pack(codes, bits, packed)
    pack_in_torch(codes, bits, in_torch)
    assert torch.equal(in_torch, packed)
    assert torch.equal(unpack_in_torch(packed, bits, n), codes)


@given(rows=st.integers(1, 5), length=st.integers(1, 40))
def test_signs_are_8_a_byte_and_every_row_has_bytes_of_its_own(rows: int, length: int) -> None:
    matrix = torch.randn(rows, length, generator=torch.Generator().manual_seed(length))
    matrix[:, ::3] = 0.0
    bits, counts = pack_signs(matrix)
    assert bits.shape == (rows, -(-length // 8))
    signs = unpack_signs(bits, length, bits_table(-1.0, 1.0, torch.float32, matrix.device))
    assert torch.equal(signs, torch.where(matrix >= 0, 1.0, -1.0))
    assert counts.tolist() == (matrix >= 0).sum(1).tolist()
    in_torch, its_counts = pack_signs_in_torch(matrix)
    assert torch.equal(bits, in_torch)
    assert torch.equal(counts, its_counts)


@pytest.mark.parametrize(
    "shape", [(3, 5), (1, 2 * BLOCK + 11), (5, BLOCK // 2), (2, 3 * BLOCK), (4, 0), (0, 4)]
)
def test_pieces_cover_a_matrix_once_and_begin_at_whole_bytes(shape: tuple[int, int]) -> None:
    covered = torch.zeros(shape, dtype=torch.int8)
    for rows, columns in in_blocks(*shape, covered.device):
        assert columns.start % 8 == 0
        assert covered[rows, columns].numel() <= BLOCK
        covered[rows, columns] += 1
    assert bool((covered == 1).all())
