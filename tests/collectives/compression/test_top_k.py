"""Top-k: which numbers are sent, and which are kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_buckets import error_of, numbers, sent
from torch import Tensor

from dure.collectives.compression import TopK
from dure.collectives.compression.bucket import CompressionBucket
from dure.collectives.compression.top_k import SAMPLE, TopKCodec, first_largest


@given(
    n=st.integers(1, 200),
    ratio=st.floats(0.01, 1.0),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_largest_are_sent_exactly_and_the_others_kept(
    n: int, ratio: float, dtype: torch.dtype
) -> None:
    vector = numbers((n,), n, dtype=dtype)
    compressor = TopK(ratio).compressor([vector], 0)
    arrived = sent(compressor, [vector])
    k = int(arrived.count_nonzero())
    assert k == -(-int(np.ceil(ratio * n)) // 1)
    assert torch.equal(arrived + error_of(compressor), vector)
    assert float(arrived[arrived != 0].abs().min()) >= float(error_of(compressor).abs().max())
    bound = (1 - k / n) * vector.double().square().sum()
    assert float(error_of(compressor).double().square().sum()) <= float(bound) * (1 + 1e-6)


def test_of_equal_numbers_the_first_are_sent() -> None:
    vector = torch.tensor([1.0, -2.0, 2.0, -1.0, 1.0, 2.0])
    assert sent(TopK(0.3).compressor([vector], 0), [vector]).tolist() == [0, -2, 2, 0, 0, 0]
    assert sent(TopK(0.6).compressor([vector], 0), [vector]).tolist() == [1, -2, 2, 0, 0, 2]


def test_what_is_kept_long_enough_is_sent() -> None:
    small, large = torch.tensor([0.5, 0.4, 10.0]), torch.tensor([0.5, 0.4, 0.0])
    compressor = TopK(0.1).compressor([small], 0)
    calls = [sent(compressor, [each]).tolist() for each in (small, large, large)]
    assert calls[0] == [0, 0, 10]
    assert calls[1] == [1, 0, 0]
    assert calls[2] == [0, pytest.approx(1.2), 0]


def a_long_vector(kind: str) -> Tensor:
    n = 16 * SAMPLE
    return {
        "normal": numbers((n,), 1, dtype=torch.float32),
        "zeros": torch.zeros(n),
        "sparse": torch.zeros(n).index_fill_(0, torch.arange(0, n, 4001), 3.0),
        "few are large": torch.full((n,), 1e-30).index_fill_(0, torch.arange(1000), 1.0),
        "ascending": torch.arange(float(n)),
        "with NaN": numbers((n,), 1, dtype=torch.float32).index_fill_(
            0, torch.arange(0, n, 999), torch.nan
        ),
    }[kind]


@pytest.mark.parametrize(
    "kind", ["normal", "zeros", "sparse", "few are large", "ascending", "with NaN"]
)
@pytest.mark.parametrize("ratio", [1e-6, 0.001, 0.1])
def test_the_guess_from_a_sample_changes_nothing(kind: str, ratio: float) -> None:
    vector = a_long_vector(kind)
    codec = TopKCodec(CompressionBucket([vector]), ratio)
    bits = vector.view(torch.int32).numpy() & 0x7FFFFFFF
    assert codec._largest(vector).tolist() == np.flatnonzero(first_largest(bits, codec.k)).tolist()


def test_places_that_are_not_in_the_bucket_or_come_twice_are_refused() -> None:
    tensors = [torch.arange(1.0, 9.0)]
    payload = TopK(0.25).encode(tensors)
    for place, wrong in [(0, -1), (1, 8), (0, 7)]:
        forged = payload.clone()
        forged[8:].view(torch.int32)[place] = wrong
        with pytest.raises(ValueError, match=r"the places are not ascending within 0 … 7"):
            TopK(0.25).decode(forged, tensors)


def test_a_bucket_of_more_numbers_than_places_can_name_is_refused() -> None:
    with pytest.raises(ValueError, match="use more buckets"):
        TopK(1e-6).codec(CompressionBucket([torch.empty(2**31, device="meta")]))
