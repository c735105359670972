"""A secret is found among wrong shares, and so are those."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.federated.privacy.secure_aggregation import shamir
from dure.federated.privacy.secure_aggregation.recovery import Recovered, recover

SECRET = bytes(range(100, 132))


def is_it(secret: bytes) -> bool:
    return secret == SECRET


def shares(holders: int, threshold: int) -> dict[int, bytes]:
    return dict(enumerate(shamir.split(SECRET, holders, threshold, bytes(32))))


def other(share: bytes) -> bytes:
    """Another share of the field, in every number."""
    return bytes(byte ^ (at % 4 == 0) for at, byte in enumerate(share))


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 12), st.data())
def test_wrong_shares_side_by_side_are_found(threshold: int, data: st.DataObject) -> None:
    spare = data.draw(st.integers(1, 5))
    held = shares(threshold + spare, threshold)
    first = data.draw(st.integers(0, len(held) - 1))
    wrong = {(first + step) % len(held) for step in range(data.draw(st.integers(1, spare)))}
    for at in wrong:
        held[at] = other(held[at])
    found = recover(held, threshold, is_it, list(held))
    assert found.secret == SECRET
    # Threshold 2 and up: a wrong share makes another secret with right ones.
    assert set(found.wrong) == wrong


@pytest.mark.parametrize("wrong", [b"", b"\xff" * 36, bytes(36)])
def test_what_is_no_share_is_a_wrong_one(wrong: bytes) -> None:
    held = {**shares(7, 5), 3: wrong}
    assert recover(held, 5, is_it, list(held)) == Recovered(SECRET, (3,))


def test_too_many_wrong_ones_and_another_secret_make_none() -> None:
    held = shares(7, 5)
    for at in (0, 2, 4):
        held[at] = other(held[at])
    assert recover(held, 5, is_it, list(held)) == Recovered(None, ())
    assert recover(shares(7, 5), 5, lambda secret: False, range(7)) == Recovered(None, ())


def test_who_is_believed_first_is_tried_first() -> None:
    tried: list[bytes] = []
    held = shares(7, 3)
    for at in (0, 1, 2):
        held[at] = other(held[at])

    def fits(secret: bytes) -> bool:
        tried.append(secret)
        return is_it(secret)

    found = recover(held, 3, fits, [3, 4, 5, 6, 0, 1, 2])
    assert found == Recovered(SECRET, (0, 1, 2))
    assert len(tried) == 1


def test_it_prints_no_secret() -> None:
    assert repr(Recovered(SECRET, (3,))) == "Recovered(1 wrong)"
