"""The tables and the figure of docs/study-privacy.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from figures import Axis, Curve, Panel, lines, save
from pages import fill, table

JSON = dict[str, Any]

COLUMNS = {"no privacy": "no privacy", "clipped": "clipped, no noise"}
"""The ways without an epsilon, as the table calls them."""
LARGEST = 100
"""Clients of the sums that are drawn."""
SHOWN_SUM = 1
"""How many updates are in the sums whose attacks are in the first table; the rest have a row."""


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
        blocks["hidden"] = hidden(updates["tasks"])
        blocks["canaries"] = canaries(updates["canaries"])
    fill(page, blocks)


def draw(result: JSON, folder: Path) -> None:
    panels = [_against_epsilon(result["accuracy"])]
    panels += [_against_weights(result["sums"]["rows"])]
    save(folder / "privacy-study.svg", "What privacy costs", panels)


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
    for one in settings.values():
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


def _figure(row: JSON | None, name: str, form: str = "{:.2f}") -> str:
    """Its mean, with the ends of its interval."""
    if row is None or name not in row["figures"]:
        return ""
    mean, low, high = row["figures"][name]
    if low == high:
        return form.format(mean)
    return f"{form.format(mean)} ({form.format(low)} to {form.format(high)})"


def _row(rows: Sequence[JSON], attack: str, size: int, change: str) -> JSON | None:
    for row in rows:
        if (row["attack"], row["sum"], row["change"]) == (attack, size, change):
            return row
    return None


def _line(title: Sequence[str], rows: Sequence[JSON], size: int, change: str) -> list[str]:
    return [
        *title,
        _figure(_row(rows, "labels", size, change), "labels_right"),
        _figure(_row(rows, "first layer", size, change), "psnr", "{:.1f}"),
        _figure(_row(rows, "geiping", size, change), "psnr", "{:.1f}"),
        _figure(_row(rows, "dlg", size, change), "psnr", "{:.1f}"),
        _figure(_row(rows, "membership", size, change), "auc"),
    ]


ATTACKS = ["labels right", "first layer, dB", "geiping, dB", "dlg, dB", "membership, AUC"]


def recovered(tasks: JSON) -> str:
    """Updates of the first round as they are sent, alone and in sums, by batch size."""
    found = []
    for title, task in tasks.items():
        for batch, cells in task["batches"].items():
            rows = cells["first round"]
            plain = rows[0]["change"]
            for size in sorted({row["sum"] for row in rows if row["change"] == plain}):
                if any(_row(rows, name, size, plain) for name in ("labels", "first layer")):
                    found.append(_line([title, batch, f"{size}"], rows, size, plain))
    return table(["", "batch", "sum of", *ATTACKS], found)


def hidden(tasks: JSON) -> str:
    """The same of single updates of one example, by what is done to them before."""
    found = []
    for title, task in tasks.items():
        batch, cells = next(iter(task["batches"].items()))
        rows = cells["first round"]
        for change in dict.fromkeys(row["change"] for row in rows):
            if _row(rows, "labels", SHOWN_SUM, change):
                found.append(_line([f"{title}, batch {batch}", change], rows, SHOWN_SUM, change))
        for later, others in cells.items():
            if later != "first round":
                change = others[0]["change"]
                found.append(_line([f"{title}, batch {batch}", later], others, SHOWN_SUM, change))
    return table(["", "update", *ATTACKS], found)


def canaries(rows: Sequence[JSON]) -> str:
    """The bound from below beside the accountant's."""
    found = []
    for row in rows:
        above = row["accountant"]
        found.append(
            [
                f"{row['noise']:g}",
                f"{row['rounds']}",
                f"{row['canaries']}",
                f"{row['right']} of {row['guessed']}",
                f"{row['epsilon_at_least']:.2f}",
                "none" if above is None else f"{above:.2f}",
                percent(row["test_accuracy"]),
            ]
        )
    head = ["noise z", "rounds", "canaries", "guesses right", "ε at least", "ε at most"]
    return table([*head, "test accuracy"], found)
