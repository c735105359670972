from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.federated.privacy.secure_aggregation.shamir import (
    SHARE,
    join,
    join_many,
    split,
    split_many,
)

P = 2**31 - 1
KEY = bytes(range(32))
SECRETS = st.one_of(st.binary(min_size=32, max_size=32), st.sampled_from([bytes(32), b"\xff" * 32]))
SIZES = st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@settings(deadline=None, max_examples=60)
@given(SECRETS, SIZES, st.binary(min_size=32, max_size=32), st.randoms())
def test_any_t_holders_know_the_secret(
    secret: bytes, sizes: tuple[int, int], key: bytes, chance: object
) -> None:
    holders, threshold = sizes
    shares = split(secret, holders, threshold, key)
    assert [len(share) for share in shares] == [SHARE] * holders
    some = chance.sample(range(holders), threshold)  # type: ignore[attr-defined]
    assert join({holder: shares[holder] for holder in some}, threshold) == secret
    assert join(dict(enumerate(shares)), threshold) == secret


def numbers(share: bytes) -> list[int]:
    return np.frombuffer(share, dtype="<u4").tolist()


@settings(deadline=None, max_examples=40)
@given(SECRETS, SIZES, st.binary(min_size=32, max_size=32))
def test_shares_lie_on_a_polynomial_through_the_secret(
    secret: bytes, sizes: tuple[int, int], key: bytes
) -> None:
    holders, threshold = sizes
    shares = [numbers(share) for share in split(secret, holders, threshold, key)]
    for at in range(9):
        values = {x + 1: share[at] for x, share in enumerate(shares)}
        points = dict(list(values.items())[-threshold:])
        expected = int.from_bytes(secret, "little") >> 30 * at & 2**30 - 1
        assert at_zero(points) == expected


def at_zero(points: dict[int, int]) -> int:
    """The value at 0 of the polynomial through these points, by Python's integers."""
    total = 0
    for x, y in points.items():
        for other in points:
            if other != x:
                y = y * other * pow(other - x, -1, P) % P
        total += y
    return total % P


def test_many_secrets_are_joined_at_once_whoever_holds_them() -> None:
    secrets = [bytes([at]) * 32 for at in range(12)]
    shares = split_many(secrets, 9, 5, KEY)
    held = [{(at + n) % 9: of[(at + n) % 9] for n in range(5)} for at, of in enumerate(shares)]
    assert join_many(held, 5) == secrets
    assert join_many([], 5) == []
    assert split_many([], 9, 5, KEY) == []


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32])
def test_fewer_shares_than_the_threshold_look_alike_for_every_secret(secret: bytes) -> None:
    """Pairs of shares, of which three are needed, fill the square of the field evenly."""
    shares = split_many([secret] * 6000, 3, 3, KEY)
    for pair in ((0, 1), (0, 2), (1, 2)):
        values = np.array([[numbers(of[holder]) for holder in pair] for of in shares])
        cells = (values[:, 0] * 8 // P) * 8 + values[:, 1] * 8 // P
        counts = np.bincount(cells.ravel().astype(np.int64), minlength=64)
        expected = cells.size / 64
        # Chi-square with 63 degrees of freedom, at a level of 10^-7.
        assert float(((counts - expected) ** 2 / expected).sum()) < 145


def test_shares_differ_from_secret_to_secret_and_from_key_to_key() -> None:
    first, second = split_many([bytes(32)] * 2, 2, 2, KEY)
    assert first != second
    assert split(bytes(32), 2, 2, bytes(32)) != first


def test_too_few_shares_are_refused() -> None:
    shares = split(bytes(32), 5, 3, KEY)
    with pytest.raises(ValueError, match="2 shares of a secret, but 3 are needed"):
        join({0: shares[0], 4: shares[4]}, 3)


def test_malformed_shares_are_refused() -> None:
    shares = dict(enumerate(split(bytes(32), 3, 3, KEY)))
    with pytest.raises(ValueError, match="35 bytes"):
        join({**shares, 1: shares[1][:-1]}, 3)
    with pytest.raises(ValueError, match="outside the field"):
        join({**shares, 1: P.to_bytes(4, "little") + shares[1][4:]}, 3)
    with pytest.raises(ValueError, match="from 0"):
        join({**shares, -1: shares[1]}, 3)


def test_shares_of_different_secrets_make_none() -> None:
    shares = dict(enumerate(split(bytes(32), 3, 3, KEY)))
    other = split(bytes(32), 3, 3, bytes(32))
    with pytest.raises(ValueError, match="do not belong to one secret"):
        join({**shares, 1: other[1]}, 3)


@pytest.mark.parametrize(("holders", "threshold"), [(3, 4), (3, 0), (0, 0)])
def test_impossible_thresholds_are_refused(holders: int, threshold: int) -> None:
    with pytest.raises(ValueError, match="threshold"):
        split(bytes(32), holders, threshold, KEY)


def test_secrets_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        split(bytes(31), 3, 2, KEY)
