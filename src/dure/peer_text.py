"""Sanitise text that a peer, a folder or a file has chosen, before display or logging.

A name or a reason from outside may contain sequences that move a terminal's cursor or set its title
(CSI, OSC), line breaks that look like lines of a log, marks that reverse the reading order
(U+202E), characters without width, or many accents on a letter. Such text passes through
`printable` on its way to a terminal, a log, a metric's label or a page.
"""

from __future__ import annotations

import unicodedata

MOST_REASON = 500
"""Maximum characters kept of a peer's reason."""

MOST_MARKS = 4
"""Maximum accents on a letter; with more of them a text covers the lines around it."""

_INVISIBLE = frozenset(
    [*"\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"]
    + [chr(code) for code in range(0x180B, 0x1810)]
    + [chr(code) for code in range(0xFE00, 0xFE10)]
    + [chr(code) for code in range(0xE0100, 0xE01F0)]
)
"""Invisible characters that Python classifies as printable."""


def printable(text: str, most: int | None = None) -> str:
    """Return the text as a single line of visible characters.

    Every control or formatting character becomes a space, also line breaks, bidirectional controls
    and unpaired surrogates. most: maximum characters; a longer text is cut and ends in an ellipsis.
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
    """Return a peer's reason as a single line, with gaps and line breaks collapsed."""
    return " ".join(printable(text, most).split())
