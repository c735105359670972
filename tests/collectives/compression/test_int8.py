"""Eight bits a number: how far it is off, what its rows are, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_buckets import Shape, numbers, sent
from torch import Tensor

from dure.collectives.compression import Int8
from dure.collectives.compression.packing import BLOCK


def rows_of(tensor: Tensor) -> Tensor:
    """What has one unit, as rows."""
    return tensor.reshape(len(tensor), -1) if tensor.ndim > 1 else tensor.reshape(1, -1)


@given(st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=4))
def test_a_number_is_off_by_half_a_254th_of_the_largest_of_its_row(shapes: list[Shape]) -> None:
    tensors = [numbers(shape, index) * 10.0**index for index, shape in enumerate(shapes)]
    arrived = Int8().decode(Int8().encode(tensors), tensors)
    for tensor, other in zip(tensors, arrived, strict=True):
        largest = rows_of(tensor).abs().amax(1, keepdim=True)
        off = (rows_of(tensor) - rows_of(other)).abs()
        assert bool((off <= largest / 254 * (1 + 1e-12)).all())
        # The largest one is on a level.
        assert torch.allclose(rows_of(other).abs().amax(1, keepdim=True), largest, rtol=1e-14)
    rows = sum(len(rows_of(tensor)) for tensor in tensors)
    assert Int8().payload_bytes(tensors) == sum(t.numel() for t in tensors) + 8 * rows


@pytest.mark.parametrize("shape", [(2, BLOCK + 13), (BLOCK // 4 + 3, 9), (2 * BLOCK + 13,)])
def test_long_tensors_are_rounded_as_short_ones_are(shape: tuple[int, ...]) -> None:
    tensor = numbers(shape, 1).float()
    unit = rows_of(tensor).abs().amax(1, keepdim=True) / 127
    expected = (rows_of(tensor) / unit).round() * unit
    arrived = sent(Int8().compressor([tensor], 0), [tensor])
    assert torch.equal(arrived, expected.reshape(-1))


@pytest.mark.parametrize("size", [0.0, 5e-324, 1e-310, 1e300])
def test_rows_of_zeros_and_of_numbers_near_the_ends_of_what_there_is(size: float) -> None:
    tensor = torch.tensor([[size, -size / 2, 0.0], [1.0, 2.0, 3.0]], dtype=torch.float64)
    arrived = Int8().decode(Int8().encode([tensor]), [tensor])[0]
    assert bool(arrived.isfinite().all())
    assert bool(((arrived - tensor).abs().amax(1) <= tensor.abs().amax(1) / 254 + 1e-307).all())


def test_what_is_not_finite_makes_its_row_nan_and_leaves_the_others() -> None:
    tensor = torch.tensor([[1.0, torch.inf], [1.0, 2.0], [torch.nan, 1.0]])
    arrived = Int8().decode(Int8().encode([tensor]), [tensor])[0]
    assert bool(arrived[[0, 2]].isnan().all())
    assert torch.allclose(arrived[1], tensor[1], atol=0.01)


def test_units_below_0_and_a_level_that_there_is_not_are_refused() -> None:
    payload = Int8().encode([torch.ones(8)])
    negative = payload.clone()
    negative[3] |= 128
    with pytest.raises(ValueError, match="a unit is negative"):
        Int8().decode(negative, [torch.ones(8)])
    payload[-1] = 128
    with pytest.raises(ValueError, match="a level is below -127"):
        Int8().decode(payload, [torch.ones(8)])
