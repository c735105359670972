from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.randomness.keystream import (
    BLOCK,
    below,
    bernoulli_samples,
    fill,
    grid,
    normal,
    permutation,
    to_grid,
    uniform,
)

KEY = bytes(range(32))


def blocks(key: bytes, count: int) -> bytes:
    """AES-256 of 0, 1, 2, ... as 128-bit numbers."""
    counters = b"".join(n.to_bytes(16, "big") for n in range(count))
    return Cipher(AES(key), ECB()).encryptor().update(counters)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_the_stream_is_aes_of_a_counter(dtype: torch.dtype) -> None:
    out = torch.zeros(128, dtype=dtype)
    fill(KEY, out)
    assert out.numpy().tobytes() == blocks(KEY, 8 * out.itemsize)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 3 * BLOCK + 40))
def test_a_longer_stream_goes_on_where_a_shorter_one_ends(size: int) -> None:
    longest = torch.zeros(3 * BLOCK + 41, dtype=torch.uint8)
    fill(KEY, longest)
    room = torch.zeros(size + 1, dtype=torch.uint8)
    fill(KEY, room[:size])
    assert torch.equal(room[:size], longest[:size])
    assert room[size] == 0, "and no byte after it is touched"


def test_every_bit_of_the_key_counts() -> None:
    seen = set()
    for bit in range(256):
        out = torch.zeros(4, dtype=torch.int32)
        fill((int.from_bytes(KEY, "big") ^ 1 << bit).to_bytes(32, "big"), out)
        seen.add(tuple(out.tolist()))
    assert len(seen) == 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_other_things_than_integers_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="fills integers"):
        fill(KEY, torch.zeros(4, dtype=dtype))


def test_a_view_with_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        fill(KEY, torch.zeros(4, 4, dtype=torch.int32)[:, 0])


@pytest.mark.parametrize("size", [0, 16, 31, 33])
def test_a_key_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        uniform(bytes(size), 1)


def test_uniform_numbers_have_53_bits_and_no_preference() -> None:
    drawn = uniform(KEY, 100_000)
    assert drawn.dtype == torch.float64
    assert bool(((drawn >= 0) & (drawn < 1)).all())
    scaled = drawn * 2**53
    assert torch.equal(scaled, scaled.round())
    assert bool((scaled % 2 == 1).any())
    assert chi_square(torch.histc(drawn, 100, 0, 1)) < 150


def test_normal_numbers_are_normal() -> None:
    drawn = normal(KEY, (500, 401))
    assert drawn.shape == (500, 401)
    ordered = drawn.flatten().sort().values
    expected = torch.special.ndtr(ordered)
    steps = torch.arange(1, len(ordered) + 1) / len(ordered)
    # Kolmogorov and Smirnov, at a level of 10^-5.
    assert float((expected - steps).abs().max()) < 2.47 / math.sqrt(len(ordered))
    assert abs(float((ordered**4).mean()) - 3) < 0.2


def test_pairs_of_normal_numbers_are_independent() -> None:
    first, second = normal(KEY, (2, 65536))
    for f, g in ((first, second), (first**2 - 1, second**2 - 1), (first[1:], first[:-1])):
        assert abs(float((f * g).mean())) < 5 * float((f * g).std()) / math.sqrt(len(f))


@given(st.floats(1e-300, 1e300))
def test_the_grid_is_a_power_of_two_and_fine(deviation: float) -> None:
    step = grid(deviation)
    assert math.frexp(step)[0] == 0.5
    assert deviation / 2**11 < step <= deviation / 2**10


def test_a_noised_sum_has_no_bits_below_the_grid() -> None:
    noised = torch.linspace(-3, 3, 1001, dtype=torch.float64) + 0.3 * normal(KEY, (1001,))
    rounded = to_grid(noised.clone(), 0.3)
    steps = rounded / grid(0.3)
    assert torch.equal(steps, steps.round())
    assert float((rounded - noised).abs().max()) <= grid(0.3) / 2


@pytest.mark.parametrize("deviation", [0.0, -1.0, math.inf, math.nan])
def test_a_grid_for_no_noise_is_refused(deviation: float) -> None:
    with pytest.raises(ValueError, match="deviation"):
        grid(deviation)


@given(st.integers(1, 1 << 63), st.integers(0, 300))
def test_integers_lie_below_n(n: int, count: int) -> None:
    drawn = below(KEY, n, count).tolist()
    assert len(drawn) == count
    assert all(0 <= one < n for one in drawn)


def test_integers_below_n_have_no_preference() -> None:
    counts = torch.bincount(below(KEY, 101, 101_000), minlength=101)
    assert chi_square(counts.double()) < 160


def test_integers_below_a_large_n_have_no_preference() -> None:
    # A word modulo this n would fall into the lower third half of the time.
    n = 3 << 61
    assert abs(float((below(KEY, n, 10_000) < n // 3).double().mean()) - 1 / 3) < 0.03


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 1.0])
def test_coins_show_true_with_their_probability(probability: float) -> None:
    shown = bernoulli_samples(KEY, probability, 40_000)
    assert shown.dtype == torch.bool
    assert abs(float(shown.double().mean()) - probability) <= 0.01 * (0 < probability < 1)


@pytest.mark.parametrize("probability", [-0.1, 1.1, math.nan])
def test_coins_of_no_probability_are_refused(probability: float) -> None:
    with pytest.raises(ValueError, match="probability"):
        bernoulli_samples(KEY, probability, 1)


def test_permutations_are_all_as_likely() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for at in range(6000):
        order = tuple(permutation(at.to_bytes(32, "big"), 3))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    assert chi_square(torch.tensor(list(counts.values())).double()) < 30


def chi_square(counts: torch.Tensor) -> float:
    expected = float(counts.mean())
    return float(((counts - expected) ** 2 / expected).sum())


def test_numpy_and_torch_are_not_asked() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    first = normal(KEY, (3,))
    torch.manual_seed(1)
    np.random.seed(1)
    assert torch.equal(normal(KEY, (3,)), first)
