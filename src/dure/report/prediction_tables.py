"""Predictions of trained classifiers in the report: the confusion matrix, and examples.

    recall of a class       correctly predicted test examples of the class, over all of the class
    precision               the same, over all test examples predicted as the class
    F1                      2 · precision · recall / (precision + recall)

The run has written them into answers.json, and pictures into answers/ (`docs/run-folder.md`); both
are untrusted data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dure.report.charts import JSON
from dure.report.document import section
from dure.report.formatting import UNKNOWN, count, escape
from dure.report.html_fragments import picture_in, swatch, table
from dure.report.json_values import listing, mapping, rows, whole, whole_number
from dure.report.runs import PredictionSummary, ReportedRun, ShownExample
from dure.report.translation import translated

_MOST = 50
"""Most classes of a run."""

_SHOWN = 8
"""Runs with pictures in the page."""


def answers_of(folder: Path, raw: Mapping[str, Any]) -> PredictionSummary | None:
    """Return the content of a run's answers.json; None if it is missing or has no square table."""
    cells = rows(raw.get("confusion"), _counts)
    number = len(cells)
    if not 2 <= number <= _MOST or any(len(row) != number for row in cells):
        return None
    names = [str(name) for name in listing(raw.get("classes"))]
    classes = names if len(names) == number else list(map(str, range(number)))
    pictures = [_seen(folder / "answers", mapping(one), number) for one in _first(raw)]
    return PredictionSummary(
        classes=classes,
        confusion=cells,
        examples=whole(raw.get("examples")),
        of=whole(raw.get("of")),
        seen=[one for one in pictures if one is not None],
    )


def _first(raw: Mapping[str, Any]) -> Sequence[Any]:
    # A folder from elsewhere may name thousands.
    return listing(raw.get("pictures"))[:_MOST]


def _counts(row: Sequence[Any]) -> list[int]:
    counts = list(map(whole_number, row))
    if any(one < 0 for one in counts):
        raise ValueError("a count is 0 or more")
    return counts


def _seen(folder: Path, raw: Mapping[str, Any], classes: int) -> ShownExample | None:
    picture = picture_in(folder, raw.get("file"))
    label = whole(raw.get("label"))
    said = whole(raw.get("said"))
    if picture is None or not (0 <= label < classes and 0 <= said < classes):
        return None
    return ShownExample(picture, whole(raw.get("example")), label, said)


def figures(runs: Sequence[ReportedRun]) -> list[JSON]:
    """Return the confusion matrix of each run that has one, as the page draws it."""
    return [
        {"run": place, "classes": list(told.classes), "cells": told.confusion}
        for place, _, told in _told(runs)
    ]


def _told(runs: Sequence[ReportedRun]) -> list[tuple[int, ReportedRun, PredictionSummary]]:
    return [(place, run, run.answers) for place, run in enumerate(runs) if run.answers is not None]


def answers(runs: Sequence[ReportedRun]) -> str:
    """Return the section; empty if no run has predictions."""
    told = _told(runs)
    if not told:
        return ""
    options = "".join(
        f'<option value="{place}">{escape(run.label)}</option>'
        for place, (_, run, _) in enumerate(told)
    )
    lead = (
        "Confusion matrix of the trained model (the best one if one was chosen) on the test "
        "data: a row is the class of an example, a column the predicted class; colours are "
        "shares of the class. On the diagonal the model is right."
    )
    chart = (
        f'<div class="controls"><label>{translated("run")} <select id="answers-run">{options}'
        '</select></label></div><div class="chart partition" id="answers-chart" role="img" '
        f'aria-label="{translated("Classes by what the model says")}"></div>'
    )
    blocks = "".join(
        _block(*one, opened=len(told) == 1, shows=at < _SHOWN) for at, one in enumerate(told)
    )
    return section("answers", "Class by class", lead, f'{chart}<div class="answers">{blocks}</div>')


def _block(place: int, run: ReportedRun, told: PredictionSummary, opened: bool, shows: bool) -> str:
    recalls = [_recall(told, at) for at in range(len(told.classes))]
    known = [one for one in recalls if one is not None]
    least = min(known, default=None)
    lines = "".join(_line(told, at, least) for at in range(len(told.classes)))
    head = ("class", "examples", "recall", "precision", "F1", "most often confused with")
    scores = table("Scores of classes", "long", head, lines, texts=["most often confused with"])
    part = translated(
        " The first {count} of {all} test examples.",
        count=count(told.examples),
        all=count(told.of),
    )
    note = part if told.examples < told.of else ""
    macro = sum(known) / len(known) if known else None
    said = translated("Mean recall over classes: {recall}.", recall=_percent(macro)) + note
    return (
        f'<details class="run"{" open" if opened else ""}><summary>{swatch(place)}'
        f"<span>{escape(run.label)}</span></summary>"
        f'<p class="aside">{said}</p>{scores}{_pictures(told) if shows else ""}</details>'
    )


def _line(told: PredictionSummary, at: int, least: float | None) -> str:
    row = told.confusion[at]
    recall = _recall(told, at)
    said = sum(line[at] for line in told.confusion)
    precision = row[at] / said if said else None
    both = (precision or 0.0) + (recall or 0.0)
    # Undefined for a class with neither examples nor predictions.
    f1 = 2 * (precision or 0.0) * (recall or 0.0) / both if both else None
    worst = recall is not None and recall == least and recall < 1
    mark = f'<span class="unseen"> ({translated("least")})</span>'
    written = f'<span class="least">{_percent(recall)}{mark}</span>'
    return (
        f'<tr><th scope="row">{escape(told.classes[at])}</th><td>{count(sum(row))}</td>'
        f"<td>{written if worst else _percent(recall)}</td><td>{_percent(precision)}</td>"
        f'<td>{_percent(f1)}</td><td class="text">{_taken_for(told, at)}</td></tr>'
    )


def _recall(told: PredictionSummary, at: int) -> float | None:
    row = told.confusion[at]
    return row[at] / sum(row) if sum(row) else None


def _taken_for(told: PredictionSummary, at: int) -> str:
    others = [(times, -place) for place, times in enumerate(told.confusion[at]) if place != at]
    times, place = max(others)
    if not times:
        return UNKNOWN
    return f"{escape(told.classes[-place])} ({count(times)})"


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{100 * share:.1f} %"


def _pictures(told: PredictionSummary) -> str:
    """Return pictures of test examples with their true and predicted classes."""
    if not told.seen:
        return ""
    shown = "".join(_picture(told, one) for one in told.seen)
    note = translated(
        "Examples of the test data: the first ones, and some that the model predicts wrongly."
    )
    return f'<p class="aside">{note}</p><div class="seen">{shown}</div>'


def _picture(told: PredictionSummary, one: ShownExample) -> str:
    label = escape(told.classes[one.label])
    said = escape(told.classes[one.said])
    right = one.label == one.said
    words = label if right else f"{label} <b>{translated('predicted {label}', label=said)}</b>"
    alt = translated(
        "Test example {number}: {label}, predicted {said}",
        number=one.example,
        label=label,
        said=said,
    )
    return f'<figure><img src="{one.picture}" alt="{alt}"><figcaption>{words}</figcaption></figure>'
