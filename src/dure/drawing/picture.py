"""Result of a drawing: an SVG, and the same picture as lines of a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

STYLES = {
    "f": "bright_blue",
    "b": "dark_orange",
    "w": "green3",
    "c": "medium_purple1",
    "s": "gold3",
    "idle": "grey50",
    "soft": "grey58",
    "title": "bold",
}
"""Colours of a terminal, by the classes of `dure.drawing.svg`."""


class StyledText(NamedTuple):
    """Text of a terminal, with a class of `STYLES`; "" is plain text."""

    text: str
    kind: str = ""


TerminalLine = Sequence[StyledText]


@dataclass(frozen=True)
class Picture:
    """Picture of an idea.

    svg: a complete SVG file. lines: the picture for a terminal, readable without colours.
    """

    svg: str
    lines: tuple[TerminalLine, ...]

    def text(self) -> str:
        """Return the lines without colours."""
        return "".join(f"{''.join(part.text for part in line).rstrip()}\n" for line in self.lines)


def line(*parts: str | StyledText) -> list[StyledText]:
    """Return a line of plain and styled texts."""
    return [part if isinstance(part, StyledText) else StyledText(part) for part in parts]


def heading(title: str, figures: str) -> list[TerminalLine]:
    """Return the first lines of a picture: its title, its figures, an empty line."""
    return [line(StyledText(title, "title")), line(StyledText(figures, "soft")), line()]


def text_table(rows: Iterable[Sequence[str]]) -> list[TerminalLine]:
    """Return a table whose first row is its head; the first column is aligned to the left."""
    cells = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines: list[TerminalLine] = []
    for number, row in enumerate(cells):
        first, *rest = (
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append(line(StyledText("   ".join([first, *rest]), "soft" if number == 0 else "")))
    return lines
