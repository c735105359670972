"""HTML fragments that several sections of the report share: a run's mark, time, pictures."""

from __future__ import annotations

import base64
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from dure.record.untrusted_files import contents
from dure.report.formatting import UNKNOWN, count, duration, escape
from dure.report.json_values import mapping, number
from dure.report.runs import ReportedRun, WorkerTime
from dure.report.translation import recorded, translated


def world(run: ReportedRun) -> str:
    """Return the world of a run, in words."""
    asked = mapping(run.config.get("world"))
    name = str(asked.get("name", UNKNOWN))
    ranks = number(asked.get("ranks", asked.get("threads")))
    # The summary of an ended run has the words; a killed run has only its config.json.
    return recorded(run.result.world or (f"{count(ranks)} {name}" if ranks else name))


def bar(worker: WorkerTime, full: float) -> str:
    """Return a stacked bar. full: seconds of the whole width."""
    # The names are also the classes of the colours in style.css.
    parts = {"compute": worker.compute, "communication": worker.communication, "idle": worker.idle}
    segments = "".join(
        f'<i class="{name}" style="width:{100 * value / full:.2f}%"></i>'
        for name, value in parts.items()
        if value
    )
    text = ", ".join(f"{translated(name)} {duration(value)}" for name, value in parts.items())
    return f'<span class="bar" role="img" aria-label="{text}" title="{text}">{segments}</span>'


def percents(worker: WorkerTime) -> str:
    """Return the shares of computing, sending and waiting, in percent."""
    busy = (value / worker.total for value in (worker.compute, worker.communication))
    shares = [*busy, worker.idle_share or 0.0]
    return " / ".join(f"{100 * share:.0f}" for share in shares) + " %"


def legend(categories: Sequence[str]) -> str:
    """Return the legend of the categories, which begins a section's lead."""
    names = "".join(
        f'<span class="key"><i class="{name}"></i>{translated(name)}</span>' for name in categories
    )
    return f"{names}<br>"


def swatch(index: int) -> str:
    """Return the place of a run's line and marker, which page.js draws as in the charts."""
    return f'<svg class="swatch" data-run="{index}" viewBox="0 0 28 12" aria-hidden="true"></svg>'


def figure_of(name: str, heading: str, note: str = "") -> str:
    """Return the place of a figure that page.js draws."""
    heading, note = translated(heading), translated(note)
    aside = f'<p class="aside">{note}</p>' if note else ""
    chart = f'class="chart" data-figure="{escape(name)}" role="img" aria-label="{heading}"'
    return f"<figure><figcaption><h4>{heading}</h4>{aside}</figcaption><div {chart}></div></figure>"


def grid(shown: Iterable[str]) -> str:
    """Return figures next to each other; empty without figures."""
    inside = "".join(shown)
    return f'<div class="grid">{inside}</div>' if inside else ""


def table(name: str, kind: str, head: Sequence[str], rows: str, texts: Collection[str] = ()) -> str:
    """Return a small table. kind: its width, "narrow" or "long". texts: columns with words."""
    heads = "".join(
        f'<th scope="col"{_TEXT if title in texts else ""}>{translated(title)}</th>'
        for title in head
    )
    inside = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    around = (
        f'class="scroll small {kind}" role="region" aria-label="{translated(name)}" tabindex="0"'
    )
    return f"<div {around}>{inside}</div>"


_TEXT = ' class="text"'


_NAME = re.compile(r"\d{3}\.png")
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_LARGEST = 1_000_000
"""Most bytes of a picture."""


def picture_in(folder: Path, name: object) -> str | None:
    """Return the file as a data URI; None if the folder has no such picture."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return None
    path = folder / name
    try:
        content = contents(path, most=_LARGEST)
    except OSError:
        return None
    if not content.startswith(_SIGNATURE):
        return None
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"
