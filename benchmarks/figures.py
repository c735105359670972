"""Figures of the benchmarks as plain SVG: curves and bars, on linear and logarithmic axes.

    curves = [Curve("ring", x, y)]
    panel = lines("Loss against bytes", curves, Axis("bytes", log=True), Axis("loss"))
    save(path, "Title", panel)
    save(path, "Title", [panel, bars(...)], columns=2)

A figure is one panel, or several next to each other. Colours are the report's and follow the
reader's light or dark scheme. On request every curve also has a mark or dashes of its own, so that
it can be recognised without colours.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from xml.sax.saxutils import escape

LIGHT = ["#0067a6", "#cb4e0c", "#008260", "#aa457f", "#9a6c00", "#2b93c9", "#5b4fb3", "#3b3f45"]
DARK = ["#4fa8e0", "#ff8a4c", "#2fc79b", "#e58bbe", "#e6b93c", "#9bd8f7", "#a79bf2", "#d5d8dc"]
NEUTRAL = 7
"""The colour of what the others are compared with."""

WIDTH = 520
HEIGHT = 340
_TOP = 30
_BOTTOM = 48
_RIGHT = 18
_ROW = 17
_CHARACTER = 6.4
"""Height of a line of the legend, and width of a character of it, in pixels."""


@dataclass(frozen=True)
class Axis:
    """title: with the unit. log: decades. low, high: limits; None takes the data's. short:
    20,000,000 as 20M."""

    title: str = ""
    log: bool = False
    low: float | None = None
    high: float | None = None
    short: bool = False


@dataclass(frozen=True)
class Curve:
    """name: for the legend, "" leaves it out. marks: a dot a point. colour: 0 to 7; None is the
    next one. Points that are None or not finite, or not positive on a logarithmic axis, interrupt
    the curve."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    dashed: bool = False
    marks: bool = False
    colour: int | None = None


@dataclass(frozen=True)
class Panel:
    """A drawn part of a figure: elements, and its size in pixels."""

    content: str
    width: float
    height: float


@dataclass(frozen=True)
class Scale:
    """Numbers to pixels: `low` lies at `start`, `high` at `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def __call__(self, value: float) -> float:
        low = self.low
        high = self.high
        if self.log:
            low, high, value = map(math.log10, (low, high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def shows(self, value: float | None) -> bool:
        return value is not None and math.isfinite(value) and (value > 0 or not self.log)

    def ticks(self) -> list[float]:
        if self.log:
            return _decades(self.low, self.high)
        step = _round_step((self.high - self.low) / 5)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _decades(low: float, high: float) -> list[float]:
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = max(1, len(exponents) // 7)
    marks = (1, 2, 5) if len(exponents) <= 3 else (1,)
    ticks = []
    for exponent in exponents:
        if exponent % every == 0:
            ticks += [mark * 10.0**exponent for mark in marks]
    return [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]


def _round_step(step: float) -> float:
    power: float = 10.0 ** math.floor(math.log10(step))
    return next(nice * power for nice in (1, 2, 2.5, 5, 10) if nice * power >= step * (1 - 1e-9))


def number(value: float, short: bool = False) -> str:
    """A number as people read it: 0.05, 1,200; if `short` 20k, 3.5M, 1G."""
    if short:
        for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= limit:
                return f"{value / limit:.4g}{letter}"
    if value and (abs(value) >= 1e7 or abs(value) < 1e-4):
        return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    return f"{round(value, 6):,.10g}"


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _limits(axis: Axis, values: Iterable[float], pad: float) -> tuple[float, float]:
    """The axis's ends: what it says, otherwise the data with a little room."""
    shown = [value for value in values if math.isfinite(value) and (value > 0 or not axis.log)]
    low = min(shown, default=1.0)
    high = max(shown, default=1.0)
    if axis.log:
        room = (high / low) ** pad if high > low else 2.0
        low /= room
        high *= room
    else:
        room = (high - low) * pad if high > low else abs(high) or 1.0
        low = low if low == 0 else low - room
        high += room
    return (low if axis.low is None else axis.low), (high if axis.high is None else axis.high)


def _text(
    x: float, y: float, text: str, anchor: str = "start", kind: str = "", turn: bool = False
) -> str:
    turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
    at = f'x="{x:.1f}" y="{y:.1f}"'
    return f'<text {at} text-anchor="{anchor}" class="{kind}"{turned}>{escape(text)}</text>'


