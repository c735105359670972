"""The result as files: `all-reduce.json`, and `all-reduce.html`, a page that needs no network.

The page has the appearance and the style sheet of the report of runs. bench.js draws time and bus
bandwidth over size, a pair of charts for each number of ranks, and predicted against measured times
if a cost model was fitted. Tables are plain HTML.
"""

from __future__ import annotations

import json
from itertools import starmap
from pathlib import Path
from typing import Any

from dure.bench.plan import Contender, size_text
from dure.bench.result import BenchResult
from dure.bench.table import FITTED, link_texts, ratio_text, seconds_text
from dure.record.disk import write_atomically
from dure.report.document import document, plotly_source, section, source
from dure.report.formatting import escape, size

# Kinds differ in dash and symbol too, for print and readers without colours.
_DASHES = {"peer": "dash", "backend": "solid", "algorithm": "solid", "floor": "dot"}
_SYMBOLS = {"peer": "square", "backend": "circle", "algorithm": "diamond", "floor": "cross"}
_COLOURS = 8
_DRAWN = ("bytes", "seconds", "low", "high", "bus_bandwidth")
"""Entries of a cell that the charts use."""


def write(result: BenchResult, folder: str | Path) -> Path:
    """Write both files into `folder`, which may exist, and return the path of the page.

    Raises ImportError if plotly is not installed; the JSON is written first.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps(result.as_json(), indent=1) + "\n"
    write_atomically(folder / "all-reduce.json", content.encode())
    # After the JSON, which does not need plotly.
    path = folder / "all-reduce.html"
    write_atomically(path, page(result, plotly_source("the page")).encode())
    return path


def page(result: BenchResult, plotly: str) -> str:
    """Return the whole HTML document. plotly: source of plotly.js."""
    sections = [
        _header(result),
        _curves(result),
        _calibration(result) if result.calibration is not None else "",
        *(_table(result, ranks) for ranks in _ranks(result)),
        _footer(result),
    ]
    return document(
        "All-reduce",
        sections,
        data=charts(result),
        plotly=plotly,
        script=source(__file__, "bench.js"),
        style=source(__file__, "bench.css"),
    )


def charts(result: BenchResult) -> dict[str, Any]:
    """Return the data of the charts, as plain JSON.

    Each contender's appearance, and its points for each number of ranks.
    """
    looks = [_look(contender, index) for index, contender in enumerate(_present(result))]
    panels = []
    for ranks in _ranks(result):
        series = []
        for index, contender in enumerate(_present(result)):
            points = _points(result, contender, ranks)
            if points["bytes"]:
                series.append({"contender": index, **points})
        panels.append({"ranks": ranks, "series": series})
    return {"contenders": looks, "panels": panels, "calibration": result.calibration}


def _points(result: BenchResult, contender: Contender, ranks: int) -> dict[str, list[float]]:
    points: dict[str, list[float]] = {key: [] for key in _DRAWN}
    for nbytes in result.plan.sizes:
        cell = result.cell(contender.name, ranks, nbytes)
        if cell is not None:
            for key, values in points.items():
                values.append(cell[key])
    return points


def _look(contender: Contender, index: int) -> dict[str, str]:
    colour = "var(--soft)" if contender.kind == "floor" else f"var(--run-{index % _COLOURS})"
    # Where colours repeat, algorithms have another dash.
    dash = (
        "dashdot"
        if index >= _COLOURS and contender.kind == "algorithm"
        else _DASHES[contender.kind]
    )
    return {
        "name": contender.name,
        "label": contender.label,
        "what": contender.what,
        "color": colour,
        "dash": dash,
        "symbol": _SYMBOLS[contender.kind],
    }


def _present(result: BenchResult) -> list[Contender]:
    return [contender for contender in result.contenders if contender.name not in result.absent]


def _ranks(result: BenchResult) -> list[int]:
    return sorted({cell["ranks"] for cell in result.cells})


def _header(result: BenchResult) -> str:
    machine = result.machine
    facts = {
        "processor": machine["processor"],
        "cores": machine["cores"],
        "memory": size(machine["memory"]),
        "system": machine["system"],
        "repetitions": result.plan.repeats,
        "versions": ", ".join(f"{name} {version}" for name, version in result.versions.items()),
    }
    listed = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(fact)}</dd></div>" for name, fact in facts.items()
    )
    return (
        '<header><div class="top"><p class="mark">dure</p>'
        '<button type="button" id="theme" aria-label="Switch between light and dark">'
        '<span aria-hidden="true">◐</span> Theme</button></div>'
        f"<h1>All-reduce, side by side</h1><dl>{listed}</dl></header>"
    )


def _chip(index: int, contender: Contender) -> str:
    """Return the button that shows and hides a contender."""
    attributes = f'aria-pressed="true" data-run="{index}" title="{escape(contender.what)}"'
    return (
        f'<button type="button" {attributes}>'
        f'<svg class="swatch" viewBox="0 0 28 12" data-run="{index}" aria-hidden="true"></svg>'
        f"<span>{escape(contender.label)}</span></button>"
    )


def _curves(result: BenchResult) -> str:
    chips = "".join(starmap(_chip, enumerate(_present(result))))
    panels = "".join(
        f"<figure><h3>{ranks} ranks: time of a call</h3>"
        f'<div class="chart" role="img" data-time="{place}"></div></figure>'
        f"<figure><h3>{ranks} ranks: bus bandwidth</h3>"
        f'<div class="chart" role="img" data-bandwidth="{place}"></div></figure>'
        for place, ranks in enumerate(_ranks(result))
    )
    return section(
        "speed",
        "Time and bandwidth",
        "Medians over the repetitions, of the slowest rank; bars span the quartiles. Times are "
        "better low, bandwidths high. Bus bandwidth is bytes over seconds times 2(N−1)/N, so that "
        "numbers of ranks compare.",
        f'<div class="legend">{chips}</div><div class="grid pairs">{panels}</div>',
    )


def _calibration(result: BenchResult) -> str:
    fitted = result.calibration or {}
    rows = ""
    panels = ""
    # bench.js finds its data by the place.
    for place, link in enumerate(fitted["links"]):
        cells = "".join(f"<td>{escape(text)}</td>" for text in link_texts(link))
        rows += f"<tr><th scope=row>{link['ranks']}</th>{cells}</tr>"
        chart = f'<div class="chart" role="img" data-fit="{place}"></div>'
        panels += f"<figure><h3>{link['ranks']} ranks</h3>{chart}</figure>"
    head = "".join(f"<th>{name}</th>" for name in FITTED)
    seen = escape(" and ".join(fitted["calibrators"]).replace("-", " "))
    return section(
        "fitted",
        "Predicted and measured",
        f"Lines are predictions of the cost model, fitted to {seen} only; markers are "
        "measurements. Vertical lines mark the sizes where the predicted best algorithm changes. "
        "What advice costs: how much slower the predicted best was than the measured best, in the "
        "median.",
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f'<tbody>{rows}</tbody></table></div><div class="legend" id="fit-legend"></div>'
        f'<div class="grid pairs">{panels}</div>',
    )


def _table(result: BenchResult, ranks: int) -> str:
    head = "".join(f"<th>{size_text(nbytes)}</th>" for nbytes in result.plan.sizes)
    head = f"<thead><tr><th></th>{head}</tr></thead>"
    rows = ""
    for contender in _present(result):
        cells = "".join(_cell(result, contender, ranks, nbytes) for nbytes in result.plan.sizes)
        rows += f"<tr><th scope=row>{escape(contender.label)}</th>{cells}</tr>"
    peers = [contender.label for contender in _present(result) if contender.kind == "peer"]
    lead = "Median time of a call"
    lead += (
        f"; below it, the factor by which it is faster than {' and than '.join(peers)}."
        if peers
        else "."
    )
    table = f'<table class="numbers">{head}<tbody>{rows}</tbody></table>'
    body = f'<div class="scroll">{table}</div>'
    return section(f"table-{ranks}", f"{ranks} ranks", lead, body)


def _cell(result: BenchResult, contender: Contender, ranks: int, nbytes: int) -> str:
    cell = result.cell(contender.name, ranks, nbytes)
    if cell is None:
        return "<td>–</td>"
    ratios = " · ".join(ratio_text(cell[key]) for key in ("to_gloo", "to_open_mpi") if key in cell)
    below = f"<small>{ratios}</small>" if ratios and contender.kind != "floor" else ""
    title = f"{cell['cpu_seconds']:.3g} CPU seconds, {cell['calls']} calls a batch"
    if "floor_share" in cell:
        title = f"{cell['floor_share']:.0%} of the memory's speed, {title}"
    return f'<td title="{escape(title)}">{seconds_text(cell["seconds"])}{below}</td>'


def _footer(result: BenchResult) -> str:
    who = "".join(
        f"<p><b>{escape(contender.label)}</b> {escape(contender.what)}.</p>"
        for contender in _present(result)
    )
    absent = "".join(
        f"<p><b>{escape(name)}</b> was not measured: {escape(why)}.</p>"
        for name, why in result.absent.items()
    )
    early = "<p>Ctrl-C ended this benchmark early.</p>" if result.interrupted else ""
    return (
        f"<footer><h2>Contenders</h2>{who}{absent}{early}<p>Every contender has one batch in each "
        "repetition, in turn; all sums were checked before. The memory's speed is that of "
        "scaling every rank's tensor in place, all ranks at the same time: each byte read and "
        "written once, which an all-reduce in place cannot do without.</p></footer>"
    )
