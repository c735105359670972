"""Pictures of pipeline schedules, and the idle shares that they print."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.drawing.options import PipelineDrawing
from dure.drawing.pipeline import pipeline_picture, simulated

RANKS = st.integers(1, 6)
MICROBATCHES = st.integers(1, 12)


def idle(name: str, p: int, m: int, v: int = 2) -> float:
    how = PipelineDrawing(ranks=p, microbatches=m, stages_per_rank=v)
    return simulated(name, how).simulation.bubble


@settings(max_examples=60, deadline=None)
@given(RANKS, MICROBATCHES)
def test_the_idle_share_is_that_of_the_tables_of_pipeline_md(p: int, m: int) -> None:
    def share(over_busy: float) -> float:
        return over_busy / (1 + over_busy)

    assert idle("naive", p, m) == pytest.approx((p - 1) / p)
    assert idle("gpipe", p, m) == pytest.approx((p - 1) / (m + p - 1))
    assert idle("1f1b", p, m) == pytest.approx((p - 1) / (m + p - 1))
    if m >= p:
        assert idle("zero-bubble", p, m) == pytest.approx(share((p - 1) / (3 * m)))
    if m >= 2 * p:
        most = max(p - 1, 2 * p - 3) / (6 * m)
        least = (p - 1) / (6 * m)
        assert share(least) - 1e-9 <= idle("zero-bubble-v", p, m) <= share(most) + 1e-9


@settings(max_examples=60, deadline=None)
@given(RANKS, st.integers(1, 3), st.integers(2, 4))
def test_the_idle_share_of_interleaving_is_that_of_its_study(p: int, groups: int, v: int) -> None:
    m = groups * p
    assert idle("interleaved", p, m, v) == pytest.approx((p - 1) / (v * m + p - 1))


@settings(max_examples=40, deadline=None)
@given(RANKS, MICROBATCHES, st.sampled_from(["gpipe", "1f1b", "naive", "zero-bubble"]))
def test_all_schedules_have_the_same_work(p: int, m: int, name: str) -> None:
    how = PipelineDrawing(ranks=p, microbatches=m, forward=2, backward=3)
    for seconds in simulated(name, how).simulation.busy:
        assert seconds == pytest.approx(m * 5)


def test_the_picture_has_a_box_for_each_action_and_the_printed_figures() -> None:
    picture = pipeline_picture(PipelineDrawing(("gpipe", "interleaved"), ranks=4, microbatches=8))
    root = ElementTree.fromstring(picture.svg)
    boxes = [one.get("class") for one in root.iter("{http://www.w3.org/2000/svg}rect")]
    # 4 ranks, 8 micro-batches, one or two stages; and the legend and two bars.
    assert boxes.count("f") + boxes.count("f faint") == 4 * 8 * 3 + 2 + 2
    assert boxes.count("b") + boxes.count("b faint") == 4 * 8 * 3 + 1
    for text in (picture.svg, picture.text()):
        assert "27.3 %" in text
        assert "15.8 %" in text
        assert "0.375" in text


def test_the_rows_of_a_terminal_have_an_idle_share_of_the_figure() -> None:
    text = pipeline_picture(PipelineDrawing(("1f1b",), ranks=3, microbatches=6), width=120).text()
    rows = re.findall(r"^rank \d │(.*)│$", text, re.MULTILINE)
    assert len(rows) == 3
    shown = sum(row.count("·") for row in rows) / sum(map(len, rows))
    assert shown == pytest.approx(idle("1f1b", 3, 6))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "gpip"}, "did you mean 'gpipe'"),
        ({"ranks": 0}, "--ranks is 0"),
        ({"microbatches": 0}, "--microbatches is 0"),
        ({"stages_per_rank": 0}, "--stages-per-rank is 0"),
        ({"forward": 0.0}, "--forward is 0"),
        ({"backward": float("nan")}, "--backward is nan"),
        ({"message": -1.0}, "--message is -1"),
        ({"ranks": 1000, "microbatches": 1000}, "boxes"),
    ],
)
def test_a_pipeline_that_cannot_be_drawn_is_refused(
    change: dict[str, object], message: str
) -> None:
    given: dict[str, object] = {"ranks": 2, "microbatches": 2, **change}
    name = str(given.pop("name", "gpipe"))
    with pytest.raises(ValueError, match=message):
        simulated(name, PipelineDrawing(**given))  # type: ignore[arg-type]
