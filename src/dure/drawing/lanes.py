"""Lanes of participants over time: their work, their waiting, and messages between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dure.drawing.picture import Picture, StyledText, TerminalLine, heading, line
from dure.drawing.svg import MARGIN, WIDTH, Entry, SvgCanvas, svg_page

_LEFT = 96
_RIGHT = 30
_LANE = 22
_GAP = 18
_HEAD = 30
_AXIS = 30
_MOST_LISTED = 24
"""Most messages that a panel lists in a terminal."""

_BLOCKS = {"f": "█", "b": "▓", "w": "▒", "s": "▆", "c": "─"}
"""Characters of a terminal, by class."""


class LaneSpan(NamedTuple):
    """Activity of a participant from start to end; kind: a class of `dure.drawing.svg`."""

    lane: str
    kind: str
    start: float
    end: float
    label: str = ""


class LaneArrow(NamedTuple):
    """Message that leaves `source` at `start` and is at `target` at `end`.

    label: content, for a terminal; by default the meaning of the class in the legend.
    """

    source: str
    target: str
    kind: str
    start: float
    end: float
    label: str = ""


@dataclass(frozen=True)
class LanePanel:
    """Lanes of one run.

    title: above the lanes, with the figures of the run. waiting: lanes in which unused time is idle
    time; a server, which serves all others, is not among them.
    """

    title: str
    lanes: tuple[str, ...]
    spans: tuple[LaneSpan, ...]
    arrows: tuple[LaneArrow, ...]
    waiting: tuple[str, ...]
    end: float

    def waiting_share(self) -> float:
        """Return the share of the time in which the waiting lanes have no activity."""
        if not self.waiting or not self.end:
            return 0.0
        idle = sum(self.end - covered(self._of(lane)) for lane in self.waiting)
        return idle / (self.end * len(self.waiting))

    def _of(self, lane: str) -> list[tuple[float, float]]:
        return [(span.start, span.end) for span in self.spans if span.lane == lane]


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total = 0.0
    until = -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def lanes_picture(
    title: str,
    figures: str,
    legend: Sequence[Entry],
    panels: Sequence[LanePanel],
    caption: Sequence[str],
    width: int = 100,
) -> Picture:
    """Draw panels below one another, on one axis of time.

    Args:
        title: title of the picture.
        figures: line below the title.
        legend: classes with their meanings.
        panels: lanes of runs.
        caption: lines below the picture.
        width: columns of a terminal.
    """
    longest = max(panel.end for panel in panels)
    canvas = SvgCanvas()
    top = 0.0
    for panel in panels:
        top += _draw(canvas, panel, top, longest)
    canvas.text(_LEFT, top - 2, "time", "soft")
    lines = [*heading(title, figures), _key(legend), line()]
    for panel in panels:
        lines += [*_text(panel, longest, width, dict(legend)), line()]
    lines += [line(StyledText(text, "soft")) for text in caption]
    return Picture(svg_page(title, figures, legend, canvas, top + 4, caption), tuple(lines))


def _scale(longest: float) -> float:
    return (WIDTH - _LEFT - _RIGHT) / longest


def _draw(canvas: SvgCanvas, panel: LanePanel, top: float, longest: float) -> float:
    """Draw a panel; return its height."""
    scale = _scale(longest)
    canvas.text(MARGIN, top + 16, panel.title, "title")
    first = top + _HEAD
    tops = {lane: first + place * (_LANE + _GAP) for place, lane in enumerate(panel.lanes)}
    bottom = first + len(panel.lanes) * (_LANE + _GAP) - _GAP
    for tick in _ticks(longest):
        if tick <= panel.end + 1e-9:
            canvas.rule(_LEFT + tick * scale, first, _LEFT + tick * scale, bottom + 4)
            canvas.text(_LEFT + tick * scale, bottom + 16, f"{tick:g}", "soft", anchor="middle")
    for lane, y in tops.items():
        canvas.text(_LEFT - 8, y + _LANE / 2 + 4, lane, "", anchor="end")
        kind = "idle" if lane in panel.waiting else "ground"
        canvas.box(_LEFT, y, panel.end * scale, _LANE, kind)
    # Work is drawn over the activity of a link.
    for span in sorted(panel.spans, key=lambda span: span.kind != "c"):
        # Thinner: the link of a participant, beside its work.
        inset = 6 if span.kind == "c" else 0
        x = _LEFT + span.start * scale
        canvas.box(
            x,
            tops[span.lane] + inset,
            max((span.end - span.start) * scale - 0.6, 0.8),
            _LANE - 2 * inset,
            span.kind,
            label=span.label,
            hint=f"{span.lane}: {span.label or span.kind}, {span.start:.4g} to {span.end:.4g}",
        )
    for arrow in panel.arrows:
        down = tops[arrow.target] > tops[arrow.source]
        start = (_LEFT + arrow.start * scale, tops[arrow.source] + (_LANE if down else 0))
        end = (_LEFT + arrow.end * scale, tops[arrow.target] + (0 if down else _LANE))
        canvas.line([start, end], arrow.kind)
    return bottom - top + _AXIS


def _ticks(longest: float) -> list[float]:
    power = 10.0 ** math.floor(math.log10(longest / 8))
    step = next(nice * power for nice in (1, 2, 2.5, 5, 10) if nice * power >= longest / 8 - 1e-9)
    return [number * step for number in range(math.floor(longest / step + 1e-9) + 1)]


# For a terminal


def _key(legend: Sequence[Entry]) -> TerminalLine:
    parts = []
    for kind, name in legend:
        mark = "·" if kind == "idle" else _BLOCKS.get(kind, "")
        parts += [StyledText(mark, kind), StyledText(f" {name}   ", "soft")]
    return parts


def _text(
    panel: LanePanel, longest: float, width: int, names: Mapping[str, str]
) -> list[TerminalLine]:
    margin = max(map(len, panel.lanes)) + 3
    columns = max(10, round((width - margin) * panel.end / longest))
    lines: list[TerminalLine] = [line(StyledText(panel.title, "title"))]
    for lane in panel.lanes:
        empty = "idle" if lane in panel.waiting else ""
        cells = [StyledText("·" if empty else " ", empty)] * columns
        # Work is drawn over the link's activity.
        own = sorted(
            (span for span in panel.spans if span.lane == lane), key=lambda span: span.kind != "c"
        )
        for span in own:
            first = math.ceil(span.start / panel.end * columns - 0.5)
            last = max(first + 1, math.ceil(span.end / panel.end * columns - 0.5))
            block = StyledText(_BLOCKS[span.kind], span.kind)
            for place in range(max(first, 0), min(last, columns)):
                cells[place] = block
        lines.append([StyledText(f"{lane:<{margin - 2}}│"), *_joined(cells), StyledText("│")])
    listed = sorted(panel.arrows, key=lambda arrow: (arrow.start, arrow.source, arrow.target))
    for arrow in listed[:_MOST_LISTED]:
        content = arrow.label or names.get(arrow.kind, "")
        lines.append(
            line(
                StyledText(f"  {arrow.start:8.3f} → {arrow.end:<8.3f} ", "soft"),
                f"{arrow.source} → {arrow.target}  ",
                StyledText(content, arrow.kind),
            )
        )
    if len(listed) > _MOST_LISTED:
        lines.append(line(StyledText(f"  and {len(listed) - _MOST_LISTED} more messages", "soft")))
    return lines


def _joined(cells: Sequence[StyledText]) -> list[StyledText]:
    """Return neighbours of one class as one text."""
    parts: list[StyledText] = []
    for cell in cells:
        if parts and parts[-1].kind == cell.kind:
            parts[-1] = StyledText(parts[-1].text + cell.text, cell.kind)
        else:
            parts.append(cell)
    return parts
