from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.federated.privacy.secure_aggregation.masks import add_masks
from dure.randomness.keystream import BLOCK, fill

SIZES = st.one_of(st.integers(0, 200), st.integers(BLOCK // 4 - 5, 2 * BLOCK // 4 + 5))
KEYS = [bytes([at]) * 32 for at in range(1, 6)]


def mask(key: bytes, size: int) -> torch.Tensor:
    """The same, the slow way."""
    out = torch.empty(size, dtype=torch.int32)
    fill(key, out)
    return out.to(torch.int64)


def wrapped(total: torch.Tensor) -> torch.Tensor:
    return ((total + 2**31) % 2**32 - 2**31).to(torch.int32)


@settings(max_examples=25, deadline=None)
@given(SIZES, st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from([1, -1])), max_size=4))
def test_masks_are_the_keystream_modulo_two_to_the_32(
    size: int, masks: list[tuple[bytes, int]]
) -> None:
    total = torch.arange(size, dtype=torch.int32) * 65_537
    expected = total.to(torch.int64)
    for key, sign in masks:
        expected = expected + sign * mask(key, size)
    add_masks(total, masks)
    assert torch.equal(total, wrapped(expected))


@settings(max_examples=10, deadline=None)
@given(SIZES)
def test_a_mask_that_is_taken_away_leaves_nothing(size: int) -> None:
    vector = torch.arange(size, dtype=torch.int32)
    masked = vector.clone()
    for key in KEYS:
        add_masks(masked, [(key, 1)])
    add_masks(masked, [(key, -1) for key in reversed(KEYS)])
    assert torch.equal(masked, vector)


def test_what_is_masked_looks_like_noise() -> None:
    masked = torch.full((65_536,), 7, dtype=torch.int32)
    add_masks(masked, [(KEYS[0], 1)])
    for shift in (0, 8, 16, 24):
        counts = torch.bincount(((masked >> shift) & 255).long(), minlength=256).double()
        # Chi-square with 255 degrees of freedom, at a level of 10^-6.
        assert float(((counts - 256) ** 2 / 256).sum()) < 375


def test_all_of_the_key_counts() -> None:
    first = torch.zeros(8, dtype=torch.int32)
    add_masks(first, [(bytes(32), 1)])
    for at in range(32):
        other = torch.zeros(8, dtype=torch.int32)
        add_masks(other, [(bytes(at) + b"\x80" + bytes(31 - at), 1)])
        assert not torch.equal(first, other)


def test_what_cannot_be_masked_is_refused_and_stays_as_it_was() -> None:
    total = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match="sign"):
        add_masks(total, [(KEYS[0], 1), (KEYS[1], 0)])
    with pytest.raises(ValueError, match="32 bytes"):
        add_masks(total, [(KEYS[0], 1), (b"short", 1)])
    assert not total.any()
    with pytest.raises(ValueError, match="int32"):
        add_masks(torch.zeros(4), [(KEYS[0], 1)])
    with pytest.raises(ValueError, match="int32"):
        add_masks(torch.zeros(4, 4, dtype=torch.int32).T, [(KEYS[0], 1)])
