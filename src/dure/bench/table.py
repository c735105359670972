"""The result on a terminal, for every number of ranks.

Times and ratios over size, and the costs of the largest size.
"""

from __future__ import annotations

from typing import Any

from rich.console import Group as Lines
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dure.bench.plan import size_text
from dure.bench.result import BenchResult


def seconds_text(seconds: float) -> str:
    """Return a time with three digits: 4.21 µs, 312 ms, 1.07 s."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        # 999.5 and more would round to 1000, so the next unit is used.
        if seconds * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def ratio_text(ratio: float | None) -> str:
    """Return times faster than a peer: 0.93x, 12.4x, 118x; a dash for None."""
    if ratio is None:
        return "–"
    # From here on three digits have no point; .3g would write 1e+03 for a thousand.
    if ratio >= 99.5:
        return f"{ratio:.0f}x"
    return f"{ratio:.3g}x" if ratio >= 1 else f"{ratio:.2g}x"


def rows(result: BenchResult) -> list[str]:
    """Return the names of the contenders that took part."""
    return [
        contender.name for contender in result.contenders if contender.name not in result.absent
    ]


def _titled(title: str) -> Table:
    return Table(
        box=None,
        pad_edge=False,
        header_style="dim",
        title=title,
        title_justify="left",
        title_style="bold",
    )


def times(result: BenchResult, ranks: int) -> Table:
    """Return a table of the median time a call, with the ratios to gloo and Open MPI below."""
    peers = [name for name in ("gloo", "open-mpi") if name in rows(result)]
    table = _titled(f"{ranks} ranks")
    table.caption = ", ".join(["time a call", *(f"× {name}" for name in peers)])
    table.caption_justify = "left"
    table.add_column("all-reduce", no_wrap=True)
    for nbytes in result.plan.sizes:
        table.add_column(size_text(nbytes), justify="right", no_wrap=True)
    labels = {contender.name: contender.label for contender in result.contenders}
    for name in rows(result):
        texts = []
        for nbytes in result.plan.sizes:
            cell = result.cell(name, ranks, nbytes)
            if cell is None:
                texts.append("–")
                continue
            ratios = [ratio_text(cell[key]) for key in ("to_gloo", "to_open_mpi") if key in cell]
            # The floor is no contender: ratios to a peer would mean nothing.
            below = f"\n[dim]{' '.join(ratios)}[/dim]" if ratios and name != "memory" else ""
            texts.append(seconds_text(cell["seconds"]) + below)
        table.add_row(escape(labels[name]), *texts)
    return table


def details(result: BenchResult, ranks: int) -> Table:
    """Return a table of the costs of a call at the largest measured size."""
    nbytes = max(cell["bytes"] for cell in result.cells if cell["ranks"] == ranks)
    table = _titled(f"{ranks} ranks, {size_text(nbytes)}")
    table.add_column("all-reduce", no_wrap=True)
    for heading in (
        "median",
        "quartiles",
        "algorithm GB/s",
        "bus GB/s",
        "of the memory's speed",
        "CPU seconds",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for contender in result.contenders:
        cell = result.cell(contender.name, ranks, nbytes)
        if cell is None:
            continue
        share = cell.get("floor_share")
        table.add_row(
            escape(contender.label),
            seconds_text(cell["seconds"]),
            f"{seconds_text(cell['low'])} – {seconds_text(cell['high'])}",
            f"{cell['algorithm_bandwidth'] / 1e9:.3g}",
            f"{cell['bus_bandwidth'] / 1e9:.3g}",
            "–" if share is None else f"{share:.0%}",
            f"{cell['cpu_seconds']:.3g}",
        )
    return table


FITTED = (
    "ranks",
    "alpha",
    "overhead",
    "beta",
    "gamma",
    "median error",
    "within 20 %",
    "advice costs",
    "best algorithm",
)
"""Headings of `link_texts`."""


def fitted(calibration: dict[str, Any]) -> Table:
    """Return a table of the cost model: its numbers, its errors, and the recommended algorithms."""
    table = _titled("cost model of the algorithms over gloo")
    for heading in FITTED:
        table.add_column(heading, justify="left" if heading == "best algorithm" else "right")
    for link in calibration["links"]:
        table.add_row(str(link["ranks"]), *link_texts(link))
    return table


def link_texts(link: dict[str, Any]) -> list[str]:
    """Return a fitted link in words: its four numbers, its errors, the best algorithms."""
    changes = [f"from {size_text(cross['bytes'])} {cross['to']}" for cross in link["crossovers"]]
    best = ", ".join([link["first"], *changes]).replace("_", " ")
    return [
        seconds_text(link["alpha"]),
        seconds_text(link["overhead"]),
        f"{link['beta'] * 1e9:.3g} ns/B",
        f"{link['gamma'] * 1e9:.3g} ns/B",
        f"{link['median_error']:.0%}",
        f"{link['within']:.0%}",
        f"{link['regret']:.0%}",
        best,
    ]


def shown(result: BenchResult) -> Any:
    """Return all tables for a rich console."""
    parts: list[Any] = []
    for ranks in sorted({cell["ranks"] for cell in result.cells}):
        parts += [times(result, ranks), Text(""), details(result, ranks), Text("")]
    if result.calibration is not None and result.calibration["links"]:
        parts += [fitted(result.calibration), Text("")]
    for name, why in result.absent.items():
        parts.append(Text(f"{name}: {why}", style="dim"))
    return Lines(*parts)
