"""Gantt chart of a pipeline: a row for each rank, time from left to right.

    gantt_text(simulation.spans)                                        for a terminal
    gantt_svg([("measured", spans), ("simulated", others)], unit="s")   for a page, panels on one
                                                                        time axis

In a terminal a column shows the action that computes in the middle of that column, by the last
digit of its micro-batch: 3 for a forward, ₃ below the line for a backward or an input gradient, ³
above the line for a weight gradient. In the SVG these are three colours, which follow the reader's
light or dark scheme; if a rank has several stages, its later stages are fainter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from xml.sax.saxutils import escape

from dure.parallel.pipeline.schedule import Kind
from dure.parallel.pipeline.simulate import ActionSpan

DIGITS: dict[Kind, str] = {
    "forward": "0123456789",
    "backward": "₀₁₂₃₄₅₆₇₈₉",
    "input_gradient": "₀₁₂₃₄₅₆₇₈₉",
    "weight_gradient": "⁰¹²³⁴⁵⁶⁷⁸⁹",
}

_LEGEND: tuple[tuple[Kind, str, str], ...] = (
    ("forward", "f", "forward"),
    ("backward", "b", "backward"),
    ("input_gradient", "b", "input gradient"),
    ("weight_gradient", "w", "weight gradient"),
)
_CLASSES = {kind: letter for kind, letter, _ in _LEGEND}

# In pixels: margins, the picture's width, a rank's row and the gap after it, a panel's title and
# axis.
_LEFT = 64
_RIGHT = 18
_WIDTH = 960
_ROW = 24
_GAP = 4
_HEAD = 30
_AXIS = 40
_CHARACTER = 6.2
"""Width of a digit of a label, in pixels."""
_INSET = 4
"""Horizontal space around a label, both sides together, in pixels."""


def gantt_text(spans: Sequence[ActionSpan], width: int = 100) -> str:
    """Return a row for each rank and a line that explains the digits.

    width: columns in all. Raises ValueError below 20.
    """
    if width < 20:
        raise ValueError(f"{width} columns are too few to draw in: give 20 or more")
    spans = _computing(spans)
    start, end = _limits(spans)
    names = [f"rank {rank} " for rank in range(_ranks(spans))]
    indent = max(map(len, names), default=0)
    columns = width - indent - 2
    rows = [[" "] * columns for _ in names]
    for span in spans:
        digit = DIGITS[span.action.kind][span.action.microbatch % 10]
        # A column belongs to the action that is running at the column's middle.
        first, last = (
            math.ceil((time - start) / (end - start) * columns - 0.5)
            for time in (span.start, span.end)
        )
        rows[span.rank][first:last] = digit * (last - first)
    drawn = [f"{name:<{indent}}│{''.join(row)}│" for name, row in zip(names, rows, strict=True)]
    kinds = {span.action.kind for span in spans}
    legend = ", ".join(f"{DIGITS[kind][3]} {name}" for kind, _, name in _LEGEND if kind in kinds)
    return "\n".join([*drawn, f"{'':<{indent}} {legend} of micro-batch 3"]) if kinds else ""


def gantt_svg(
    panels: Sequence[tuple[str, Sequence[ActionSpan]]],
    unit: str = "",
    *,
    names: Sequence[str] | None = None,
    inside: bool = False,
    write: Callable[..., str] = str.format,
) -> str:
    """Return an SVG of panels below one another, on the same time axis.

    Each panel begins with its first action.

    Args:
        panels: titles and spans.
        unit: unit of the spans' times.
        names: names of the ranks, up to ten letters; by default "rank 0", ….
        inside: whether the SVG is an element of an HTML page, whose style sheet defines the colours
            of the classes; otherwise the SVG contains a style sheet and a namespace of its own.
        write: function that fills values into a template, and may translate the template.

    Raises:
        ValueError: no panel has an action that computes.
    """
    drawn = [(title, _computing(spans)) for title, spans in panels]
    if not any(spans for _, spans in drawn):
        raise ValueError("there is nothing to draw: give spans of actions that compute")
    longest = max(_length(spans) for _, spans in drawn)
    # a common scale, so that the lengths of panels can be compared
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    parts = _legend(list(chain.from_iterable(spans for _, spans in drawn)), write)
    top = 40.0
    for title, spans in drawn:
        length = _number(_length(spans)) + (f" {unit}" if unit else "")
        parts.append(_text(16, top + 16, f"{title} ({length})", "title"))
        parts += _panel(spans, top + _HEAD, longest=longest, scale=scale, names=names, write=write)
        top += _HEAD + _ranks(spans) * (_ROW + _GAP) + _AXIS
    parts.append(_text(_LEFT, top - 4, _time(unit, write), "soft"))
    height = top + 10
    titles = ", ".join(title for title, _ in panels)
    label = escape(write("Gantt chart of a pipeline: {titles}", titles=titles), {'"': "&quot;"})
    content = "\n".join(parts)
    space = "" if inside else 'xmlns="http://www.w3.org/2000/svg" '
    style = "" if inside else f"{_style()}\n"
    return (
        f'<svg {space}viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" '
        f'height="{height:.0f}" role="img" aria-label="{label}">\n{style}'
        f'<rect width="100%" height="100%" class="page"/>\n{content}\n</svg>\n'
    )


def _time(unit: str, write: Callable[..., str]) -> str:
    return write("time in {unit}", unit=unit) if unit else write("time")


def _computing(spans: Iterable[ActionSpan]) -> list[ActionSpan]:
    return [span for span in spans if span.action.computes and span.end > span.start]


def _limits(spans: Sequence[ActionSpan]) -> tuple[float, float]:
    if not spans:
        return 0.0, 0.0
    return min(span.start for span in spans), max(span.end for span in spans)


def _length(spans: Sequence[ActionSpan]) -> float:
    start, end = _limits(spans)
    return end - start


def _ranks(spans: Iterable[ActionSpan]) -> int:
    return max((span.rank for span in spans), default=-1) + 1


def _panel(
    spans: Sequence[ActionSpan],
    top: float,
    longest: float,
    scale: float,
    names: Sequence[str] | None,
    write: Callable[..., str],
) -> list[str]:
    ranks = _ranks(spans)
    start, end = _limits(spans)
    bottom = top + ranks * (_ROW + _GAP)
    parts = []
    for tick in _ticks(longest):
        x = _LEFT + tick * scale
        parts.append(
            f'<line x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}" class="grid"/>'
        )
        parts.append(_text(x, bottom + 15, _number(tick), "soft", anchor="middle"))
    for rank in range(ranks):
        y = top + rank * (_ROW + _GAP)
        name = names[rank] if names else f"rank {rank}"
        parts.append(_text(_LEFT - 8, y + _ROW / 2 + 4, name, "key", anchor="end"))
        lane = f'x="{_LEFT}" y="{y:.1f}" width="{(end - start) * scale:.1f}" height="{_ROW}"'
        parts.append(f'<rect {lane} class="idle"/>')
    # the lowest stage of each rank; the others are fainter
    first: dict[int, int] = {}
    for span in spans:
        stage = span.action.stage
        first[span.rank] = min(stage, first.get(span.rank, stage))
    for span in spans:
        y = top + span.rank * (_ROW + _GAP)
        faint = span.action.stage != first[span.rank]
        parts.append(_drawn(span, start, y, scale, faint=faint, write=write))
    return parts


def _drawn(
    span: ActionSpan, start: float, y: float, scale: float, faint: bool, write: Callable[..., str]
) -> str:
    x = _LEFT + (span.start - start) * scale
    width = (span.end - span.start) * scale
    kind = _CLASSES[span.action.kind] + (" faint" if faint else "")
    said = write(
        "{action}, rank {rank}, {start} to {end}",
        action=span.action,
        rank=span.rank,
        start=_number(span.start - start),
        end=_number(span.end - start),
    )
    # Leave a line of the page's colour between neighbours if there is space.
    inner = width - 1 if width > 3 else width
    box = f'<rect x="{x:.2f}" y="{y:.1f}" width="{inner:.2f}" height="{_ROW}" class="{kind}"/>'
    number = str(span.action.microbatch)
    if width >= _CHARACTER * len(number) + _INSET:
        style = "on faint" if faint else "on"
        box += _text(x + inner / 2, y + _ROW / 2 + 4, number, style, anchor="middle")
    return f"<g><title>{said}</title>{box}</g>"


def _legend(spans: Sequence[ActionSpan], write: Callable[..., str]) -> list[str]:
    kinds = {span.action.kind for span in spans}
    stages: dict[int, set[int]] = {}
    for span in spans:
        stages.setdefault(span.rank, set()).add(span.action.stage)
    names: dict[str, list[str]] = {}
    for kind, letter, name in _LEGEND:
        if kind in kinds:
            names.setdefault(letter, []).append(write(name))
    entries = [(letter, ", ".join(same)) for letter, same in names.items()]
    if any(len(several) > 1 for several in stages.values()):
        entries.append(("f faint", write("fainter: a rank's later stages")))
    entries.append(("idle", write("idle")))
    parts = []
    x = float(_LEFT)
    for style, name in entries:
        parts.append(f'<rect x="{x:.1f}" y="14" width="16" height="12" class="{style}"/>')
        parts.append(_text(x + 22, 24, name, "key"))
        # box, gaps and the text, as wide as its letters are on average
        x += 46 + _CHARACTER * len(name)
    parts.append(_text(x, 24, write("numbers: micro-batches"), "soft"))
    return parts


def _ticks(longest: float) -> list[float]:
    """Return at most nine ticks, at multiples of 1, 2, 2.5 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(longest / 8))
    steps = [nice * power for nice in (1, 2, 2.5, 5, 10)]
    # Without the tolerance, rounding could make a length of exactly eight steps need a larger step.
    step = next(step for step in steps if step >= longest / 8 * (1 - 1e-9))
    return [number * step for number in range(math.floor(longest / step + 1e-9) + 1)]


