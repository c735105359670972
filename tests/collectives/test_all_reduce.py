"""Every all-reduce: the sum, the same bits on every rank, and exactly the bytes and messages of its formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import dure
from dure.collectives import Group, all_reduce, master, ring
from dure.collectives.all_reduce import Algorithm
from dure.strategy import Place

FORMULAS: dict[str, Any] = {"ring": ring, "master": master}


def on_ranks(ranks: int, program: Callable[[Place], Any]) -> list[Any]:
    """What `program` returns on every rank, in order of rank."""

    def gathered(place: Place) -> list[Any]:
        import pickle

        return [pickle.loads(part) for part in place.group.gather_bytes(pickle.dumps(program(place)))]

    result: list[Any] = dure.Processes(ranks, deadline=20).run(gathered, lambda event: None)
    return result


def values(n: int, rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * n + rank)
    if dtype.is_floating_point:
        return torch.randn(n, generator=generator, dtype=dtype)
    return torch.randint(-1000, 1000, (n,), generator=generator, dtype=dtype)


def reduce_many(algorithm: Algorithm, lengths: list[int], dtype: torch.dtype) -> Callable[[Place], list[Any]]:
    def program(place: Place) -> list[Any]:
        results = []
        for n in lengths:
            tensor = values(n, place.group.rank, dtype)
            before = (place.group.meter.counters.bytes_sent, place.group.meter.counters.messages_sent)
            all_reduce(tensor, place.group, algorithm)
            counters = place.group.meter.counters
            results.append((tensor, counters.bytes_sent - before[0], counters.messages_sent - before[1]))
        return results

    return program


@pytest.mark.parametrize("algorithm", ["ring", "master", "native"])
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    ranks=st.integers(2, 5),
    lengths=st.lists(st.integers(0, 40) | st.integers(1_000, 5_000), min_size=1, max_size=8),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.int64]),
)
def test_the_sum_on_every_rank_with_the_bytes_of_the_formula(
    algorithm: Algorithm, ranks: int, lengths: list[int], dtype: torch.dtype
) -> None:
    per_rank = on_ranks(ranks, reduce_many(algorithm, lengths, dtype))
    for position, n in enumerate(lengths):
        exact = sum(values(n, rank, dtype).double() for rank in range(ranks))
        for rank in range(ranks):
            tensor, sent, messages = per_rank[rank][position]
            assert torch.equal(tensor, per_rank[0][position][0]), "all ranks hold the same bits"
            if dtype.is_floating_point:
                bound = ranks * torch.finfo(dtype).eps * sum(values(n, r, dtype).double().abs() for r in range(ranks))
                assert bool(((tensor.double() - exact).abs() <= bound).all())
            else:
                assert torch.equal(tensor.double(), exact)
            if algorithm in FORMULAS:
                formula = FORMULAS[algorithm]
                assert sent == formula.elements_sent(n, ranks, rank) * dtype.itemsize
                assert messages == formula.messages_sent(n, ranks, rank)


@given(n=st.integers(0, 1_000), size=st.integers(1, 9))
def test_a_ring_sends_two_passes_of_all_chunks_but_one(n: int, size: int) -> None:
    total = sum(ring.elements_sent(n, size, rank) for rank in range(size))
    assert total == 2 * (size - 1) * n
    if n % size == 0:
        assert all(ring.elements_sent(n, size, rank) == 2 * (size - 1) * n // size for rank in range(size))


def test_a_tensor_that_is_not_contiguous_is_reduced_in_its_place() -> None:
    def program(place: Place) -> Tensor:
        base = torch.zeros(4, 6)
        all_reduce(base[:, ::2].add_(place.group.rank + 1), place.group, "ring")
        return base

    first, second = on_ranks(2, program)
    assert torch.equal(first, second)
    assert first[:, ::2].eq(3).all()
    assert first[:, 1::2].eq(0).all()


def test_one_rank_has_the_sum_already_and_sends_nothing() -> None:
    group = Group()
    tensor = all_reduce(torch.ones(3), group, "ring")
    assert tensor.tolist() == [1, 1, 1]
    assert group.meter.counters.bytes_sent == 0


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no all-reduce 'rings'"):
        all_reduce(torch.ones(3), algorithm="rings")  # type: ignore[arg-type]


def test_the_passes_of_the_ring_stand_alone() -> None:
    def program(place: Place) -> tuple[int, Tensor, Tensor]:
        flat = torch.arange(7.0) * (place.group.rank + 1)
        chunks = ring.chunks_of(flat, place.group.size)
        own = ring.reduce_scatter(chunks, place.group)
        scattered = chunks[own].clone()
        ring.all_gather(chunks, place.group)
        return own, scattered, flat

    expected = torch.arange(7.0) * 6
    for rank, (own, scattered, flat) in enumerate(on_ranks(3, program)):
        assert own == (rank + 1) % 3
        assert torch.equal(scattered, expected.tensor_split(3)[own])
        assert torch.equal(flat, expected)
