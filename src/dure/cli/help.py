"""Help in groups: what belongs to the system, the task, the world, the limits, the run, the output.

The lines are tyro's own, in which it tells of a dataclass. What does not apply to what was named is
left out: it is still understood, so that whoever gives it is told why it is no use.
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
"""What a part of the flags is called, where its name is another."""

OUTPUT = ("evaluate_every", "checkpoint_every", "label", "out", "json", "track")
"""Of how to run: what is written, and when."""

_ORDER = ("system", "task", "world", "limits", "run", "output")


def grouped(
    parts: Mapping[str, type[Any]],
    hidden: Collection[str],
    help_of: Callable[[type[Any], Collection[str]], str],
) -> str:
    """The flags of all groups, one below the other.

    parts: dataclasses by the names of their parts. hidden: fields that do not apply. help_of: the
    help of a dataclass without some fields, as tyro has it.
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
    """The flags of a help text under their heading, without the flag that asked for it."""
    lines = [line.rstrip(" │|").lstrip("│|") for line in text.splitlines()]
    # tyro draws a box where it can, and a rule below the heading where it cannot: neither is kept.
    first = next(place for place, line in enumerate(lines) if "-h, --help" in line)
    flags = [line for line in lines[first + 1 :] if line.strip(" ╰─╯+-")]
    return "\n".join([heading, *flags, "", ""])


def captured(program: Callable[[], Any]) -> str:
    """What a program prints before it exits."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        program()
    return said.getvalue()