def _number(value: float) -> str:
    return f"{value:.4g}"


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'
    )


def _style() -> str:
    def rules(
        page: str, ink: str, soft: str, grid: str, idle: str, colours: tuple[str, str, str], on: str
    ) -> str:
        fills = "".join(
            f".{letter}{{fill:{colour}}}" for letter, colour in zip("fbw", colours, strict=True)
        )
        return (
            f".page{{fill:{page}}}text{{fill:{ink}}}.soft{{fill:{soft}}}.grid{{stroke:{grid}}}"
            f".idle{{fill:{idle}}}{fills}.on{{fill:{on}}}.on.faint{{fill:{ink}}}"
        )

    shapes = (
        "text{font:12px system-ui,sans-serif}"
        ".title{font-weight:600;font-size:13px}.soft,.on{font-size:11px}"
        "rect.faint{fill-opacity:.42}.grid{stroke-width:1}"
    )
    light = rules(
        page="#fdfdfc",
        ink="#1b1e22",
        soft="#5a626b",
        grid="#e4e5e3",
        idle="#f1f2f0",
        colours=("#0067a6", "#cb4e0c", "#008260"),
        on="#ffffff",
    )
    dark = rules(
        page="#15171a",
        ink="#e8eaec",
        soft="#a2abb4",
        grid="#2e3338",
        idle="#1f2226",
        colours=("#4fa8e0", "#ff8a4c", "#2fc79b"),
        on="#15171a",
    )
    return f"<style>{shapes}{light}@media(prefers-color-scheme:dark){{{dark}}}</style>"
