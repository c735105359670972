"""The tables and the figure of docs/study-privacy.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from figures import Axis, Curve, Panel, lines, save
from pages import fill, table
from study_updates import canaries_table, cell

JSON = dict[str, Any]

COLUMNS = {"no privacy": "no privacy", "clipped": "clipped, no noise"}
"""The ways without an epsilon, as the table calls them."""


def write_page(result: JSON, updates: JSON | None, page: Path) -> None:
    """Fills the tables of what was measured; those of the updates only where there is a result."""
    blocks = {}
    if "accuracy" in result:
        settings = list(result["accuracy"].values())
        blocks["examples"] = accuracies(one for one in settings if one["unit"] != "client")
        blocks["clients"] = accuracies(one for one in settings if one["unit"] == "client")
    if "sums" in result:
        blocks["seconds"] = seconds(result["sums"]["rows"])
        blocks["bytes"] = sent(result["sums"]["rows"])
    if updates is not None:
        blocks["recovered"] = recovered(updates["tasks"])
        blocks["canaries"] = "\n".join(canaries_table(updates))
    fill(page, blocks)


def draw(result: JSON, folder: Path) -> None:
    """Draws what was measured."""
    panels = []
    if "accuracy" in result:
        panels.append(_against_epsilon(result["accuracy"]))
    if "sums" in result:
        panels.append(_against_weights(result["sums"]["rows"]))
    save(folder / "privacy-study.svg", "Cost of privacy", panels)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


# Accuracy


def ways(setting: JSON) -> dict[str, JSON]:
    return {row["way"]: row for row in setting["rows"]}


def accuracies(settings: Iterable[JSON]) -> str:
    """A row for each setting; an epsilon's column has accuracy and noise multiplier."""
    settings = list(settings)
    epsilons = sorted({float(way) for one in settings for way in ways(one) if way not in COLUMNS})
    rows = []
    for one in settings:
        found = ways(one)
        cells = [one["title"], *(percent(found[way]["test_accuracy"]) for way in COLUMNS)]
        for epsilon in reversed(epsilons):
            row = found.get(f"{epsilon:g}")
            cells.append(
                "" if row is None else f"{percent(row['test_accuracy'])} ({row['noise']:.2f})"
            )
        rows.append(cells)
    head = ["", *COLUMNS.values(), *(f"ε {epsilon:g} (z)" for epsilon in reversed(epsilons))]
    return table(head, rows)


def _against_epsilon(settings: JSON) -> Panel:
    curves = []
    for name, one in settings.items():
        if name.endswith("slow"):  # a second rate, which the table has
            continue
        found = {
            float(way): row["test_accuracy"] for way, row in ways(one).items() if way not in COLUMNS
        }
        x = sorted(found)
        curves.append(
            Curve(
                one["title"], x, [found[at] for at in x], marks=True, dashed=one["unit"] == "client"
            )
        )
    return lines(
        "Accuracy against epsilon (delta 0.00001)",
        curves,
        Axis("epsilon", log=True),
        Axis("test accuracy"),
    )


# Sums


def _cell(rows: Sequence[JSON], graph: str, clients: int, weights: int) -> list[JSON]:
    """The rows of a graph and a size, by how many clients are lost."""
    found = [
        row
        for row in rows
        if (row["graph"], row["clients"], row["weights"]) == (graph, clients, weights)
    ]
    return sorted(found, key=lambda row: row["lost"])


def _sizes(rows: Sequence[JSON]) -> list[tuple[str, int, int]]:
    return list(dict.fromkeys((row["graph"], row["clients"], row["weights"]) for row in rows))


def seconds(rows: Sequence[JSON]) -> str:
    """CPU milliseconds: of a client, and of the server by what share is lost."""
    found = []
    for graph, clients, weights in _sizes(rows):
        some = _cell(rows, graph, clients, weights)
        found.append(
            [
                graph,
                f"{clients}",
                f"{weights:,}",
                f"{some[0]['neighbours']}",
                f"{1000 * some[0]['client s']:,.1f}",
                *(f"{1000 * row['server s']:,.1f}" for row in some),
            ]
        )
    head = ["", "clients", "weights", "masks with", "ms, a client"]
    return table(
        [*head, "ms, server, none lost", "5 % lost", "20 % lost"],
        found,
    )


def sent(rows: Sequence[JSON]) -> str:
    """Bytes of a client besides those of plain FedAvg."""
    found = []
    for graph, clients, weights in _sizes(rows):
        # What comes besides does not depend on the weights, to a few bytes.
        if weights != min(row["weights"] for row in rows):
            continue
        row = _cell(rows, graph, clients, weights)[0]
        up = row["bytes up"] - 4 * weights
        shares = [f"{up / (4 * size):.2%}" for size in sorted({row["weights"] for row in rows})]
        found.append(
            [graph, f"{clients}", f"{up:,.0f}", f"{row['bytes down besides the model']:,.0f}"]
            + [share.replace("%", " %") for share in shares]
        )
    sizes = sorted({row["weights"] for row in rows})
    head = [
        "",
        "clients",
        "bytes up",
        "bytes down",
        *(f"up, of {size:,} weights" for size in sizes),
    ]
    return table(head, found)


def _against_weights(rows: Sequence[JSON]) -> Panel:
    largest = max(row["clients"] for row in rows)
    curves = []
    for number, graph in enumerate(dict.fromkeys(row["graph"] for row in rows)):
        sizes = sorted({row["weights"] for row in rows})
        some = [_cell(rows, graph, largest, size) for size in sizes]
        x = [float(size) for size in sizes]
        for lost, dashed in ((0, False), (-1, True)):
            title = f"{graph}, server, {some[0][lost]['lost']} lost"
            y = [cell[lost]["server s"] for cell in some]
            curves.append(Curve(title, x, y, dashed=dashed, marks=True, colour=2 * number))
        y = [cell[0]["client s"] for cell in some]
        curves.append(Curve(f"{graph}, a client", x, y, marks=True, colour=2 * number + 1))
    return lines(
        f"CPU seconds of a round of {largest} clients",
        curves,
        Axis("weights", log=True, short=True),
        Axis("CPU seconds", log=True),
    )


# Updates


HEAD = ["", "batch", "labels right", "closed form, PSNR", "Geiping, PSNR", "DLG, PSNR"]


def recovered(tasks: JSON) -> str:
    """Single updates of the first round, as they are sent, by batch size."""
    rows = []
    for title, task in tasks.items():
        for batch, cells in task["batches"].items():
            found = partial(cell, cells["first round"], size=1, change="as sent")
            rows.append(
                [
                    title,
                    batch,
                    found("labels", figure="labels_right"),
                    *(found(name, figure="psnr") for name in ("first-layer", "geiping", "dlg")),
                    found("membership", figure="auc"),
                ]
            )
    return table([*HEAD, "membership, AUC"], rows)
