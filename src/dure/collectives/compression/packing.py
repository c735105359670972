"""Bit packing: 8 signs a byte, and 8 whole numbers of b bits in b bytes.

All functions process many numbers at once: signs by numpy's packbits, numbers by shifting the bytes
of 64-bit words together. On a CPU numpy does the work, on a GPU torch. The first of 8 numbers is in
the lowest bits, and words are little-endian.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 1 << 17
"""Elements processed at a time, so that the result of a pass is in the cache for the next."""

Array = np.ndarray[Any, Any]
Words = TypeVar("Words", Array, Tensor)

_GATHER_BITS = 0x0102040810204080  # brings the lowest bits of a word's bytes into its highest byte


def in_blocks(rows: int, length: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Yield slices of a matrix of about `BLOCK` elements, each starting at a multiple of 8 columns.

    On a GPU the matrix is a single piece.
    """
    block = BLOCK if device.type == "cpu" else max(rows * length, 1)
    height = max(1, block // max(length, 1))
    width = min(length, block)
    # Whole rows where they are short, pieces of one row where they are long.
    for top in range(0, rows, height):
        for left in range(0, length, max(width, 1)):
            yield slice(top, min(top + height, rows)), slice(left, min(left + width, length))


def in_columns(
    columns: Sequence[tuple[int, int]], vector: Tensor, signs: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield pieces of a vector of columns with their signs, which use whole bytes for each column.

    columns: (count, length of each), in the order of the vector. Yields (slice of columns, their
    numbers (columns, length), their signs (columns, ⌈length/8⌉)), numbers and signs as views.
    """
    start = 0
    at = 0
    first = 0
    for count, length in columns:
        width = (length + 7) // 8
        matrix = vector[start : start + count * length].view(count, length)
        bits = signs[at : at + count * width].view(count, width)
        for rows, part in in_blocks(count, length, vector.device):
            which = slice(first + rows.start, first + rows.stop)
            yield which, matrix[rows, part], bits[rows, part.start // 8 : (part.stop + 7) // 8]
        start = start + count * length
        at = at + count * width
        first = first + count


def sign_bytes(columns: Sequence[tuple[int, int]]) -> int:
    """Return the bytes of the signs of columns: (count, length of each)."""
    return sum(count * ((length + 7) // 8) for count, length in columns)


def numbers(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as numbers, copied if their address is not aligned to the dtype."""
    aligned = payload.storage_offset() % dtype.itemsize == 0
    return (payload if aligned else payload.clone()).view(dtype)


def pack_signs(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the signs x ≥ 0 of a matrix (rows, L): uint8 (rows, ⌈L/8⌉), and their row counts.

    The counts of numbers ≥ 0 are int64 (rows,).
    """
    if matrix.device.type == "cpu":
        at_least_0 = np.greater_equal(matrix.numpy(), 0)
        counts = np.count_nonzero(at_least_0, axis=1)
        return torch.from_numpy(
            np.packbits(at_least_0, axis=1, bitorder="little")
        ), torch.from_numpy(counts)
    return pack_signs_in_torch(matrix)


def pack_signs_in_torch(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Do the work of `pack_signs` in torch, for a GPU."""
    # Eight bools are the bytes of a 64-bit word; a multiplication shifts each to a separate bit in
    # the highest byte, without a carry between them.
    signs = matrix >= 0
    padded = pad(signs.view(torch.uint8), (0, -matrix.shape[1] % 8)).contiguous()
    return (padded.view(torch.int64) * _GATHER_BITS >> 56).to(torch.uint8), signs.sum(1)


@lru_cache
def bits_table(zero: float, one: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the numbers that the 8 bits of each byte stand for: (256, 8)."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    return torch.where(bits == 1, one, zero).to(dtype)


def unpack_signs(bits: Tensor, length: int, table: Tensor) -> Tensor:
    """Return the numbers of `table` for bits (rows, ⌈L/8⌉): (rows, L)."""
    rows = table.index_select(0, bits.reshape(-1).to(torch.int32))
    return rows.view(len(bits), -1)[:, :length]


def packed_bytes(n: int, bits: int) -> int:
    """Return the bytes of n numbers of `bits` bits."""
    return (n * bits + 7) // 8


def pack(codes: Tensor, bits: int, out: Tensor) -> None:
    """Pack numbers below 2^bits without gaps.

    codes: uint8 (n,), or int32 for 9 to 16 bits, whose lowest 8 bits are packed separately from the
    rest. out: uint8 (packed_bytes(n, bits),).
    """
    if bits > 8:
        # The low bytes as they are, then the rest packed: the split falls on a whole byte.
        low = len(codes)
        out[:low].copy_(codes & 255)
        pack((codes >> 8).to(torch.uint8), bits - 8, out[low:])
    elif bits == 8:
        out.copy_(codes)
    elif codes.device.type == "cpu":
        _pack_by_numpy(codes.numpy(), bits, out.numpy())
    else:
        pack_in_torch(codes, bits, out)


def unpack(packed: Tensor, bits: int, n: int) -> Tensor:
    """Return the numbers that `pack` packed: uint8 (n,), int32 for more than 8 bits."""
    if bits > 8:
        return packed[:n].to(torch.int32) | unpack(packed[n:], bits - 8, n).to(torch.int32) << 8
    if bits == 8 or n == 0:
        return packed
    if packed.device.type == "cpu":
        return torch.from_numpy(_unpack_by_numpy(packed.numpy(), bits, n))
    return unpack_in_torch(packed, bits, n)


def _pack_by_numpy(codes: Array, bits: int, out: Array) -> None:
    """Do the work of `pack` on a CPU, up to 7 bits."""
    count = -(-len(codes) // 8)
    if len(codes) % 8:
        codes = np.concatenate([codes, np.zeros(-len(codes) % 8, np.uint8)])
    # 8 codes are the bytes of a word. Each round joins neighbours in pairs, until all are adjacent
    # at the low end of the word.
    words = codes.view(np.int64)
    for lane in (16, 32, 64):
        words = _closer(words, bits, lane)
        if bits * lane == 64:  # a lane is a byte
            out[:] = words.view(f"u{lane // 8}")[: len(out)]
            return
    # Each word has `bits` bytes left.
    out[:] = np.ndarray(count, f"V{bits}", words, strides=(8,)).copy().view(np.uint8)[: len(out)]


def _unpack_by_numpy(packed: Array, bits: int, n: int) -> Array:
    """Do the work of `unpack` on a CPU, up to 7 bits."""
    count = -(-n // 8)
    if len(packed) < count * bits:
        packed = np.concatenate([packed, np.zeros(count * bits - len(packed), np.uint8)])
    words = np.zeros(0, np.int64)
    for lane in (64, 32, 16):
        # `_pack_by_numpy` backwards, starting at the lane whose numbers fill a byte, if there is
        # such a lane.
        if bits * lane == 64:
            words = packed.astype(f"u{lane // 8}").view(np.int64)
        elif lane == 64:
            words = np.zeros(count, np.int64)
            np.ndarray(count, f"V{bits}", words, strides=(8,))[:] = packed.view(f"V{bits}")
        if len(words):
            words = _apart(words, bits, lane)
    return words.view(np.uint8)[:n]


def pack_in_torch(codes: Tensor, bits: int, out: Tensor) -> None:
    """Do the work of `pack` in torch, for a GPU, up to 7 bits."""
    words = pad(codes, (0, -len(codes) % 8)).view(torch.int64)
    for lane in (16, 32, 64):
        words = _closer(words, bits, lane)
    out.copy_(words.view(torch.uint8).view(-1, 8)[:, :bits].reshape(-1)[: len(out)])


def unpack_in_torch(packed: Tensor, bits: int, n: int) -> Tensor:
    """Do the work of `unpack` in torch, for a GPU, up to 7 bits."""
    count = (n + 7) // 8
    rows = pad(packed, (0, count * bits - len(packed))).view(count, bits)
    words = pad(rows, (0, 8 - bits)).view(torch.int64).view(-1)
    for lane in (64, 32, 16):
        words = _apart(words, bits, lane)
    return words.view(torch.uint8)[:n]


def _closer(words: Words, bits: int, lane: int) -> Words:
    """In every lane of `lane` bits, move the upper half's numbers next to the lower half's.

    Before, half a lane of 8, 16 or 32 bits has 1, 2 or 4 numbers.
    """
    half = lane // 2
    # In place where it can be: a new array costs more than the arithmetic.
    upper = words & _mask(half, lane, half)
    upper >>= half - bits * lane // 16
    upper |= words & _mask(half, lane, 0)
    return upper


def _apart(words: Words, bits: int, lane: int) -> Words:
    """Invert `_closer`."""
    half = lane // 2
    used = bits * lane // 16
    upper = words & _mask(used, lane, used)
    upper <<= half - used
    upper |= words & _mask(used, lane, 0)
    return upper


@lru_cache
def _mask(bits: int, lane: int, shift: int) -> int:
    """Return `bits` set bits above `shift` in every lane of a word, as a signed 64-bit number."""
    mask = sum(((1 << bits) - 1) << (start + shift) for start in range(0, 64, lane)) & (2**64 - 1)
    # torch and numpy treat the words as signed numbers, and refuse larger values.
    return mask - 2**64 if mask >> 63 else mask
