"""The ring that docs/collectives.md draws is the one that sends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.collectives.algorithms import ring
from ring_drawing import PAGE, PICTURE, begun, picture, read, rewritten, schedule


def test_the_page_and_the_picture_are_as_the_ring_is() -> None:
    """If not: `python tests/ring_drawing.py` writes them."""
    text = PAGE.read_text()
    assert rewritten(text) == text
    assert picture() == PICTURE.read_text()


@given(st.integers(1, 7))
@settings(deadline=None, max_examples=7)
def test_a_ring_of_any_size_sends_what_the_page_says(size: int) -> None:
    steps, ends = schedule(size)
    assert len(steps) == ring.rounds(size)
    for step in steps:
        assert [sent.to for sent in step] == [(rank + 1) % size for rank in range(size)]
        # No two ranks send the same chunk at the same time.
        assert len({sent.chunk.index for sent in step}) == size
    everyone = frozenset(range(size))
    assert all(chunk.summed == everyone for chunks in ends for chunk in chunks)
    chunk = size * size
    for rank in range(size):
        assert ring.elements_sent(size * chunk, size, rank) == len(steps) * chunk
    grown = [len(sent.chunk.summed) for step in steps for sent in step[:1]]
    assert grown == [*range(1, size), *[size] * (size - 1)]


def test_a_part_that_is_summed_twice_is_seen() -> None:
    chunk = begun(3, 1)[:9]
    assert read(chunk, 3).summed == {1}
    with pytest.raises(ValueError, match="more than once"):
        read(chunk + chunk, 3)
