"""Masks of a secure sum: pseudorandom vectors that clients add and the server removes.

    y = x + PRG(b) + Σ_{v above} PRG(s_v) - Σ_{v below} PRG(s_v)      mod 2^32

PRG is the keystream of `dure.randomness.keystream`, from the whole 256-bit key: a generator with a
32-bit seed could be broken by trying all seeds.

Every sum is in int32, whose wrap-around is the modulus. The code passes over a vector once, in
blocks that stay in the cache while all masks are added to them. d elements and k masks cost 4 d k
bytes of keystream, as many bytes of additions, and the memory of one block.

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


def add_masks(total: Tensor, masks: Iterable[tuple[bytes, int]]) -> None:
    """Add masks in place: total += Σ sign · PRG(key) mod 2^32 over pairs (key, sign).

    `total` is int32 of any shape, contiguous, on the CPU. `key` has 32 bytes and is used for this
    mask alone; `sign` is 1 or -1. Raises ValueError for other arguments and leaves total unchanged.
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
