"""Initial rows of a table: a function of seed, table and row.

A table may be larger than the memory of any machine, so a row is created at its first use, on any
server and in any order, with the same bits: no sequential generator is involved, and only integers
are computed.

    element e of row r      block b = r · ceil(dim / 4) + floor(e / 4)
                            z = mix(key + (b + 1) · 0x9E3779B97F4A7C15)      64 bits (SplitMix64)
                            16 of the 64 bits choose one of 65,536 quantiles of N(0, 1)

which is the distribution of `nn.Embedding`, with values up to 4.2. Four elements cost one mix.

Source: Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators" (SplitMix64).
"""

from __future__ import annotations

from functools import cache
from statistics import NormalDist
from typing import Any

import numpy
from numpy.typing import NDArray

from dure.randomness.seeds import derive

_GAMMA = numpy.uint64(0x9E3779B97F4A7C15)
_LANES = 4
"""Number of 16-bit numbers in 64 bits."""
_FINENESS = 2.0**20
"""Quantiles are multiples of 1 / _FINENESS, which float32 represents exactly."""


def key_of(seed: int, table: int) -> int:
    """Return the key of a run's table for `first_rows`."""
    return derive(seed, "table", table)


def first_rows(key: int, rows: NDArray[numpy.int64], dim: int) -> NDArray[numpy.float32]:
    """Return the initial values of these rows: shape (rows, dim)."""
    blocks = -(-dim // _LANES)
    counters = numpy.empty((len(rows), blocks), dtype=numpy.uint64)
    counters[:] = rows.astype(numpy.uint64)[:, None] * numpy.uint64(blocks)
    counters += numpy.arange(1, blocks + 1, dtype=numpy.uint64)
    counters *= _GAMMA
    counters += numpy.uint64(key)
    lanes = _mix(counters).astype("<u8", copy=False).view("<u2")
    found: NDArray[numpy.float32] = _quantiles().take(lanes[:, :dim])
    return found


def _mix(z: NDArray[numpy.uint64]) -> NDArray[numpy.uint64]:
    """Apply SplitMix64's finalizer in place."""
    z ^= z >> numpy.uint64(30)
    z *= numpy.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> numpy.uint64(27)
    z *= numpy.uint64(0x94D049BB133111EB)
    z ^= z >> numpy.uint64(31)
    return z


@cache
def _quantiles() -> NDArray[numpy.float32]:
    """Return the midpoints of 65,536 equal shares of the normal distribution, ascending."""
    count = 1 << 16
    normal = NormalDist()
    # Rounding is much coarser than the difference of logarithms between machines.
    upper: Any = [
        round(normal.inv_cdf((place + 0.5) / count) * _FINENESS) / _FINENESS
        for place in range(count // 2, count)
    ]
    half = numpy.array(upper, dtype=numpy.float32)
    return numpy.concatenate([-half[::-1], half])
