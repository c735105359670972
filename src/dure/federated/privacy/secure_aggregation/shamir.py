"""Shamir's secret sharing: t of n holders recover the secret, t - 1 learn nothing about it.

    secret      nine numbers a_0 of 30 bits, for its 256 bits
    share of i  f(i + 1),    f(x) = a_0 + a_1 x + ... + a_{t-1} x^{t-1}     mod p = 2^31 - 1
    secret      f(0) = Σ_i λ_i f(x_i),    λ_i = Π_{j≠i} x_j / (x_j - x_i)

once for each of the nine numbers; a_1, ... are drawn uniformly from the field. A share consists of
nine numbers of four bytes: 36 bytes for a secret of 32.

Reason for the field: a product of two elements fits 64 bits, so numpy computes all holders and all
secrets at once, without overflow. An element is represented by any number up to p + 5 that is equal
modulo p; a product of two is below 2^63, and x = 2^31 q + r is q + r modulo p.

A join of shares of different secrets mostly raises an error: nine random elements form a valid
secret with a probability of about 2^-24.

Cost: to share s secrets, 9 s n t multiplications; to join them, 9 s t, and t^2 for the λ of each
set of holders.

Source: A. Shamir, "How to Share a Secret", Communications of the ACM 22(11), 1979.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dure.randomness.keystream import below

SECRET = 32
"""Length of a secret in bytes."""

SHARE = 36
"""Length of a share in bytes."""

_P = (1 << 31) - 1
_PRIME = np.uint64(_P)
_SHIFT = np.uint64(31)
_NUMBERS = SHARE // 4
_BITS = 30
# The last of the nine numbers has the remaining 256 - 8 * 30 = 16 bits.
_MOST = np.array([1 << _BITS] * (_NUMBERS - 1) + [1 << 16], dtype=np.uint64)


def split(secret: bytes, holders: int, threshold: int, key: bytes) -> list[bytes]:
    """Return the shares of a secret, one for each holder. See `split_many`."""
    return split_many([secret], holders, threshold, key)[0]


def split_many(
    secrets: Sequence[bytes], holders: int, threshold: int, key: bytes
) -> list[list[bytes]]:
    """Return the shares of each secret: `[secret][holder]`, `SHARE` bytes each.

    `secrets` have `SECRET` bytes each. The polynomials are drawn from `key`, 32 bytes. Raises
    ValueError unless 1 <= threshold <= holders, and for secrets of other lengths.
    """
    if not 1 <= threshold <= holders < _P:
        raise ValueError(
            f"a secret has {holders} holders and the threshold {threshold}, but the threshold has "
            f"to be 1 to {holders}"
        )
    drawn = below(key, _P, (threshold - 1) * len(secrets) * _NUMBERS).numpy().view(np.uint64)
    polynomials = drawn.reshape(threshold - 1, len(secrets), 1, _NUMBERS)
    first = np.array([_numbers(secret) for secret in secrets], dtype=np.uint64)
    first = first.reshape(len(secrets), 1, _NUMBERS)
    places = np.arange(1, holders + 1, dtype=np.uint64)[:, None]
    value = np.zeros((len(secrets), holders, _NUMBERS), dtype=np.uint64)
    # Horner's rule, from the highest power down to the secret itself.
    for numbers in [*polynomials[::-1], first]:
        value = _reduced(value * places + numbers)
    return [[share.tobytes() for share in of] for of in _exactly(value).astype("<u4")]


def join(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Return the secret of these shares. See `join_many`."""
    return join_many([shares], threshold)[0]


def join_many(secrets: Sequence[Mapping[int, bytes]], threshold: int) -> list[bytes]:
    """Return the secret of each mapping from holder (from 0) to share.

    Of more shares than `threshold`, those of the lowest holders count. The λ are computed once for
    secrets with the same holders. Raises ValueError for fewer shares than the threshold, for
    malformed shares, and (mostly) for shares of different secrets.
    """
    if not secrets:
        return []
    chosen = [_first(shares, threshold) for shares in secrets]
    rows: dict[tuple[int, ...], int] = {}
    which = [rows.setdefault(holders, len(rows)) for holders in chosen]
    factors = _lagrange(np.array(list(rows), dtype=np.uint64) + np.uint64(1))[which]
    held = b"".join(
        shares[holder] for shares, of in zip(secrets, chosen, strict=True) for holder in of
    )
    values = np.frombuffer(held, dtype="<u4").reshape(len(secrets), threshold, _NUMBERS)
    if (values >= _P).any():
        raise ValueError("a share is malformed: it contains a number outside the field")
    products = _reduced(factors[:, :, None] * values.astype(np.uint64))
    numbers = _exactly(products.sum(axis=1))
    if (numbers >= _MOST).any():
        raise ValueError("the shares do not belong to one secret")
    return [_bytes(of) for of in numbers.tolist()]


def _first(shares: Mapping[int, bytes], threshold: int) -> tuple[int, ...]:
    """Return the holders whose shares count. Raises ValueError for shares that cannot be joined."""
    if not 1 <= threshold <= len(shares):
        raise ValueError(f"there are {len(shares)} shares of a secret, but {threshold} are needed")
    holders = tuple(sorted(shares)[:threshold])
    if not 0 <= holders[0] <= holders[-1] < _P - 1:
        raise ValueError(f"holders are counted from 0, but one has the number {min(shares)}")
    for holder in holders:
        if len(shares[holder]) != SHARE:
            raise ValueError(
                f"a share is malformed: it has {len(shares[holder])} bytes not {SHARE}"
            )
    return holders


def _lagrange(places: Any) -> Any:
    """Return λ of each place, for rows of distinct places."""
    above = np.ones_like(places)
    below_ = np.ones_like(places)
    for at in range(places.shape[1]):
        place = places[:, at : at + 1]
        others = places != place
        above = _reduced(above * np.where(others, place, 1))
        below_ = _reduced(below_ * np.where(others, place + _PRIME - places, 1))
    return _reduced(above * _inverse(below_))


def _inverse(value: Any) -> Any:
    """Return value^(p-2), which is 1 / value (Fermat)."""
    result = np.ones_like(value)
    for bit in bin(_P - 2)[2:]:
        result = _reduced(result * result)
        if bit == "1":
            result = _reduced(result * value)
    return result


def _reduced(value: Any) -> Any:
    """Return a number of at most p + 5 that equals the 64-bit value modulo p."""
    once = (value & _PRIME) + (value >> _SHIFT)
    return (once & _PRIME) + (once >> _SHIFT)


def _exactly(value: Any) -> Any:
    return _reduced(value) % _PRIME


def _numbers(secret: bytes) -> list[int]:
    if len(secret) != SECRET:
        raise ValueError(f"a secret has {SECRET} bytes, but this one has {len(secret)}")
    whole = int.from_bytes(secret, "little")
    return [whole >> _BITS * at & (1 << _BITS) - 1 for at in range(_NUMBERS)]


def _bytes(numbers: Sequence[int]) -> bytes:
    whole = sum(number << _BITS * at for at, number in enumerate(numbers))
    return whole.to_bytes(SECRET, "little")
