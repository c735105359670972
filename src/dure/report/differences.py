"""Settings in which comparable runs of a report differ: a row a run, a column a setting.

A setting is compared between the runs that have it. A setting that only some systems have, with the
same value in all of them, tells systems apart and not runs: it is in a second, folded table, with
the settings beyond the most columns of the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dure.report.document import section
from dure.report.formatting import UNKNOWN, count, escape, plural
from dure.report.html_fragments import swatch
from dure.report.repeat_command import setting_text
from dure.report.runs import ReportedRun
from dure.report.translation import translated

_NO_SETTINGS = ("label", "run", "partition", "classes", "command", "versions", "parameters")
"""Keys of config.json that are no settings: results, and values unique to each run."""

_MOST = 24
"""Most columns of the table."""


def differences(runs: Sequence[ReportedRun]) -> str:
    """Return the section; empty if the runs do not differ."""
    settings = [_flat(run.config) for run in runs]
    differing, partial = _differing(settings)
    shown, folded = differing[:_MOST], [*differing[_MOST:], *partial]
    if not shown and not folded:
        return ""
    same = {name for own in settings for name in own} - set(differing) - set(partial)
    lead = translated(
        "Settings that differ between runs whose systems both have them; "
        "{others} are the same in all runs that have them.",
        others=plural(len(same), "other"),
    )
    body = _table(runs, settings, shown, "differences") if shown else ""
    if folded:
        heading = plural(len(folded), "more setting")
        if len(differing) <= _MOST:
            heading = translated("{settings} that only some systems have", settings=heading)
        inner = _table(runs, settings, folded[:_MOST], "differences-folded")
        if len(folded) > _MOST:
            note = translated(
                "The first {shown} of {all} are shown.", shown=_MOST, all=count(len(folded))
            )
            inner += f'<p class="aside">{note}</p>'
        body += f'<details class="more"><summary>{heading}</summary>{inner}</details>'
    return section("differences", "What differs", lead, body)


def _table(
    runs: Sequence[ReportedRun],
    settings: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    label: str,
) -> str:
    """Return a table of settings, without the runs that have none of them."""
    heads = "".join(f'<th scope="col" class="text">{escape(_named(name))}</th>' for name in names)
    rows = ""
    for place, (run, own) in enumerate(zip(runs, settings, strict=True)):
        if not any(name in own for name in names):
            continue
        who = f"<div>{swatch(place)}<span>{escape(run.label)}</span></div>"
        cells = "".join(f'<td class="text">{_written(own, name)}</td>' for name in names)
        rows += f'<tr><th scope="row">{who}</th>{cells}</tr>'
    return (
        f'<div class="scroll" role="region" aria-label="{translated(label)}" tabindex="0"><table>'
        f'<thead><tr><th scope="col">{translated("run")}</th>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


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


def _differing(settings: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Return (settings that differ between runs that have them, others that only some runs have).

    A setting of a world is compared between runs in worlds of the same kind.
    """
    names = dict.fromkeys(name for own in settings for name in own)
    differing: list[str] = []
    partial: list[str] = []
    for name in names:
        having = [own for own in settings if name in own]
        values: dict[str | None, set[str | None]] = {}
        for own in having:
            of_world = name.startswith("world.") and name != "world.name"
            kind = _text(own, "world.name") if of_world else None
            values.setdefault(kind, set()).add(_compared(own, name))
        if any(len(found) > 1 for found in values.values()):
            differing.append(name)
        elif len(having) < len(settings):
            partial.append(name)
    return differing, partial


_OFF = (None, "none", "false", "[]", "")
"""Texts of a setting that is not set, which systems write in several ways."""


def _compared(own: Mapping[str, Any], name: str) -> str | None:
    """Return the text to compare; None for a setting that is not set."""
    text = _text(own, name)
    return None if text in _OFF else text


def _text(own: Mapping[str, Any], name: str) -> str | None:
    """Return the text of a setting; None for null."""
    return setting_text(own.get(name))


def _written(own: Mapping[str, Any], name: str) -> str:
    if name not in own:
        return ""
    text = _text(own, name)
    return UNKNOWN if text is None else escape(text)


def _named(name: str) -> str:
    # "strategy.name" becomes "system", "strategy.batch_size" becomes "batch size".
    room, _, field = name.partition(".")
    if field == "name":
        return translated("system") if room == "strategy" else room
    return (field or room).replace("_", " ")
