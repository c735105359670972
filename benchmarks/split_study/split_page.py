"""The tables and figures of docs/study-split.md."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from figures import NEUTRAL, Axis, Curve, Panel, bars, lines, save
from pages import fill, table

from dure.record.idleness import over_busy

JSON = dict[str, Any]

PARTS = {"whole": "all (FedAvg)", "head": "head", "ends": "head and end (U-shape)"}
DRAWN = "fashion"
"""The setting whose curves are drawn."""


def write_page(result: JSON, page: Path) -> None:
    settings = result["settings"]
    waiting = {
        f"waiting-{name}": waits(one, result["conditions"]) for name, one in settings.items()
    }
    fill(
        page,
        {
            "settings": of_settings(settings),
            "burden": burden(result),
            "learned": learned(settings),
            "bytes": sent(settings),
            "crossover": crossings([result["crossover"][one] for one in models_of(result)]),
            **{name: text for name, text in waiting.items() if name != "waiting-mnist-skewed"},
            "hospitals": hospitals(result["hospitals"]),
        },
    )


def megabytes(count: float) -> str:
    return f"{count / 1e6:,.2f}" if count < 1e8 else f"{count / 1e6:,.0f}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def idle(share: float | None) -> str:
    """As a share of all time, and over the busy time."""
    over = over_busy(share)
    return percent(share) if over is None else f"{percent(share)} ({over:.2f})"


# Tables


def of_settings(settings: JSON) -> str:
    rows = []
    for one in settings.values():
        sizes = one["sizes"]
        each = f"{sizes[0]}" if len(set(sizes)) == 1 else f"{min(sizes)} to {max(sizes)}"
        rows.append(
            [
                one["title"],
                f"{one['train']:,}",
                f"{one['clients']}",
                f"{each} (`{one['partition']}`)",
                f"{one['batch']}",
                f"{one['epochs']}",
                " / ".join(f"{rate:g}" for rate in one["rates"]),
                f"`{' '.join(one['cut'])}`; `{' '.join(one['cuts'])}`",
            ]
        )
    head = ["", "examples", "clients", "per client", "batch", "epochs", "rates", "cut; U-shape"]
    return table(head, rows)


def models_of(result: JSON) -> list[str]:
    """In the order of the settings."""
    return list(dict.fromkeys(one["model"] for one in result["settings"].values()))


def burden(result: JSON) -> str:
    titles = {one["model"]: one["title"].split(", ")[1] for one in result["settings"].values()}
    rows = []
    for model in models_of(result):
        parts = result["burdens"][model]
        whole = parts["whole"]
        for part, title in PARTS.items():
            one = parts[part]
            rows.append(
                [
                    f"{titles[model]}: {title}",
                    f"{one['weights']:,.0f}",
                    f"{one['flops_per_example'] / 1e6:,.2f}",
                    percent(one["flops_per_example"] / whole["flops_per_example"]),
                    megabytes(one["tensor_bytes"]),
                    megabytes(one["process_bytes"]),
                ]
            )
    head = [
        "part on the client",
        "weights",
        "MFLOP an example",
        "share of the model",
        "MB of tensors",
        "MB of the process",
    ]
    return table(head, rows)


def learned(settings: JSON) -> str:
    names = [row["system"] for row in next(iter(settings.values()))["rows"]]
    rows = []
    for name in names:
        cells = [name]
        for one in settings.values():
            row = row_of(one, name)
            epochs = row["epochs_to_target"]
            cells += [percent(row["test_accuracy"]), "" if epochs is None else f"{epochs:.1f}"]
        rows.append(cells)
    head = ["system"]
    for one in settings.values():
        head += [one["title"], "epochs"]
    return table(head, rows)


def row_of(setting: JSON, name: str) -> JSON:
    row: JSON = next(row for row in setting["rows"] if row["system"] == name)
    return row


def senders(setting: JSON) -> list[JSON]:
    """The rows of systems with clients that send something."""
    return [row for row in setting["rows"] if "bytes" in row]


def sent(settings: JSON) -> str:
    rows = []
    for first in senders(next(iter(settings.values()))):
        cells = [first["system"]]
        for one in settings.values():
            row = row_of(one, first["system"])
            cells.append(megabytes(row["client_bytes_per_epoch"]))
        rows.append(cells)
    return table(["system", *(one["title"] for one in settings.values())], rows)


def crossings(found: list[JSON]) -> str:
    rows = []
    for one in found:
        for point in one["points"]:
            split = point["SplitFed v1"]
            federated = point["FedAvg"]
            rows.append(
                [
                    one["title"],
                    f"{one['even']:.1f}",
                    f"{point['examples']}",
                    megabytes(split),
                    megabytes(federated),
                    "SplitFed" if split < federated else "FedAvg",
                ]
            )
    head = ["", "equal at", "examples", "MB of SplitFed", "MB of FedAvg", "fewer bytes"]
    return table(head, rows)


def waits(setting: JSON, conditions: JSON) -> str:
    rows = []
    for row in senders(setting):
        seconds = row["seconds_per_epoch"]
        epochs = row["epochs_to_target"]
        rows.append(
            [
                row["system"],
                f"{row['trips_of_a_client']:,.0f}",
                f"{row['trips_in_a_row']:,}",
                idle(row["client_idle"]),
                idle(row["server_idle"]),
                *(f"{seconds[name]:,.1f}" for name in conditions),
                "" if epochs is None else f"{epochs * seconds['phones'] / 60:,.1f}",
            ]
        )
    head = [
        "system",
        "waits of a client",
        "waits in a row",
        "clients idle (over busy)",
        "server idle (over busy)",
        *(f"s, {name}" for name in conditions),
        "minutes to FedAvg's",
    ]
    return table(head, rows)


def hospitals(found: list[JSON]) -> str:
    rows = [
        [
            f"{row['model']}: {row['way']}",
            percent(row["accuracy"]),
            f"{row['loss']:.3f}",
            f"{row['weights']}",
            f"{row['bytes'] / 1e3:,.1f}",
        ]
        for row in found
    ]
    return table(["", "test accuracy", "test loss", "weights", "kB of the run"], rows)


# Figures


def draw(result: JSON, folder: Path) -> None:
    setting = result["settings"][DRAWN]
    save(folder / "split-study.svg", f"Split and federated learning: {setting['title']}", [
        against(setting, "epochs", "At equal epochs", Axis("epochs"), 1.0),
        against(setting, "client_bytes", "At equal bytes", Axis("MB of a client", log=True), 1e-6),
        against(setting, "seconds", "At equal time", Axis("virtual minutes", log=True), 1 / 60),
        times(setting, result["conditions"]),
    ])  # fmt: skip
    panels = [crossing(result["crossover"][one]) for one in models_of(result)]
    title = "Bytes of a client in an epoch, by how many examples it has"
    save(folder / "split-crossover.svg", title, panels, columns=3)


def against(setting: JSON, what: str, title: str, axis: Axis, unit: float) -> Panel:
    """Test accuracy of all systems that count this."""
    curves = []
    for number, row in enumerate(row for row in setting["rows"] if row.get("curve")):
        points = row["curve"]
        x = [unit * value for value in points[what]]
        # One worker sends nothing and has no virtual clock.
        if not any(x):
            continue
        colour = NEUTRAL if number == 0 else number - 1
        dashed = row["system"] == "split, U-shape"
        curves.append(
            Curve(
                row["system"], x, points["test_accuracy"], marks=True, dashed=dashed, colour=colour
            )
        )
    return lines(title, curves, axis, Axis("test accuracy"))


def times(setting: JSON, conditions: JSON) -> Panel:
    rows = senders(setting)
    series = {name: [row["seconds_per_epoch"][name] for row in rows] for name in conditions}
    names = [row["system"] for row in rows]
    return bars("Virtual seconds of an epoch", names, series, Axis("seconds", log=True))


def crossing(found: JSON) -> Panel:
    """The formulas as lines, what was measured as marks."""
    even = found["even"]
    x = [0.0, 2.3 * even]
    split = [(found["head_bytes"] + found["example_bytes"] * n) / 1e6 for n in x]
    federated = [found["whole_bytes"] / 1e6] * len(x)
    places = [float(point["examples"]) for point in found["points"]]
    curves = [
        Curve("FedAvg", x, federated, colour=0),
        Curve("split", x, split, colour=1),
    ]
    for colour, name in enumerate(("FedAvg", "SplitFed v1")):
        for place, point in zip(places, found["points"], strict=True):
            curves.append(Curve("", [place], [point[name] / 1e6], marks=True, colour=colour))
    title = f"{found['title']}: as many at {math.floor(even)}"
    return lines(title, curves, Axis("examples of a client"), Axis("MB", low=0.0), width=420)
