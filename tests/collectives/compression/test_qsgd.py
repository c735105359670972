"""QSGD: unbiased, within its bounds, levels in so many bits."""

from __future__ import annotations

import math

import pytest
import torch
from small_buckets import numbers, sent

from dure.collectives import Group
from dure.collectives.compression import QSGD
from dure.collectives.compression.qsgd import RoundingNoise, norms_of

DRAWS = 4000


@pytest.mark.parametrize("levels", [1, 4, 16, 200])
def test_its_mean_is_what_was_sent_and_its_variance_is_bounded(levels: int) -> None:
    n = 64
    vector = numbers((n,), levels)
    many = vector.repeat(DRAWS)
    (arrived,) = QSGD(levels, n).decode(QSGD(levels, n).encode([many], 7), [many])
    draws = arrived.view(DRAWS, n)
    squared = float(vector.square().sum())
    variance = float((draws - vector).square().sum(1).mean())
    assert variance <= min(n / levels**2, math.sqrt(n) / levels) * squared
    exact = vector.abs() / squared**0.5 * levels
    expected = float(((exact - exact.floor()) * (exact.ceil() - exact)).sum()) * squared / levels**2
    assert variance == pytest.approx(expected, rel=0.1), (
        "that of rounding up with the probability of the rest"
    )
    assert float((draws.mean(0) - vector).square().sum()) < 3 * expected / DRAWS
    assert float(draws.count_nonzero(1).double().mean()) <= levels * (levels + math.sqrt(n))


@pytest.mark.parametrize(
    ("levels", "bits"), [(1, 2), (3, 3), (7, 4), (8, 5), (127, 8), (128, 9), (32767, 16)]
)
def test_a_number_takes_the_bits_of_its_levels(levels: int, bits: int) -> None:
    assert QSGD(levels).bits == bits == math.ceil(math.log2(2 * levels + 1))
    tensors = [torch.ones(1000), torch.ones(33)]
    assert QSGD(levels, 64).payload_bytes(tensors) == math.ceil(1033 * bits / 8) + 4 * math.ceil(
        1033 / 64
    )


@pytest.mark.parametrize("levels", [1, 7, 127, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_arrive_on_levels_no_further_than_one_from_where_they_were(
    levels: int, dtype: torch.dtype
) -> None:
    vector = numbers((300_001,), levels, dtype=dtype)
    compression = QSGD(levels, 512)
    (arrived,) = compression.decode(compression.encode([vector]), [vector])
    rows = torch.nn.functional.pad(vector, (0, -len(vector) % 512)).view(-1, 512)
    unit = (rows.norm(dim=1, keepdim=True) / levels).expand_as(rows).reshape(-1)[: len(vector)]
    steps = arrived / unit
    assert float((steps - steps.round()).abs().max()) < 1e-3
    assert float(((arrived - vector).abs() / unit).max()) < 1 + 1e-3
    assert bool((arrived * vector >= 0).all()), "no number changes its sign"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_zeros_arrive_as_zeros_in_buckets_of_zeros_and_beside_others(dtype: torch.dtype) -> None:
    vector = torch.zeros(4096, dtype=dtype)
    vector[1024:2048:2] = 1
    for draw in range(20):
        (arrived,) = QSGD(127, 512).decode(QSGD(127, 512).encode([vector], draw), [vector])
        assert bool(arrived[vector == 0].eq(0).all())


@pytest.mark.parametrize("size", [1e-44, 1e-30, 1e-20, 1.0, 1e20, 1e36])
def test_squares_neither_overflow_nor_vanish(size: float) -> None:
    vector = torch.ones(8) * size
    assert norms_of(vector[None]).item() == pytest.approx(
        float(vector.double().norm()), rel=1e-6, abs=1.5e-45
    )
    (arrived,) = QSGD(7, 8).decode(QSGD(7, 8).encode([vector]), [vector])
    assert bool(arrived.isfinite().all())
    assert float(arrived.max()) > 0


def test_a_bucket_that_is_not_finite_arrives_as_nan_and_its_neighbours_as_they_are() -> None:
    vector = torch.ones(32)
    vector[9], vector[17] = torch.inf, torch.nan
    (arrived,) = QSGD(7, 8).decode(QSGD(7, 8).encode([vector]), [vector])
    assert bool(arrived[8:24].isnan().all())
    assert bool(arrived[:8].isfinite().all())
    assert bool(arrived[24:].isfinite().all())


def test_randomness_is_a_function_of_seed_call_and_rank() -> None:
    vector = [numbers((200,), 1)]
    compression = QSGD(1, 200)
    assert torch.equal(compression.encode(vector, 1, 2, 3), compression.encode(vector, 1, 2, 3))
    payloads = [
        compression.encode(vector, *position)
        for position in [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4)]
    ]
    assert len({payload.numpy().tobytes() for payload in payloads}) == 4
    compressor = compression.compressor(vector, 1)
    assert not torch.equal(sent(compressor, vector, Group()), sent(compressor, vector, Group()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_uniform(dtype: torch.dtype) -> None:
    noise = RoundingNoise(3, dtype, torch.device("cpu")).from_1_to_2(100_001)
    assert len(noise) == 100_001
    assert 1 <= float(noise.min()) < 1.001
    assert 1.999 < float(noise.max()) < 2
    assert torch.histc(noise, 10, 1, 2).sub(10_000).abs().max() < 500


def test_levels_and_norms_that_cannot_be_are_refused() -> None:
    tensors = [torch.arange(8.0)]
    payload = QSGD(1, 8).encode(tensors)
    too_high = payload.clone()
    too_high[4:] = 255
    with pytest.raises(ValueError, match="a level is above 1"):
        QSGD(1, 8).decode(too_high, tensors)
    payload[3] |= 128
    with pytest.raises(ValueError, match="a norm is negative"):
        QSGD(1, 8).decode(payload, tensors)
