"""Seals: whatever changes in a checkpoint's file shows."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.record.seal import Seal, begins_as_of, checksum, sealed, unsealed

SEAL = Seal(
    run="5f0c", files={"a": "00000000"}, config={"seed": 2**70, "x": '","state":'}, history=(7, "f")
)
STATE = b'{"loss": NaN, "text": "\xc3\xa4,\\"state\\":"}'


def test_what_was_sealed_is_opened_as_it_was_and_is_json() -> None:
    assert unsealed(sealed(STATE, SEAL)) == (STATE, SEAL)
    assert json.loads(sealed(STATE, SEAL))["config"] == SEAL.config


def test_a_state_without_a_seal_stays_as_it_is() -> None:
    assert unsealed(STATE) == (STATE, None)


@given(st.integers(0, 8 * len(sealed(STATE, SEAL)) - 1))
def test_every_flipped_bit_shows(place: int) -> None:
    content = bytearray(sealed(STATE, SEAL))
    content[place // 8] ^= 1 << place % 8
    try:
        state, seal = unsealed(bytes(content))
    except ValueError:
        return
    # In its first bytes, by which it is known to be sealed: then it is no state either.
    assert seal is None
    with pytest.raises((ValueError, AssertionError)):
        assert set(json.loads(state)) == {"$dict"}


@given(st.integers(0, len(sealed(STATE, SEAL)) - 1))
def test_a_file_that_was_cut_off_shows(length: int) -> None:
    try:
        _, seal = unsealed(sealed(STATE, SEAL)[:length])
    except ValueError:
        return
    assert seal is None


def test_checksums_go_on_where_others_ended() -> None:
    assert checksum(b"123456789") == "cbf43926"  # the check value of CRC-32 (ISO 3309)
    assert checksum(b"6789", checksum(b"12345")) == checksum(b"123456789")


def test_the_beginning_says_whose_it_is() -> None:
    beginning = sealed(STATE, SEAL)[:100]
    assert begins_as_of(beginning, "5f0c")
    assert not begins_as_of(beginning, "5f0")
    assert not begins_as_of(STATE, "")
