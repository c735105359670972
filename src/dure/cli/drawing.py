"""`dure draw SUBJECT ...`: pictures of schedules, collectives and systems."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dure.cli.flags import names_before_flags, parse_flags
from dure.drawing.options import (
    AllReduceDrawing,
    DownpourDrawing,
    FedAvgDrawing,
    ParameterServerDrawing,
    PipelineDrawing,
    SplitDrawing,
    TensorDrawing,
    ZeroDrawing,
)
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


class Subject(NamedTuple):
    """Subject of a picture.

    summary: a line for the help. options: flags. draw: function of the names after the subject, of
    the flags, and of the columns of the terminal. names: the names that may follow. several:
    whether several names may follow.
    """

    summary: str
    options: type[Any]
    draw: Callable[[Sequence[str], Any, int], Picture]
    names: tuple[str, ...] = ()
    several: bool = False


def _pipeline(names: Sequence[str], how: PipelineDrawing, width: int) -> Picture:
    if not how.schedule:
        raise ValueError("--schedule names no schedule: give at least one")
    if how.stages_per_rank is not None and "interleaved" not in how.schedule:
        raise ValueError(
            "--stages-per-rank is for the interleaved schedule alone: add --schedule interleaved, "
            "or leave it out"
        )
    from dure.drawing.pipeline import pipeline_picture

    return pipeline_picture(how, width)


def _all_reduce(names: Sequence[str], how: AllReduceDrawing, width: int) -> Picture:
    algorithm = names[0].replace("-", "_")
    if how.hosts is not None and algorithm != "hierarchical":
        raise ValueError(f"--hosts is for hierarchical alone, not for {names[0]}: leave it out")
    from dure.drawing.all_reduce import all_reduce_picture

    return all_reduce_picture(algorithm, how.ranks, 2 if how.hosts is None else how.hosts)


def _parameter_server(names: Sequence[str], how: ParameterServerDrawing, width: int) -> Picture:
    if not how.staleness:
        raise ValueError("--staleness has no value: give numbers of steps, or none")
    bounds = [_staleness(text) for text in how.staleness]
    from dure.drawing.parameter_server import parameter_server_picture

    return parameter_server_picture(bounds, how, width)


def _staleness(text: str) -> int | None:
    if text.lower() == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"--staleness is {text!r}: give a number of steps, or none for no bound"
        ) from None


def _downpour(names: Sequence[str], how: DownpourDrawing, width: int) -> Picture:
    from dure.drawing.downpour import downpour_picture

    return downpour_picture(how, width)


def _fed_avg(names: Sequence[str], how: FedAvgDrawing, width: int) -> Picture:
    from dure.drawing.fed_avg import fed_avg_picture

    return fed_avg_picture(how, width)


def _split(names: Sequence[str], how: SplitDrawing, width: int) -> Picture:
    from dure.drawing.split import split_picture

    return split_picture(names, how, width)


def _tensor(names: Sequence[str], how: TensorDrawing, width: int) -> Picture:
    from dure.drawing.tensor_parallel import tensor_parallel_picture

    return tensor_parallel_picture(names, how.ranks, how.widths, how.examples)


def _zero(names: Sequence[str], how: ZeroDrawing, width: int) -> Picture:
    from dure.drawing.zero import zero_picture

    return zero_picture(how.parameters, how.ranks, how.optimizer)


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
    "parameter-server": Subject(
        "gradients, messages and waiting of workers under a virtual clock",
        ParameterServerDrawing,
        _parameter_server,
    ),
    "downpour": Subject(
        "replicas that push and fetch beside their computation", DownpourDrawing, _downpour
    ),
    "fed-avg": Subject("rounds of clients with stragglers", FedAvgDrawing, _fed_avg),
    "split": Subject(
        "the parts of a model and the messages of split learning",
        SplitDrawing,
        _split,
        ("vanilla", "peer-to-peer", "u-shaped", "parallel", "split-fed", "vertical"),
        several=True,
    ),
    "tensor": Subject(
        "the divided matrices of a chain of layers, and their collectives",
        TensorDrawing,
        _tensor,
        ("columns", "rows", "alternating"),
        several=True,
    ),
    "zero": Subject("what each rank holds in each stage of ZeRO", ZeroDrawing, _zero),
}
"""Subjects by name."""


def usage() -> str:
    """Return the text of `dure draw --help`."""
    lines = [
        "usage: dure draw SUBJECT [NAME ...] [options]",
        "",
        "Draw an idea by running the code that implements it, in the terminal.",
        "--out FILE.svg writes an SVG file instead.",
        "`dure draw SUBJECT --help` lists the options of a subject.",
        "",
    ]
    for name, subject in SUBJECTS.items():
        lines.append(f"  {name:<18} {subject.summary}")
        if subject.names:
            many = "NAME ..." if subject.several else "NAME"
            lines.append(f"  {'':<18} {many}: {', '.join(subject.names)}")
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
    shown = f"dure draw {name}{' NAME' * bool(subject.names)}{' ...' * subject.several}"
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
    rest = [one.replace("_", "-") for one in rest]
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
    if not rest or (len(rest) > 1 and not subject.several):
        raise ValueError(f"dure draw {name} NAME: give one name of {', '.join(subject.names)}")
    for one in rest:
        if one.replace("_", "-") not in subject.names:
            raise ValueError(
                f"there is no picture of {name} {one!r}{suggestion(one, subject.names)}"
            )


def _print_styled(console: Any, lines: Sequence[TerminalLine]) -> None:
    from rich.text import Text

    from dure.drawing.picture import STYLES

    for line in lines:
        text = Text.assemble(*((part.text, STYLES.get(part.kind, "")) for part in line))
        console.print(text, soft_wrap=True)
