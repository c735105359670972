"""Signs with a mean magnitude: what arrives, and the contraction."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_buckets import Shape, joined, numbers, sent

from dure.collectives.compression import Sign
from dure.collectives.compression.packing import BLOCK


@given(st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=4))
def test_a_number_arrives_as_its_sign_times_the_tensors_mean_magnitude(shapes: list[Shape]) -> None:
    tensors = [numbers(shape, index) for index, shape in enumerate(shapes)]
    expected = joined([tensor.sign() * tensor.abs().mean() for tensor in tensors])
    torch.testing.assert_close(
        sent(Sign().compressor(tensors, 0), tensors), expected, rtol=0, atol=1e-14
    )
    assert Sign().payload_bytes(tensors) == sum(-(-tensor.numel() // 8) + 8 for tensor in tensors)


@pytest.mark.parametrize("n", [1, 7, 1000, 2 * BLOCK + 13])
def test_what_is_left_is_shorter_by_the_contraction(n: int) -> None:
    vector = numbers((n,), n)
    left = vector - sent(Sign().compressor([vector], 0), [vector])
    length, squared = float(vector.abs().sum()), float(vector.square().sum())
    bound = (1 - length**2 / (n * squared)) * squared
    assert float(left.square().sum()) <= bound * (1 + 1e-12) + 1e-12
    assert float(left.square().sum()) == pytest.approx(bound, rel=1e-9, abs=1e-9)


def test_zeros_arrive_as_zeros() -> None:
    assert sent(Sign().compressor([torch.zeros(9)], 0), [torch.zeros(9)]).eq(0).all()


def test_a_negative_magnitude_is_refused() -> None:
    payload = Sign().encode([torch.ones(8)])
    payload[3] |= 128
    with pytest.raises(ValueError, match="a mean magnitude is negative"):
        Sign().decode(payload, [torch.ones(8)])
