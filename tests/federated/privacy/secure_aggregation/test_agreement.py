from __future__ import annotations

import hmac

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.errors import AgreementError
from dure.federated.privacy.secure_aggregation.agreement import (
    TAG,
    KeyPair,
    agree,
    open_sealed,
    seal,
)

A = KeyPair.of(bytes(range(32)))
B = KeyPair.of(bytes(range(1, 33)))
C = KeyPair.of(bytes(range(2, 34)))
P = 2**255 - 19
LOW_ORDER = [
    0,
    1,
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
    P - 1,
    P,
    P + 1,
]
"""The points of Curve25519 that are zero after eight additions (RFC 7748, section 7)."""


def test_a_key_is_hkdf_of_the_secret_with_both_public_keys() -> None:
    theirs = X25519PublicKey.from_public_bytes(B.public)
    secret = X25519PrivateKey.from_private_bytes(bytes(range(32))).exchange(theirs)
    salt = b"".join(sorted([A.public, B.public]))
    extracted = hmac.digest(salt, secret, "sha256")
    assert agree(A, B.public, b"mask") == hmac.digest(extracted, b"mask\1", "sha256")


@settings(deadline=None)
@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32), st.binary())
def test_both_agree_on_one_key(first: bytes, second: bytes, info: bytes) -> None:
    one = KeyPair.of(first)
    other = KeyPair.of(second)
    if one.public != other.public:
        assert agree(one, other.public, info) == agree(other, one.public, info)


def test_keys_differ_by_pair_and_by_purpose() -> None:
    keys = {
        agree(A, B.public, b"mask"),
        agree(A, C.public, b"mask"),
        agree(B, C.public, b"mask"),
        agree(A, B.public, b"seal"),
    }
    assert len(keys) == 4
    assert all(len(key) == 32 for key in keys)


@pytest.mark.parametrize("point", LOW_ORDER)
def test_a_public_key_that_makes_the_secret_zero_is_refused(point: int) -> None:
    with pytest.raises(AgreementError, match="every shared secret is zero"):
        agree(A, point.to_bytes(32, "little"), b"")


def test_public_keys_of_another_length_and_one_s_own_are_refused() -> None:
    with pytest.raises(AgreementError, match="32 bytes"):
        agree(A, B.public[:31], b"")
    with pytest.raises(AgreementError, match="its own"):
        agree(A, A.public, b"")
    with pytest.raises(ValueError, match="a key pair needs 32 bytes"):
        KeyPair.of(bytes(16))


def test_nothing_of_a_private_key_is_shown() -> None:
    secret = bytes(range(32))
    assert "private" not in repr(A)
    assert secret.hex() not in repr(A)
    assert repr(secret) not in repr(A)


@given(st.binary(max_size=200), st.binary(max_size=40))
def test_what_is_sealed_opens(plaintext: bytes, associated: bytes) -> None:
    sealed = seal(bytes(32), plaintext, associated)
    assert len(sealed) == len(plaintext) + TAG
    assert open_sealed(bytes(32), sealed, associated) == plaintext


@given(st.integers(0, 8 * 36 - 1))
def test_what_was_changed_does_not_open(bit: int) -> None:
    sealed = seal(bytes(32), b"twenty bytes of text", b"0 to 1")
    changed = (int.from_bytes(sealed, "big") ^ 1 << bit).to_bytes(36, "big")
    with pytest.raises(AgreementError, match="cannot be decrypted"):
        open_sealed(bytes(32), changed, b"0 to 1")


def test_what_is_for_others_does_not_open() -> None:
    sealed = seal(bytes(32), b"text", b"0 to 1")
    for key, associated in ((bytes(31) + b"1", b"0 to 1"), (bytes(32), b"1 to 0")):
        with pytest.raises(AgreementError, match="cannot be decrypted"):
            open_sealed(key, sealed, associated)
    with pytest.raises(AgreementError, match="cannot be decrypted"):
        open_sealed(bytes(32), b"short", b"0 to 1")


def test_two_directions_of_one_key_share_no_keystream() -> None:
    there = seal(bytes(32), bytes(64), b"0 to 1")
    back = seal(bytes(32), bytes(64), b"1 to 0")
    pieces = [{sealed[at : at + 8] for at in range(56)} for sealed in (there, back)]
    assert not pieces[0] & pieces[1]
