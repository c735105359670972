"""`dure draw SUBJECT ...`: pictures of schedules, collectives and systems."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dure.cli.flags import names_before_flags, parse_flags
from dure.errors import suggestion

if TYPE_CHECKING:
    from dure.drawing.picture import Picture, TerminalLine


@dataclass(frozen=True)
class PictureOptions:
    """Output of a picture.

    Args:
        out: an SVG file; by default the picture is printed in the terminal.
    """

    out: Path | None = None


@dataclass(frozen=True)
class PipelineDrawing:
    """Numbers of a pipeline.

    Args:
        schedule: schedules, each in a row of pictures: naive, gpipe, 1f1b, interleaved,
            zero-bubble, zero-bubble-v.
        ranks: number of ranks.
        microbatches: micro-batches of a batch; naive sends them as a single one.
        stages_per_rank: stages of each rank, for interleaved alone; by default 2.
        forward: time of a forward of a micro-batch in the layers of a rank.
        backward: time of its backward.
        message: time until a message arrives.
    """

    schedule: tuple[str, ...] = ("gpipe",)
    ranks: int = 4
    microbatches: int = 8
    stages_per_rank: int | None = None
    forward: float = 1.0
    backward: float = 2.0
    message: float = 0.0


@dataclass(frozen=True)
class AllReduceDrawing:
    """Numbers of an all-reduce.

    Args:
        ranks: number of ranks.
        hosts: number of hosts, for hierarchical alone; by default 2.
    """

    ranks: int = 4
    hosts: int | None = None


class Subject(NamedTuple):
    """Subject of a picture.

    summary: a line for the help. options: flags. draw: function of the names after the subject, of
    the flags, and of the columns of the terminal. names: the names that may follow.
    """

    summary: str
    options: type[Any]
    draw: Callable[[Sequence[str], Any, int], Picture]
    names: tuple[str, ...] = ()


def _pipeline(names: Sequence[str], how: PipelineDrawing, width: int) -> Picture:
    if not how.schedule:
        raise ValueError("--schedule names no schedule: give at least one")
    if how.stages_per_rank is not None and "interleaved" not in how.schedule:
        raise ValueError(
            "--stages-per-rank is for the interleaved schedule alone: add --schedule interleaved, "
            "or leave it out"
        )
    from dure.drawing.pipeline import pipeline_picture

    return pipeline_picture(
        how.schedule,
        how.ranks,
        how.microbatches,
        _or(how.stages_per_rank, 2),
        how.forward,
        how.backward,
        how.message,
        width,
    )


def _all_reduce(names: Sequence[str], how: AllReduceDrawing, width: int) -> Picture:
    algorithm = names[0].replace("-", "_")
    if how.hosts is not None and algorithm != "hierarchical":
        raise ValueError(f"--hosts is for hierarchical alone, not for {names[0]}: leave it out")
    from dure.drawing.all_reduce import all_reduce_picture

    return all_reduce_picture(algorithm, how.ranks, _or(how.hosts, 2))


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


SUBJECTS: dict[str, Subject] = {
    "pipeline": Subject(
        "the slots of each rank in a schedule, and its idle time", PipelineDrawing, _pipeline
    ),
    "all-reduce": Subject(
        "the messages of an all-reduce, step by step",
        AllReduceDrawing,
        _all_reduce,
        ("ring", "one-shot", "master", "tree", "halving-doubling", "hierarchical"),
    ),
}
"""Subjects by name."""


def usage() -> str:
    """Return the text of `dure draw --help`."""
    lines = [
        "usage: dure draw SUBJECT [NAME] [options]",
        "",
        "Draw an idea by running the code that implements it, in the terminal.",
        "--out FILE.svg writes an SVG file instead.",
        "`dure draw SUBJECT --help` lists the options of a subject.",
        "",
    ]
    for name, subject in SUBJECTS.items():
        lines.append(f"  {name:<18} {subject.summary}")
        if subject.names:
            lines.append(f"  {'':<18} NAME: {', '.join(subject.names)}")
    return "\n".join(lines) + "\n"


def main(given: list[str]) -> int:
    """Draw a subject."""
    names, flags = names_before_flags(given)
    if not names:
        if flags in (["--help"], ["-h"]):
            print(usage(), end="")
            return 0
        raise ValueError(f"dure draw SUBJECT: name a subject: {', '.join(SUBJECTS)}")
    name, *rest = names
    if name not in SUBJECTS:
        raise ValueError(f"there is no picture of {name!r}{suggestion(name, SUBJECTS)}")
    subject = SUBJECTS[name]
    _check_names(name, subject, rest, asks=flags in (["--help"], ["-h"]))
    shown = f"dure draw {name}{' NAME' if subject.names else ''}"
    asked = parse_flags(
        shown,
        {"picture": subject.options, "hears": PictureOptions},
        flags,
        f"Draw {subject.summary}.",
    )
    out: Path | None = asked["hears"].out
    if out is not None and out.suffix != ".svg":
        raise ValueError(f"--out is {out}, but pictures are SVG files: use a name NAME.svg")
    from rich.console import Console

    console = Console(highlight=False)
    width = console.width if console.is_terminal else 100
    picture = subject.draw(rest, asked["picture"], max(width, 40))
    if out is not None:
        out.write_text(picture.svg, encoding="utf-8")
        print(f"picture: {out}", file=sys.stderr)
    elif console.is_terminal:
        _print_styled(console, picture.lines)
    else:
        print(picture.text(), end="")
    return 0


def _check_names(name: str, subject: Subject, rest: Sequence[str], asks: bool) -> None:
    """Raise ValueError for names after the subject that it does not have."""
    if asks and not rest:
        return
    if not subject.names:
        if rest:
            raise ValueError(f"dure draw {name} takes options alone, and no name {rest[0]!r}")
        return
    if len(rest) != 1:
        raise ValueError(f"dure draw {name} NAME: give one name of {', '.join(subject.names)}")
    if rest[0].replace("_", "-") not in subject.names:
        raise ValueError(
            f"there is no picture of {name} {rest[0]!r}{suggestion(rest[0], subject.names)}"
        )


def _print_styled(console: Any, lines: Sequence[TerminalLine]) -> None:
    from rich.text import Text

    from dure.drawing.picture import STYLES

    for line in lines:
        text = Text.assemble(*((part.text, STYLES.get(part.kind, "")) for part in line))
        console.print(text, soft_wrap=True)
