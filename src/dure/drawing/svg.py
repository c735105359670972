"""SVG pictures with one look: a title, a line of figures, a legend, the drawing, a caption.

A picture has a ground of its own and follows the reader's light or dark scheme. A colour has one
meaning in all pictures, by the class of its element:

    f  compute, forward       b  compute, backward or input gradient     w  weight gradient
    c  communication          idle  a rank waits                         s  server, or stored state
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.sax.saxutils import escape

WIDTH = 960
MARGIN = 24
CHARACTER = 6.3
"""Mean width of a letter of 12 pixels."""

_LIGHT = {
    "page": "#fdfdfc",
    "ink": "#1b1e22",
    "soft": "#5a626b",
    "grid": "#d9dcd8",
    "idle": "#f1f2f0",
    "hatch": "#b9bfc4",
    "card": "#f5f6f4",
    "f": "#0067a6",
    "b": "#cb4e0c",
    "w": "#008260",
    "c": "#7a4fb3",
    "s": "#8a6a00",
    "on": "#ffffff",
}
_DARK = {
    "page": "#15171a",
    "ink": "#e8eaec",
    "soft": "#a2abb4",
    "grid": "#353b41",
    "idle": "#1f2226",
    "hatch": "#4d555d",
    "card": "#1d2024",
    "f": "#4fa8e0",
    "b": "#ff8a4c",
    "w": "#2fc79b",
    "c": "#b795ee",
    "s": "#e0b93c",
    "on": "#15171a",
}
_SHAPES = (
    "text{font:12px system-ui,-apple-system,'Segoe UI',sans-serif}"
    ".heading{font-size:18px;font-weight:650}.title{font-weight:600;font-size:13px}"
    ".soft,.on{font-size:11px}.strong{font-weight:600}.small{font-size:10px}"
    "rect.faint{fill-opacity:.42}.grid{stroke-width:1}"
    ".line{fill:none;stroke-width:1.6}.dash{stroke-dasharray:4 3}"
)

Entry = tuple[str, str]
"""Entry of a legend: class of the box, and text."""


def _rules(colours: dict[str, str]) -> str:
    ink = colours["ink"]
    fills = "".join(f".{name}{{fill:{colours[name]}}}" for name in ("f", "b", "w", "c", "s"))
    strokes = "".join(
        f".line.{name}{{fill:none;stroke:{colours[name]}}}.tip-{name}{{fill:{colours[name]}}}"
        for name in ("f", "b", "w", "c", "s")
    )
    return (
        f".page{{fill:{colours['page']}}}text{{fill:{ink}}}.soft{{fill:{colours['soft']}}}"
        f".grid{{stroke:{colours['grid']}}}.idle{{fill:url(#idle)}}.ground{{fill:{colours['idle']}}}"
        f".hatch{{stroke:{colours['hatch']}}}"
        f".card{{fill:{colours['card']};stroke:{colours['grid']}}}{fills}{strokes}"
        f".chunk{{fill:{colours['page']};stroke:{colours['hatch']}}}"
        f".leaving{{stroke:{colours['c']};stroke-width:2}}.given{{stroke-dasharray:3 2}}"
        f".label{{fill:{colours['card']}}}.carried{{fill:{colours['c']};font-weight:700}}"
        f".edge{{fill:none;stroke:{colours['soft']}}}"
        f".on{{fill:{colours['on']}}}.on.faint{{fill:{ink}}}"
    )


class SvgCanvas:
    """Drawing of a picture. Lengths are pixels, and y grows downwards.

    The classes of elements are in the module's docstring; text has also the classes "soft",
    "title", "strong", "small" and "on" (on a filled box).
    """

    def __init__(self) -> None:
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """Draw a line of text, whose base line is at y."""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{_class(kind)}>'
            f"{escape(text)}</text>"
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        kind: str,
        *,
        label: str = "",
        hint: str = "",
        round_by: float = 2,
    ) -> None:
        """Draw a rectangle, with a label in its middle if the label fits.

        hint: text that a browser shows under the pointer.
        """
        corner = f' rx="{round_by:g}"' if round_by else ""
        parts = (
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}"'
            f"{corner}{_class(kind)}/>"
        )
        if label and width >= CHARACTER * len(label) + 2:
            on = "" if kind.split()[0] in ("idle", "card", "ground", "edge") else "on"
            on += " faint" if "faint" in kind else ""
            parts += (
                f'<text x="{x + width / 2:.1f}" y="{y + height / 2 + 4:.1f}" '
                f'text-anchor="middle"{_class(on.strip())}>{escape(label)}</text>'
            )
        title = f"<title>{escape(hint)}</title>" if hint else ""
        self.parts.append(f"<g>{title}{parts}</g>" if title else parts)

    def line(
        self,
        points: Sequence[tuple[float, float]],
        kind: str = "c",
        *,
        arrow: bool = True,
        dashed: bool = False,
        bend: float = 0.0,
    ) -> None:
        """Draw a line through points, with a head at its end.

        bend: distance by which a line between two points bulges to its left.
        """
        (x, y), *rest = points
        if bend and len(rest) == 1:
            (to_x, to_y) = rest[0]
            length = max(((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5, 1e-9)
            middle_x = (x + to_x) / 2 + bend * (to_y - y) / length
            middle_y = (y + to_y) / 2 - bend * (to_x - x) / length
            path = f"M{x:.1f} {y:.1f}Q{middle_x:.1f} {middle_y:.1f} {to_x:.1f} {to_y:.1f}"
        else:
            path = f"M{x:.1f} {y:.1f}" + "".join(f"L{px:.1f} {py:.1f}" for px, py in rest)
        head = f' marker-end="url(#tip-{kind})"' if arrow else ""
        self.parts.append(f'<path d="{path}" class="line {kind}{" dash" * dashed}"{head}/>')

    def rule(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Draw a thin line of a grid."""
        self.parts.append(
            f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" class="grid"/>'
        )

    def embed(self, svg: str, y: float) -> float:
        """Draw another SVG without styles at y, in the full width; return its height."""
        height = re.search(r'height="(\d+)"', svg)
        if height is None:
            raise ValueError("the SVG to embed has no height")
        self.parts.append(svg.replace("<svg ", f'<svg y="{y:.1f}" ', 1).rstrip("\n"))
        return float(height[1])


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def svg_page(
    title: str,
    figures: str,
    legend: Sequence[Entry],
    drawing: SvgCanvas,
    height: float,
    caption: Sequence[str] = (),
) -> str:
    """Return the SVG of a picture.

    Args:
        title: title of the picture, and its description for screen readers.
        figures: line below the title.
        legend: boxes with their meanings.
        drawing: canvas, whose top is below the legend.
        height: height of the drawing in pixels.
        caption: lines below the drawing.
    """
    top = SvgCanvas()
    top.text(MARGIN, 34, title, "heading")
    top.text(MARGIN, 55, figures, "soft")
    y = 68.0
    if legend:
        _legend(top, legend, y)
        y += 26
    bottom = SvgCanvas()
    for number, line in enumerate(caption):
        bottom.text(MARGIN, y + height + 20 + 16 * number, line, "soft")
    total = y + height + (16 * len(caption) + 14 if caption else 10)
    tips = "".join(
        f'<marker id="tip-{kind}" markerWidth="9" markerHeight="8" refX="7" refY="4" '
        f'orient="auto" markerUnits="userSpaceOnUse"><path d="M0 0L8 4L0 8z" '
        f'class="tip-{kind}"/></marker>'
        for kind in ("f", "b", "w", "c", "s")
    )
    hatch = (
        '<pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="6" height="6" class="ground"/>'
        '<path d="M0 0V6" class="hatch"/></pattern>'
    )
    style = f"{_SHAPES}{_rules(_LIGHT)}@media(prefers-color-scheme:dark){{{_rules(_DARK)}}}"
    label = escape(f"{title}. {figures}", {'"': "&quot;"})
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total:.0f}" '
            f'width="{WIDTH}" height="{total:.0f}" role="img" aria-label="{label}">',
            f"<style>{style}</style>",
            f"<defs>{hatch}{tips}</defs>",
            '<rect width="100%" height="100%" rx="6" class="page"/>',
            *top.parts,
            f'<g transform="translate(0,{y:.0f})">',
            *drawing.parts,
            "</g>",
            *bottom.parts,
            "</svg>",
            "",
        ]
    )


def _legend(canvas: SvgCanvas, entries: Sequence[Entry], y: float) -> None:
    x = float(MARGIN)
    for kind, text in entries:
        if kind:
            canvas.box(x, y, 16, 12, kind)
            x += 22
        canvas.text(x, y + 10, text, "soft")
        x += 24 + CHARACTER * 0.93 * len(text)
