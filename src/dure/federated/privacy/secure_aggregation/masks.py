"""Masks: what a client adds to its vector so that it looks like noise, and what takes it off again.

    y = x + PRG(b) + Σ_{v above} PRG(s_v) - Σ_{v below} PRG(s_v)      mod 2^32

PRG is the keystream of `dure.randomness.keystream`, from the whole 256-bit key: a key that is
folded to the 32 bits that seed another generator can be found by trying all of them.

Every sum is in int32, which wraps around: that is the modulus. A vector is walked through once, in
blocks that stay in the cache while all masks are added to them. So d elements and k masks cost 4 d
k bytes of keystream and as many of additions, and no memory but one block.

Source: Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine
Learning", CCS, section 4.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from dure.randomness.keystream import BLOCK, SLACK, Keystream

_ELEMENTS = BLOCK // 4


def add_mask(total: Tensor, key: bytes, sign: int) -> None:
    """total += sign · PRG(key) mod 2^32. As `add_masks`, for one mask."""
    add_masks(total, [(key, sign)])


def add_masks(total: Tensor, masks: Iterable[tuple[bytes, int]]) -> None:
    """total += Σ sign · PRG(key) mod 2^32, over pairs of a key and a sign, in place.

    total: int32 of any shape, contiguous, on the CPU. key: 32 bytes, for this mask alone. sign: 1
    or -1. Raises ValueError for others, and then total is as it was.
    """
    if total.dtype != torch.int32 or not total.is_contiguous() or total.device.type != "cpu":
        raise ValueError("masks are added to contiguous int32 on the CPU")
    streams = [(Keystream(key), _operation(sign)) for key, sign in masks]
    elements = total.view(-1).numpy()
    room = memoryview(bytearray(BLOCK + SLACK))
    mask = np.frombuffer(room, dtype="<i4", count=_ELEMENTS)
    for at in range(0, len(elements), _ELEMENTS):
        block = elements[at : at + _ELEMENTS]
        part = mask[: len(block)]
        for stream, operation in streams:
            stream.into(room, block.nbytes)
            operation(block, part, out=block)


def _operation(sign: int) -> np.ufunc:
    if sign not in (1, -1):
        raise ValueError(f"a mask has the sign 1 or -1, not {sign}")
    return np.add if sign == 1 else np.subtract
