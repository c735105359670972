"""The order of examples that lie in blocks, and of those that lie with several ranks."""

from __future__ import annotations

from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.data.block_shuffling import BlockLayout, interleaved
from dure.randomness.seeds import shuffled

BLOCKS = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@given(BLOCKS, st.integers(1, 60), st.integers(0, 3), st.integers(0, 3), st.data())
def test_each_example_comes_once_and_windows_hold_what_is_visited(
    blocks, window, seed, epoch, data
):
    arrangement = BlockLayout(tuple(blocks), window)
    places = list(range(sum(blocks)))
    part = data.draw(st.none() | st.lists(st.sampled_from(places), min_size=1, unique=True))
    given = None if part is None else torch.tensor(part)
    visit = arrangement.visit(seed, epoch, 0, given)
    visited = visit.order if given is None else given[visit.order]
    assert sorted(visited.tolist()) == sorted(places if part is None else part)
    # Every block is in one window at the most, and windows are visited one after another.
    held = [set(some.tolist()) for some in visit.windows]
    assert sum(map(len, held)) == len(set().union(*held))
    window_of = {block: number for number, some in enumerate(held) for block in some}
    ways = [window_of[block] for block in arrangement.block_of(visited).tolist()]
    assert ways == sorted(ways)
    # A window has no more than there is room for, but for a block that has more by itself.
    assert (
        all(sum(blocks[b] for b in some) <= window or len(some) == 1 for some in held)
        or sum(blocks) <= window
    )


@given(BLOCKS, st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
def test_what_fits_into_a_window_has_the_order_of_examples_in_memory(blocks, seed, epoch, client):
    arrangement = BlockLayout(tuple(blocks), sum(blocks))
    expected = shuffled(sum(blocks), seed, epoch, client)
    assert torch.equal(arrangement.visit(seed, epoch, client).order, expected)


def test_a_window_has_blocks_of_all_of_the_data():
    arrangement = BlockLayout((10,) * 100, 100)
    first = arrangement.visit(0, 0, 0).order[:100]
    thirds = torch.bincount(first // 334, minlength=3)
    assert bool((thirds > 10).all()), thirds
    others = [
        arrangement.visit(seed, epoch, client).order
        for seed, epoch, client in [(1, 0, 0), (0, 1, 0), (0, 0, 1)]
    ]
    assert all(not torch.equal(other[:100], first) for other in others)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5))
def test_ranks_take_turns_in_proportion(sizes):
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    # The definition, with exact numbers.
    expected = sorted(
        (Fraction(2 * j + 1, 2 * size), start + j)
        for size, start in zip(sizes, starts, strict=True)
        for j in range(size)
    )
    turns = interleaved(sizes).tolist()
    assert turns == [place for _, place in expected]
    owners = torch.bucketize(torch.tensor(turns), torch.tensor(starts), right=True) - 1
    for rank, size in enumerate(sizes):
        had = (owners == rank).cumsum(0)
        fair = torch.arange(1, len(turns) + 1) * size / len(turns)
        assert float((had - fair).abs().max()) <= len(sizes) / 2 + 1
