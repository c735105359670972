"""Pictures of schedules: every action is in them, and both are well-formed."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from dure.parallel.pipeline.builders import make
from dure.parallel.pipeline.gantt import gantt_svg, gantt_text
from dure.parallel.pipeline.schedule import Action
from dure.parallel.pipeline.simulate import ActionSpan, Times, simulate

SVG = "{http://www.w3.org/2000/svg}"


def spans(name: str, ranks: int, m: int, v: int = 1) -> tuple[ActionSpan, ...]:
    schedule = make(name, ranks, m, v)
    return simulate(schedule, Times.uniform(schedule.stages)).spans


def test_a_terminal_shows_a_row_a_rank():
    assert gantt_text(spans("1f1b", 2, 2), width=len("rank 0 ") + 2 + 18).splitlines() == [
        "rank 0 │0011    ₀₀₀₀  ₁₁₁₁│",
        "rank 1 │  00₀₀₀₀11₁₁₁₁    │",
        "        3 forward, ₃ backward of micro-batch 3",
    ]


def test_weight_gradients_stand_above_the_line():
    text = gantt_text(spans("zero-bubble", 2, 2), width=60)
    assert "⁰" in text
    assert "¹" in text
    assert text.endswith("3 forward, ₃ input gradient, ³ weight gradient of micro-batch 3")


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "zero-bubble"])
def test_all_rows_are_as_wide_as_asked(name):
    rows = gantt_text(spans(name, 4, 1 if name == "naive" else 12), width=77).splitlines()[:-1]
    assert [len(row) for row in rows] == [77] * 4


def test_nothing_is_drawn_of_nothing():
    assert gantt_text([]) == ""
    with pytest.raises(ValueError, match="nothing to draw"):
        gantt_svg([("empty", [])])
    with pytest.raises(ValueError, match="20 or more"):
        gantt_text([], width=10)


def test_the_picture_has_every_action_of_every_panel():
    panels = [("measured <1>", spans("1f1b", 3, 4)), ("simulated", spans("zero-bubble-v", 3, 4, 2))]
    root = ElementTree.fromstring(gantt_svg(panels, unit="s"))
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert len(titles) == sum(len(drawn) for _, drawn in panels)
    assert "F0.0, rank 0, 0 to 1" in titles
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {
        "measured <1> (18 s)",
        "rank 2",
        "time in s",
        "forward",
        "weight gradient",
        "idle",
    } <= set(texts)
    assert "backward, input gradient" in texts
    assert root.get("aria-label") == "Gantt chart of a pipeline: measured <1>, simulated"


def test_panels_share_one_axis_and_begin_with_their_first_action():
    action = Action("forward", 0, 0)
    root = ElementTree.fromstring(
        gantt_svg(
            [("late", [ActionSpan(0, action, 5, 6)]), ("long", [ActionSpan(0, action, 0, 2)])]
        )
    )
    late, long = [next(group.iter(f"{SVG}rect")) for group in root.iter(f"{SVG}g")]
    assert late.get("x") == long.get("x")
    assert float(long.get("width")) + 1 == pytest.approx(2 * (float(late.get("width")) + 1))


def test_transfers_are_not_drawn():
    span = ActionSpan(0, Action("forward", 0, 0), 0, 1)
    assert gantt_text([span, ActionSpan(0, Action("send_output", 0, 0), 1, 9)]) == gantt_text(
        [span]
    )
