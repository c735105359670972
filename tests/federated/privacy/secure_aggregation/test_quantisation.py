from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.federated.privacy.secure_aggregation.masks import add_masks
from dure.federated.privacy.secure_aggregation.quantisation import Quantisation

KEY = bytes(range(32))


def keys(count: int) -> list[bytes]:
    return [at.to_bytes(32, "big") for at in range(1, count + 1)]


SETTINGS = st.integers(2, 32).flatmap(
    lambda bits: st.tuples(st.just(bits), st.integers(1, (1 << bits - 1) - 1))
)


@given(SETTINGS, st.floats(1e-6, 1e6), st.sampled_from([-1, 1]))
def test_the_largest_sums_do_not_overflow_and_one_level_more_would(
    setting: tuple[int, int], extent: float, sign: int
) -> None:
    bits, clients = setting
    quantisation = Quantisation(extent, clients, bits)
    values = torch.full((2_000,), sign * extent, dtype=torch.float64)
    encoded, cut = quantisation.encode(values, KEY)
    assert encoded.unique().tolist() == [sign * quantisation.levels]
    assert cut == 0
    assert clients * quantisation.levels <= 2 ** (bits - 1) - 1
    assert clients * (quantisation.levels + 1) > 2 ** (bits - 1) - 1
    decoded = quantisation.decode(encoded * clients, clients)
    assert float(decoded[0]) == pytest.approx(sign * extent * clients, rel=1e-12)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.floats(-2, 2, width=32), max_size=50),
    st.integers(1, 200),
    st.floats(0, 1),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_what_is_decoded_is_within_a_step_of_what_was_encoded(
    given_values: list[float], clients: int, weight: float, dtype: torch.dtype
) -> None:
    quantisation = Quantisation(1.5, clients)
    values = torch.tensor(given_values, dtype=dtype)
    encoded, cut = quantisation.encode(values, KEY, weight)
    assert cut == int((values.double().abs() > 1.5).sum())
    expected = weight * values.double().clamp(-1.5, 1.5)
    assert encoded.dtype == torch.int32
    difference = quantisation.decode(encoded, 1) - expected
    assert bool((difference.abs() <= quantisation.step * (1 + 1e-6)).all())