def _stroke(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _legend(
    names: Sequence[tuple[str, int, bool]], left: float, top: float, width: float, box: bool
) -> list[str]:
    """Rows of (name, colour, dashed); their number is `_rows` of the names."""
    parts = []
    x = left
    y = top
    for name, colour, dashed in names:
        needed = 30 + _CHARACTER * len(name)
        if x > left and x + needed > left + width:
            x = left
            y += _ROW
        if box:
            parts.append(
                f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="16" height="10" class="f{colour}"/>'
            )
        else:
            parts.append(_stroke(x, y - 4, x + 18, y - 4, f"s{colour}{' dash' if dashed else ''}"))
        parts.append(_text(x + 23, y, name, kind="key"))
        x += needed + 12
    return parts


def _rows(names: Sequence[str], width: float) -> int:
    rows = 1
    x = 0.0
    for name in names:
        needed = 30 + _CHARACTER * len(name)
        if x and x + needed > width:
            rows += 1
            x = 0.0
        x += needed + 12
    return rows if names else 0


def lines(
    title: str,
    curves: Sequence[Curve],
    x: Axis,
    y: Axis,
    width: float = WIDTH,
    height: float = HEIGHT,
) -> Panel:
    """Curves in one frame, with a legend above it."""
    coloured = [(curve, _next(curve.colour, position)) for position, curve in enumerate(curves)]
    named = [(curve.name, colour, curve.dashed) for curve, colour in coloured if curve.name]
    left = 64.0
    top = _TOP + _ROW * _rows([name for name, _, _ in named], width - left - _RIGHT) + 6
    height += top - _TOP
    xs = chain.from_iterable(curve.x for curve in curves)
    ys = chain.from_iterable(curve.y for curve in curves)
    across = Scale(*_limits(x, xs, 0.0), left, width - _RIGHT, x.log)
    up = Scale(*_limits(y, _present(ys), 0.05), height - _BOTTOM, top, y.log)
    parts = [
        _text(left, 18, title, kind="title"),
        *_legend(named, left, _TOP + 10, width - left - _RIGHT, False),
    ]
    for tick in up.ticks():
        parts.append(_stroke(left, up(tick), width - _RIGHT, up(tick), "grid"))
        parts.append(_text(left - 7, up(tick) + 4, number(tick, y.short), "end", "soft"))
    for tick in across.ticks():
        parts.append(_stroke(across(tick), top, across(tick), height - _BOTTOM, "grid"))
        parts.append(
            _text(across(tick), height - _BOTTOM + 16, number(tick, x.short), "middle", "soft")
        )
    parts.append(_text((left + width - _RIGHT) / 2, height - 12, x.title, "middle", "soft"))
    parts.append(_text(15, (top + height - _BOTTOM) / 2, y.title, "middle", "soft", turn=True))
    clip = f"c{zlib.crc32(repr((title, curves)).encode())}"
    parts.append(
        f'<clipPath id="{clip}"><rect x="{left - 4}" y="{top - 4}" '
        f'width="{width - _RIGHT - left + 8}" height="{height - _BOTTOM - top + 8}"/></clipPath>'
        f'<g clip-path="url(#{clip})">'
    )
    for curve, colour in coloured:
        parts.extend(_drawn(curve, colour, across, up))
    return Panel("\n".join([*parts, "</g>"]), width, height)


def _next(colour: int | None, position: int) -> int:
    return position % len(LIGHT) if colour is None else colour


def _drawn(curve: Curve, colour: int, across: Scale, up: Scale) -> list[str]:
    pieces: list[list[str]] = [[]]
    for x, y in zip(curve.x, curve.y, strict=True):
        if y is None or not (across.shows(x) and up.shows(y)):
            pieces.append([])
        else:
            pieces[-1].append(f"{across(x):.1f},{up(y):.1f}")
    kind = f"s{colour}{' dash' if curve.dashed else ''}"
    parts = []
    dots: list[str] = []
    for piece in pieces:
        if len(piece) > 1:
            parts.append(f'<polyline points="{" ".join(piece)}" class="{kind}"/>')
        if curve.marks or len(piece) == 1:
            dots += piece
    for point in dots:
        cx, cy = point.split(",")
        parts.append(f'<circle cx="{cx}" cy="{cy}" r="3.2" class="f{colour}"/>')
    return parts


def bars(
    title: str,
    rows: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    x: Axis,
    stacked: bool = False,
    width: float = WIDTH,
) -> Panel:
    """Horizontal bars: for each of `rows` one of each series, side by side or `stacked`.

    None has no bar. The values stand at the ends of the bars (of a stack their sum). A single
    series needs no legend and may be named "".
    """
    left = 26 + 6.9 * max(map(len, rows))
    named = [(name, position % len(LIGHT), False) for position, name in enumerate(series) if name]
    top = _TOP + _ROW * _rows([name for name, _, _ in named], width - 34) + 4
    thick = 15 if stacked or len(series) == 1 else 11
    slot = thick + 9 if stacked else thick * len(series) + 9
    height = top + slot * len(rows) + _BOTTOM
    if stacked:
        totals = [sum(_present(amounts)) for amounts in zip(*series.values(), strict=True)]
    else:
        totals = _present(chain.from_iterable(series.values()))
    low, high = _limits(x, totals, 0.05)
    low = low if x.log or x.low is not None else min(0.0, *totals)
    across = Scale(low, high, left, width - _RIGHT - 46, x.log)
    parts = [_text(16, 18, title, kind="title"), *_legend(named, 16, _TOP + 10, width - 34, True)]
    for tick in across.ticks():
        parts.append(_stroke(across(tick), top, across(tick), height - _BOTTOM, "grid"))
        parts.append(
            _text(across(tick), height - _BOTTOM + 16, number(tick, x.short), "middle", "soft")
        )
    parts.append(_text((left + width - _RIGHT) / 2, height - 12, x.title, "middle", "soft"))
    base = low if x.log else max(low, 0.0)
    for i, row in enumerate(rows):
        y = top + 4 + slot * i
        start = base
        parts.append(_text(left - 8, y + (slot - 9) / 2 + 4, row, "end", "key"))
        for position, amounts in enumerate(series.values()):
            amount = amounts[i]
            if amount is not None:
                end = start + amount if stacked else amount
                parts.append(_bar(across(start), across(end), y, thick, position % len(LIGHT)))
                if not stacked:
                    parts.append(_behind(across(max(end, base)), y + thick, amount, x))
                start = end if stacked else base
            y += 0 if stacked else thick
        if stacked:
            parts.append(_behind(across(start), y + thick - 1, start, x))
    return Panel("\n".join(parts), width, height)


def _bar(x1: float, x2: float, y: float, thick: float, colour: int) -> str:
    left = min(x1, x2)
    length = abs(x2 - x1)
    size = f'width="{length:.1f}" height="{thick - 1}"'
    return f'<rect x="{left:.1f}" y="{y:.1f}" {size} class="f{colour}"/>'


def _behind(x: float, y: float, value: float, axis: Axis) -> str:
    return _text(x + 4, y - 2, number(float(f"{value:.3g}"), axis.short), kind="value")


def _style() -> str:
    def rules(page: str, ink: str, soft: str, grid: str, colours: Sequence[str]) -> str:
        series = "".join(f".s{i}{{stroke:{c}}}.f{i}{{fill:{c}}}" for i, c in enumerate(colours))
        texts = f"text{{fill:{ink}}}.soft,.value{{fill:{soft}}}"
        return f".page{{fill:{page}}}{texts}.grid{{stroke:{grid}}}{series}"

    shapes = (
        "text{font:12px "
        "system-ui,sans-serif}.title{font-weight:600;font-size:13px}.head{font-weight:600;"
        "font-size:15px}.soft{font-size:11px}.value{font-size:10px}.grid{stroke-width:1}"
        "polyline,line[class^=s]{fill:none;stroke-width:1.8;stroke-linejoin:round}"
        ".dash{stroke-dasharray:5 4}"
    )
    light = rules("#fdfdfc", "#1b1e22", "#5a626b", "#e4e5e3", LIGHT)
    dark = rules("#15171a", "#e8eaec", "#a2abb4", "#2e3338", DARK)
    return f"<style>{shapes}{light}@media(prefers-color-scheme:dark){{{dark}}}</style>"


def save(path: Path | str, title: str, panels: Panel | Sequence[Panel], columns: int = 2) -> None:
    """Writes the figure: `panels` in rows of `columns`. `title` is above them and is what a screen
    reader says."""
    panels = [panels] if isinstance(panels, Panel) else list(panels)
    rows = [panels[start : start + columns] for start in range(0, len(panels), columns)]
    width = 0.0
    tops = [34.0]
    for row in rows:
        width = max(width, sum(panel.width for panel in row))
        tops.append(tops[-1] + max(panel.height for panel in row) + 8)
    parts = [_text(16, 22, title, kind="head")]
    for row, (top, _) in zip(rows, pairwise(tops), strict=True):
        x = 0.0
        for panel in row:
            parts.append(f'<g transform="translate({x:.0f} {top:.0f})">\n{panel.content}\n</g>')
            x += panel.width
    size = f'viewBox="0 0 {width:.0f} {tops[-1]:.0f}" width="{width:.0f}" height="{tops[-1]:.0f}"'
    content = "\n".join(parts)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">\n'
        f"{_style()}\n"
        f'<rect width="100%" height="100%" class="page"/>\n{content}\n</svg>\n'
    )
