"""Pictures of all-reduce are drawn from messages that the algorithms send."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dure.collectives.algorithms.table import ALL_REDUCES
from dure.drawing.all_reduce import (
    ALGORITHMS,
    all_reduce_picture,
    all_reduce_steps,
    held_by_step,
    marked,
    read_chunks,
    step_table,
)
from dure.drawing.recording_group import RecordingGroup, recorded

PAGE = Path(__file__).parents[2] / "docs" / "collectives.md"
BEGIN, END = "<!-- ring -->\n", "<!-- end of ring -->\n"


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(ALGORITHMS), st.integers(1, 9), st.data())
def test_a_rank_sends_the_elements_of_the_formula_and_ends_with_the_sum(
    algorithm: str, ranks: int, data: st.DataObject
) -> None:
    hosts = data.draw(st.integers(1, ranks))
    drawn = all_reduce_steps(algorithm, ranks, hosts)
    assert [share * drawn.elements for share in drawn.sent] == list(drawn.formula)
    assert sum(drawn.sent) == sum(drawn.received)
    everyone = frozenset(range(ranks))
    for chunks in drawn.ends:
        assert [chunk.index for chunk in chunks] == list(range(drawn.chunks))
        assert {chunk.ranks for chunk in chunks} == {everyone}
    if algorithm != "hierarchical":
        assert len(drawn.steps) == ALL_REDUCES[algorithm].rounds(ranks)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ALGORITHMS), st.integers(1, 9))
def test_a_rank_sends_what_the_picture_says_that_it_has(algorithm: str, ranks: int) -> None:
    drawn = all_reduce_steps(algorithm, ranks, min(2, ranks))
    for held, step in zip(held_by_step(drawn), drawn.steps, strict=True):
        for message in step:
            for chunk in message.chunks:
                assert held[message.source][chunk.index] == (chunk.ranks, False)


def test_the_chunks_of_a_ring_go_round() -> None:
    drawn = all_reduce_steps("ring", 5)
    for step in drawn.steps:
        assert [message.target for message in step] == [1, 2, 3, 4, 0]
        assert len({message.chunks[0].index for message in step}) == 5
    grown = [len(step[0].chunks[0].ranks) for step in drawn.steps]
    assert grown == [1, 2, 3, 4, 5, 5, 5, 5]


def test_the_table_of_the_page_is_that_of_the_ring() -> None:
    head, *rows = step_table(all_reduce_steps("ring", 4))
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    text = PAGE.read_text()
    shown = text.split(BEGIN)[1].split(END)[0].strip().splitlines()
    assert shown == lines


def test_the_picture_has_an_arrow_for_each_message_and_the_printed_figures() -> None:
    picture = all_reduce_picture("tree", 4)
    root = ElementTree.fromstring(picture.svg)
    paths = [one.get("class") for one in root.iter("{http://www.w3.org/2000/svg}path")]
    assert paths.count("line c") == len(all_reduce_steps("tree", 4).messages)
    assert "4 steps, 6 messages; a rank sends 1 n to 2 n" in picture.svg
    assert len(re.findall(r"→ rank \d", picture.text())) == 6


def test_a_part_that_is_summed_twice_is_seen() -> None:
    chunk = marked(3, 3, 1)[:9]
    assert read_chunks(chunk, 3, 3)[0].ranks == {1}
    with pytest.raises(ValueError, match="more than once"):
        read_chunks(chunk + chunk, 3, 3)
    with pytest.raises(ValueError, match="whole chunks"):
        read_chunks(torch.zeros(9, dtype=torch.int64), 3, 3)


def test_a_message_that_is_not_received_is_an_error() -> None:
    def unread(tensor: Tensor, group: RecordingGroup) -> None:
        group.send(tensor, (group.rank + 1) % group.size)

    with pytest.raises(RuntimeError, match="2 messages were sent and not received"):
        recorded(unread, [torch.zeros(1), torch.zeros(1)])


@pytest.mark.parametrize(
    ("algorithm", "ranks", "hosts", "message"),
    [
        ("rng", 4, 1, "did you mean 'ring'"),
        ("native", 4, 1, "no picture of the all-reduce 'native'"),
        ("ring", 0, 1, "--ranks is 0: give 1 to 16"),
        ("ring", 17, 1, "--ranks is 17"),
        ("hierarchical", 4, 5, "--hosts is 5: give 1 to 4"),
    ],
)
def test_an_all_reduce_that_cannot_be_drawn_is_refused(
    algorithm: str, ranks: int, hosts: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        all_reduce_steps(algorithm, ranks, hosts)
