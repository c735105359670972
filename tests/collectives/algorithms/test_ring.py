"""The two passes of the ring, each alone."""

from __future__ import annotations

import torch
from on_ranks import on_ranks
from torch import Tensor

from dure.collectives.algorithms import ring
from dure.contracts.world import RankContext


def test_the_passes_of_the_ring_stand_alone() -> None:
    def program(context: RankContext) -> tuple[int, Tensor, Tensor]:
        flat = torch.arange(7.0) * (context.group.rank + 1)
        chunks = ring.chunks_of(flat, context.group.size)
        own = ring.reduce_scatter(chunks, context.group)
        scattered = chunks[own].clone()
        ring.all_gather(chunks, context.group)
        return own, scattered, flat

    expected = torch.arange(7.0) * 6
    for rank, (own, scattered, flat) in enumerate(on_ranks(3, program)):
        assert own == (rank + 1) % 3
        assert torch.equal(scattered, expected.tensor_split(3)[own])
        assert torch.equal(flat, expected)


def test_a_reduce_scatter_changes_no_chunk_but_the_one_it_completes() -> None:
    def program(context: RankContext) -> Tensor:
        flat = torch.full((8,), float(context.group.rank))
        ring.reduce_scatter(ring.chunks_of(flat, 4), context.group)
        return flat

    assert on_ranks(4, program)[2].tolist() == [2, 2, 2, 2, 2, 2, 6, 6]