@pytest.mark.parametrize("value", [0.3, -0.3, 0.999, -0.001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_is_unbiased(value: float, dtype: torch.dtype) -> None:
    quantisation = Quantisation(1.0, 100, modulus_bits=10)
    values = torch.full((100_000,), value, dtype=dtype)
    encoded, _ = quantisation.encode(values, KEY)
    assert len(encoded.unique()) == 2
    mean = float(quantisation.decode(encoded, 1).mean())
    # Five deviations of a mean of 100,000, each rounded up or down by one step.
    assert abs(mean - float(values[0])) < 5 * quantisation.step / 2 / math.sqrt(100_000)


def test_rounding_is_independent_from_place_to_place_and_from_key_to_key() -> None:
    quantisation = Quantisation(1.0, 100, modulus_bits=10)
    values = torch.full((40_000,), 0.125)
    up = [quantisation.encode(values, key)[0].double() for key in keys(2)]
    first, second = (one - one.mean() for one in up)
    for f, g in ((first, second), (first[1:], first[:-1]), (first[8192:], first[:-8192])):
        assert abs(float((f * g).mean())) < 5 * 0.25 / math.sqrt(len(f))
    assert torch.equal(quantisation.encode(values, keys(1)[0])[0].double(), up[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 20_000, 99_999])
def test_what_is_not_finite_is_refused_wherever_it_stands(bad: float, at: int) -> None:
    values = torch.ones(100_000)
    values[at] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        Quantisation(0.5, 10).encode(values, KEY)


def test_sums_of_masked_numbers_are_sums_of_numbers() -> None:
    quantisation = Quantisation(2.0, 3)
    values = torch.stack([torch.linspace(-2, 2, 501) * at for at in (1, -0.5, 0.25)])
    plain = torch.zeros(501, dtype=torch.int64)
    masked = torch.zeros(501, dtype=torch.int32)
    for value, key in zip(values, keys(3), strict=True):
        encoded, _ = quantisation.encode(value, key)
        plain += encoded
        add_masks(encoded, [(KEY, 1)])
        masked += encoded
    add_masks(masked, [(KEY, -1)] * 3)
    assert torch.equal(masked.long(), plain)
    difference = quantisation.decode(masked, 3) - values.double().sum(0)
    assert float(difference.abs().max()) < 3 * quantisation.step


def test_a_total_that_so_many_clients_cannot_have_is_refused() -> None:
    quantisation = Quantisation(1.0, 10)
    total = torch.tensor([quantisation.levels * 3 + 1], dtype=torch.int32)
    quantisation.decode(total, 4)
    for wrong in (total, -total):
        with pytest.raises(ValueError, match="not a sum of 3 clients"):
            quantisation.decode(wrong, 3)
    with pytest.raises(ValueError, match="1 to 10"):
        quantisation.decode(total, 11)


def test_nothing_is_a_vector_too() -> None:
    quantisation = Quantisation(1.0, 10)
    encoded, cut = quantisation.encode(torch.empty(0), KEY)
    assert encoded.shape == (0,)
    assert cut == 0
    assert quantisation.decode(encoded, 5).shape == (0,)


@pytest.mark.parametrize("clients", [0, 2**31])
def test_sums_of_too_many_clients_are_refused(clients: int) -> None:
    with pytest.raises(ValueError, match=f"a sum in 32 bits has {clients} clients"):
        Quantisation(1.0, clients)


@pytest.mark.parametrize("extent", [0.0, -1.0, math.inf, math.nan])
def test_a_range_is_above_zero_and_finite(extent: float) -> None:
    with pytest.raises(ValueError, match="range"):
        Quantisation(extent, 2)


@pytest.mark.parametrize("weight", [-0.1, 1.1, math.nan])
def test_a_weight_is_no_more_than_one(weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        Quantisation(1.0, 2).encode(torch.zeros(1), KEY, weight)


@settings(deadline=None)
@given(st.integers(1, 2**20), st.integers(0, 2**40), st.data())
def test_whole_numbers_add_up_exactly(clients: int, most: int, data: st.DataObject) -> None:
    quantisation = Quantisation(1.0, clients)
    there = min(clients, 4)
    numbers = [data.draw(st.lists(st.integers(0, most), min_size=2, max_size=2)) for _ in "1234"]
    total = sum(quantisation.encode_whole(own, most) for own in numbers[:there])
    assert isinstance(total, torch.Tensor)
    assert total.dtype == torch.int32
    assert len(total) == 2 * quantisation.digits(most)
    expected = [sum(own) for own in zip(*numbers[:there], strict=True)]
    assert quantisation.decode_whole(total, most, there) == expected


@given(st.integers(1, 2**20), st.integers(1, 2**40))
def test_the_largest_whole_numbers_add_up_exactly(clients: int, most: int) -> None:
    quantisation = Quantisation(1.0, clients)
    encoded = quantisation.encode_whole([most], most).long() & 0xFFFFFFFF
    assert int(encoded.max()) * clients < 2**32
    total = (encoded * clients).to(torch.int32)
    assert quantisation.decode_whole(total, most, clients) == [most * clients]


def test_whole_numbers_that_cannot_be_sent_are_refused() -> None:
    quantisation = Quantisation(1.0, 10)
    for number in (-1, 1001):
        with pytest.raises(ValueError, match="0 to 1000"):
            quantisation.encode_whole([number], 1000)
    total = quantisation.encode_whole([1000], 1000)
    with pytest.raises(ValueError, match="not a sum of 1"):
        quantisation.decode_whole(total * 2, 1000, 1)
    with pytest.raises(ValueError, match="not a sum of 1"):
        quantisation.decode_whole(-total, 1000, 1)
    with pytest.raises(ValueError, match="2 digits, but there are 3"):
        quantisation.decode_whole(torch.zeros(3, dtype=torch.int32), 2**40, 1)
