"""Text that a peer, a folder or a file has chosen, before it is shown or written down.

A name or a reason from outside may hold sequences that move a terminal's cursor or set its title
(CSI, OSC), line breaks that look like lines of a log, marks that reverse the reading order
(U+202E), characters without width, or many accents on one letter. `printable` is the one function
through which such text goes to a terminal, a log, a metric's label or a page.
"""

from __future__ import annotations

import unicodedata

MOST_REASON = 500
"""Characters that are kept of a reason that somebody else gives."""

MOST_MARKS = 4
"""Accents on one letter; with more of them a text covers the lines around it."""

_INVISIBLE = frozenset(
    [*"\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"]
    + [chr(code) for code in range(0x180B, 0x1810)]
    + [chr(code) for code in range(0xFE00, 0xFE10)]
    + [chr(code) for code in range(0xE0100, 0xE01F0)]
)
"""Characters that Python calls printable, and that nobody sees."""


def printable(text: str, most: int | None = None) -> str:
    """Return the text as one line of visible characters.

    Every control or formatting character becomes a space, also line breaks, bidirectional controls
    and unpaired surrogates. most: characters after which the text is cut, which an ellipsis shows.
    """
    if most is not None and len(text) > most:
        text = text[: most - 1] + "…"
    if text.isascii() and text.isprintable():
        return text
    shown: list[str] = []
    marks = 0
    for each in text:
        marks = marks + 1 if unicodedata.category(each) in ("Mn", "Me") else 0
        if marks <= MOST_MARKS:
            shown.append(each if each.isprintable() and each not in _INVISIBLE else " ")
    return "".join(shown)


def one_line(text: str, most: int = MOST_REASON) -> str:
    """Return a reason that somebody else gives as one line, without gaps where lines ended."""
    return " ".join(printable(text, most).split())
