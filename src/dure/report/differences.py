"""Settings in which the runs of a report differ: a row a run, a column a setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dure.report.document import section
from dure.report.formatting import UNKNOWN, count, escape
from dure.report.html_fragments import swatch
from dure.report.repeat_command import setting_text
from dure.report.runs import ReportedRun

_NO_SETTINGS = ("label", "run", "partition", "classes", "command", "versions", "parameters")
"""Keys of config.json that are no settings: results, and values unique to each run."""

_MOST = 24
"""Most columns of the table."""


def differences(runs: Sequence[ReportedRun]) -> str:
    """Return the section; empty if the runs do not differ."""
    settings = [_flat(run.config) for run in runs]
    columns = _differing(settings)
    if not columns:
        return ""
    shown = columns[:_MOST]
    heads = "".join(f'<th scope="col" class="text">{escape(_named(name))}</th>' for name in shown)
    rows = ""
    for place, (run, own) in enumerate(zip(runs, settings, strict=True)):
        who = f"<div>{swatch(place)}<span>{escape(run.label)}</span></div>"
        cells = "".join(f'<td class="text">{_written(own, name)}</td>' for name in shown)
        rows += f'<tr><th scope="row">{who}</th>{cells}</tr>'
    body = (
        '<div class="scroll" role="region" aria-labelledby="differences" tabindex="0"><table>'
        f'<thead><tr><th scope="col">run</th>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
    same = {name for own in settings for name in own} - set(columns)
    lead = f"Settings in which the runs differ; {count(len(same))} others are the same in all."
    if len(shown) < len(columns):
        lead += f" The first {len(shown)} of {len(columns)} are shown."
    return section("differences", "What differs", lead, body)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by their path in config.json, such as strategy.batch_size."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if name in _NO_SETTINGS:
            continue
        if isinstance(value, dict):
            found.update({f"{name}.{inner}": one for inner, one in value.items()})
        else:
            found[name] = value
    return found


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of settings that differ between runs, or are missing in some."""
    names = dict.fromkeys(name for own in settings for name in own)
    return [name for name in names if len({_text(own, name) for own in settings}) > 1]


def _text(own: Mapping[str, Any], name: str) -> str | None:
    """Return the text to compare; None for null, which counts as not set."""
    return setting_text(own.get(name))


def _written(own: Mapping[str, Any], name: str) -> str:
    text = _text(own, name)
    return UNKNOWN if text is None else escape(text)


def _named(name: str) -> str:
    # "strategy.name" becomes "system", "strategy.batch_size" becomes "batch size".
    room, _, field = name.partition(".")
    if field == "name":
        return "system" if room == "strategy" else room
    return (field or room).replace("_", " ")
