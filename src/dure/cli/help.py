"""Help in groups: flags of the system, the task, the world, the limits, the run, the output.

The lines are tyro's own help for a dataclass. Flags that do not apply to the named system or task
are left out of the help, but still parsed, so that using them gives an explanatory error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Callable, Collection, Mapping
from typing import Any

TITLES = {
    "strategy": "system",
    "named": "world",
    "how": "run",
    "hears": "output",
}
"""Titles of parts of the flags, if they differ from the part's name."""

OUTPUT = ("evaluate_every", "checkpoint_every", "label", "out", "json", "track")
"""Options of a run that concern its output."""

_ORDER = ("system", "task", "world", "limits", "run", "picture", "output")


def grouped(
    parts: Mapping[str, type[Any]],
    hidden: Collection[str],
    help_of: Callable[[type[Any], Collection[str]], str],
) -> str:
    """Return the help of all groups, in sequence.

    parts: dataclasses by the names of their parts. hidden: fields that do not apply. help_of:
    function that returns tyro's help of a dataclass without some fields.
    """
    texts: dict[str, list[str]] = {}
    for part, kind in parts.items():
        names = {field.name for field in dataclasses.fields(kind)}
        title = TITLES.get(part, part)
        output = names & set(OUTPUT) if title == "run" else set()
        for heading, shown in ((title, names - output), ("output", output)):
            if shown - set(hidden):
                left_out = {*hidden, *(names - shown)}
                texts.setdefault(heading, []).append(_box(help_of(kind, left_out), heading))
    others = [heading for heading in texts if heading not in _ORDER]
    return "".join(text for heading in (*_ORDER, *others) for text in texts.get(heading, ()))


def _box(text: str, heading: str) -> str:
    """Return the flags of a help text under their heading, without --help itself."""
    lines = [line.rstrip(" │|").lstrip("│|") for line in text.splitlines()]
    # tyro draws a box or, without Unicode, a rule below the heading: both are removed.
    first = next(place for place, line in enumerate(lines) if "-h, --help" in line)
    flags = [line for line in lines[first + 1 :] if line.strip(" ╰─╯+-")]
    return "\n".join([heading, *flags, "", ""])


def captured(program: Callable[[], Any]) -> str:
    """Return the standard output of a program until it exits."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        program()
    return said.getvalue()
