"""The division as data: every element lies with one rank, and costs follow."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.parallel.zero.partition_layout import (
    SEPARATE_BLOCK_ELEMENTS,
    ParameterBlock,
    blocks_of,
    bytes_sent,
    memory,
)

SHAPES = st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=6)


def block(
    *shapes: tuple[int, ...], ranks: int, dtype: torch.dtype = torch.float32
) -> ParameterBlock:
    return ParameterBlock(
        tuple(f"p{i}" for i in range(len(shapes))), shapes, dtype, torch.float32, True, ranks
    )


@given(SHAPES, st.integers(1, 6))
def test_every_element_lies_with_one_rank(shapes: list[tuple[int, ...]], ranks: int) -> None:
    whole = block(*shapes, ranks=ranks)
    assert 0 <= whole.padded - whole.elements < ranks
    places = set()
    for index, length in enumerate(whole.lengths):
        held = []
        for rank in range(ranks):
            piece = whole.piece(index, rank)
            if piece is not None:
                held += range(piece.start, piece.stop)
                assert piece.at >= 0
                assert piece.at + piece.stop - piece.start <= whole.chunk
                places |= {(rank, piece.at + offset) for offset in range(piece.stop - piece.start)}
        assert held == list(range(length))
    assert len(places) == whole.elements


def test_long_parameters_are_blocks_alone_and_the_rest_is_in_a_row_a_kind() -> None:
    long, odd = (
        torch.nn.Parameter(torch.empty(SEPARATE_BLOCK_ELEMENTS)),
        torch.nn.Parameter(torch.empty(SEPARATE_BLOCK_ELEMENTS + 1)),
    )
    short = [torch.nn.Parameter(torch.empty(3)) for _ in range(2)]
    half, frozen = (
        torch.nn.Parameter(torch.empty(3).half()),
        torch.nn.Parameter(torch.empty(3), requires_grad=False),
    )
    named = list(zip("abcdef", [short[0], long, odd, short[1], half, frozen], strict=True))
    blocks = blocks_of(named, 2, [parameter.dtype for _, parameter in named])
    assert [each.names for each in blocks] == [("a", "c", "d"), ("b",), ("e",), ("f",)]
    assert [each.alone for each in blocks] == [False, True, False, False]
    assert [each.trained for each in blocks] == [True, True, True, False]


@pytest.mark.parametrize(("stage", "times"), [(1, 2), (2, 2), (3, 3)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_step_sends_two_or_three_times_the_parameters(stage: int, times: int, ranks: int) -> None:
    blocks = [block((8, 16), ranks=ranks), block((64,), ranks=ranks)]
    elements = sum(each.elements for each in blocks)
    assert bytes_sent(blocks, stage, 0) == times * elements * 4 * (ranks - 1) // ranks  # type: ignore[arg-type]
    more = bytes_sent(blocks, stage, 5) - bytes_sent(blocks, stage, 0)  # type: ignore[arg-type]
    assert more == (ranks - 1) * 5 * 4


@pytest.mark.parametrize(("stage", "bytes_of"), [(1, (8, 8)), (2, (4, 12)), (3, (0, 16))])
def test_memory_in_float32_with_adam(stage: int, bytes_of: tuple[int, int]) -> None:
    elements, ranks = 1200, 4
    whole, divided = bytes_of
    expected = whole * elements + divided * elements // ranks
    assert memory([block((elements,), ranks=ranks)], stage).total == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(("stage", "gigabytes"), [(1, 31.4), (2, 16.6), (3, 1.9)])
def test_memory_in_mixed_precision_is_that_of_the_papers_figure(
    stage: int, gigabytes: float
) -> None:
    """Figure 1 of the paper, 7.5 billion parameters on 64 ranks. It counts gradients in two bytes;
    here those by which a rank updates have four, from stage 2 on."""
    parameters, ranks = 7_500_000_000, 64
    held = memory([block((parameters,), ranks=ranks, dtype=torch.bfloat16)], stage)  # type: ignore[arg-type]
    longer = 2 * parameters / ranks if stage > 1 else 0
    assert math.isclose((held.total - longer) / 1e9, gigabytes, abs_tol=0.05)
