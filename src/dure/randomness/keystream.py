"""Random numbers from a 32-byte key, unpredictable without the key.

    stream      AES-256 in counter mode, key the whole 32 bytes, nonce 0, of zeros
    uniform     u = ⌊w / 2^11⌋ 2^-53           of a 64-bit word w of the stream
    normal      √(-2 ln(1 - u)) cos(2πv), √(-2 ln(1 - u)) sin(2πv)      (Box and Muller)
    below n     w mod n, of the words w < ⌊2^64 / n⌋ n; other words are discarded
    coin        u < p

The nonce is 0, so a key serves a single purpose and a single call of these functions: two streams
of the same key are equal. `dure.randomness.secret` makes keys. Words are little-endian, so that a
key gives the same numbers on every machine.

Floating-point noise leaks information. The possible values of x + noise depend on the last bits of
x, because floating-point noise has holes (Mironov): a single result may distinguish two inputs,
whatever the accountant claims. There are two countermeasures. Noise uses 106 random bits a pair, in
float64. And the noised sum is rounded to a grid of at most 2^-10 of the deviation (`to_grid`).
Rounding applies to the sum, so it costs no privacy, and it adds an error below 2^-11 of the
deviation. A point of the grid stands for an interval that is wider than all errors of float64 in
the interval by 2^33 or more, as long as the sum is below 2^10 deviations: so the probability of a
point is right to a factor of 1 ± 2^-33. The largest normal number is √(106 ln 2) = 8.57; cutting
off the tail beyond adds 10^-17 to delta for each number. The duration of the arithmetic is *not*
hidden.

AES-CTR is used rather than ChaCha20, because AES-CTR is faster on processors with instructions for
AES.

Sources: NIST SP 800-38A, 6.5 (counter mode); G. E. P. Box and M. E. Muller, "A Note on the
Generation of Random Normal Deviates", 1958; I. Mironov, "On Significance of the Least Significant
Bits for Differential Privacy", CCS 2012.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dure.randomness.secret import KEY

BLOCK = 1 << 17
"""Bytes drawn at a time: they and the numbers made of them fit the cache."""

SLACK = 15
"""Extra bytes that older versions of `cryptography` need after the output: a block less 1."""

_ZEROS = bytes(BLOCK)
_WORDS = BLOCK // 8
_GRID = 10
"""Neighbouring points of the grid are at most 2^-10 of a deviation apart."""


class Keystream:
    """Stream of a key, from its beginning.

    Raises ValueError for a key that is not 32 bytes long, ImportError without `cryptography`.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY:
            raise ValueError(f"a key has {KEY} bytes, but this one has {len(key)}")
        cipher, aes, counter = _cipher()
        self._encryptor = cipher(aes(key), counter(bytes(16))).encryptor()

    def into(self, room: memoryview, count: int) -> None:
        """Fill the first `count` bytes of `room`.

        count: at most `BLOCK`. room: at least `count` + `SLACK` bytes; the last `SLACK` bytes stay
        unchanged.
        """
        self._encryptor.update_into(memoryview(_ZEROS)[:count], room[: count + SLACK])

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes, at most `BLOCK`."""
        taken: bytes = self._encryptor.update(memoryview(_ZEROS)[:count])
        return taken

    def words(self, count: int) -> Any:
        """Return the next `count` words, a numpy array of uint64. count: at most BLOCK / 8."""
        return np.frombuffer(self.take(8 * count), dtype="<u8")


@cache
def _cipher() -> tuple[Any, Any, Any]:
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import AES
        from cryptography.hazmat.primitives.ciphers.modes import CTR
    except ImportError as error:
        raise ImportError('privacy needs the extra: pip install "dure[privacy]"') from error
    return Cipher, AES, CTR


def fill(key: bytes, out: Tensor) -> None:
    """Fill `out` with the key's stream: every integer of its dtype is equally likely.

    out: integers of any dtype and shape, contiguous, on the CPU. Raises ValueError otherwise.
    """
    if out.dtype.is_floating_point or out.dtype.is_complex or out.dtype == torch.bool:
        raise ValueError(f"a keystream fills integers, but these are {out.dtype}")
    if not out.is_contiguous() or out.device.type != "cpu":
        raise ValueError("a keystream fills a contiguous tensor on the CPU")
    stream = Keystream(key)
    room = out.view(-1).numpy().view(np.uint8).data
    at = 0
    while len(room) - at >= BLOCK + SLACK:
        stream.into(room[at:], BLOCK)
        at += BLOCK
    while at < len(room):
        piece = room[at : at + BLOCK]
        piece[:] = stream.take(len(piece))
        at += len(piece)


def uniform(key: bytes, count: int) -> Tensor:
    """Return `count` float64 numbers in [0, 1), multiples of 2^-53."""
    out = np.empty(count)
    stream = Keystream(key)
    for piece in _pieces(out):
        piece[:] = _uniform(stream, len(piece))
    return torch.from_numpy(out)


def normal(key: bytes, shape: tuple[int, ...]) -> Tensor:
    """Return standard normal numbers, float64 of this shape. Apply `to_grid` to the noised sum."""
    out = torch.empty(math.prod(shape), dtype=torch.float64)
    at = 0
    for piece in normals(key, len(out)):
        out[at : at + len(piece)] = piece
        at += len(piece)
    return out.view(shape)


def normals(key: bytes, count: int) -> Iterator[Tensor]:
    """Yield `count` standard normal numbers, float64, in pieces that fit the cache.

    A piece is valid until the next piece is requested.
    """
    stream = Keystream(key)
    room = torch.empty(_WORDS, dtype=torch.float64)
    for at in range(0, count, _WORDS):
        length = min(_WORDS, count - at)
        half = -(-length // 2)
        # torch has these functions for several numbers at once; numpy's take four times as long.
        # 1 - u is exact, as a multiple of 2^-53.
        radius = torch.from_numpy(1.0 - _uniform(stream, half)).log_().mul_(-2).sqrt_()
        angle = torch.from_numpy(_uniform(stream, half)).mul_(2 * math.pi)
        torch.mul(radius, angle.cos(), out=room[:half])
        torch.mul(radius, angle.sin_(), out=room[half : 2 * half])
        yield room[:length]


def grid(deviation: float) -> float:
    """Return the grid spacing for sums with noise of this deviation.

    The spacing is a power of two, at most 2^-10 of the deviation. Raises ValueError unless 0 <
    deviation < ∞.
    """
    if not 0 < deviation < math.inf:
        raise ValueError(
            f"the standard deviation of noise is {deviation}, but it has to be greater than 0 and "
            "finite"
        )
    return 2.0 ** (math.frexp(deviation)[1] - 1 - _GRID)


def to_grid(noised: Tensor, deviation: float) -> Tensor:
    """Round a noised float64 tensor to multiples of `grid(deviation)`, in place, and return it."""
    step = grid(deviation)
    # A power of two: its reciprocal is exact, and faster than a division.
    return noised.mul_(1 / step).round_().mul_(step)


def below(key: bytes, n: int, count: int) -> Tensor:
    """Return `count` int64 integers in [0, n), each equally likely.

    Raises ValueError unless 1 <= n <= 2^63.
    """
    if not 1 <= n <= 1 << 63:
        raise ValueError(f"the bound of integers is {n}, but it has to be 1 to 2^63")
    stream = Keystream(key)
    # The words above the last multiple of n would make small integers likelier.
    last = (1 << 64) // n * n - 1
    out = np.empty(count, dtype=np.int64)
    at = 0
    while at < count:
        words = stream.words(min(count - at, _WORDS))
        fit = words[words <= np.uint64(last)] % np.uint64(n)
        out[at : at + len(fit)] = fit
        at += len(fit)
    return torch.from_numpy(out)


def bernoulli_samples(key: bytes, probability: float, count: int) -> Tensor:
    """Return `count` independent bool samples, each True with this probability.

    Raises ValueError unless 0 <= probability <= 1.
    """
    if not 0 <= probability <= 1:
        raise ValueError(f"the probability is {probability}, but it has to be 0 to 1")
    return uniform(key, count) < probability


def permutation(key: bytes, n: int) -> list[int]:
    """Return 0..n-1 in a uniformly random order.

    The numbers are sorted by a random word each. Two words are equal with a probability below n^2
    2^-65; the two numbers then stay in order.
    """
    words = np.empty(n, dtype=np.uint64)
    fill(key, torch.from_numpy(words.view(np.int64)))
    order: list[int] = np.argsort(words, kind="stable").tolist()
    return order


def _uniform(stream: Keystream, count: int) -> Any:
    return (stream.words(count) >> np.uint64(11)) * 2.0**-53


def _pieces(out: Any) -> Iterator[Any]:
    """Yield consecutive pieces of an array with as many numbers as a block has words.

    The last piece may be shorter.
    """
    for at in range(0, len(out), _WORDS):
        yield out[at : at + _WORDS]
