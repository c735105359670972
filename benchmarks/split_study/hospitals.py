"""Two hospitals that know different things of the same patients: each alone, both joined, and by
vertical split learning.

One knows what a practice knows of its patients (age, sex, chest pain, blood pressure, cholesterol,
blood sugar), the other what a heart unit measures. A server has the diagnosis, and the tail.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

import dure
from dure.data.examples import Examples
from dure.record.run import Run

JSON = dict[str, Any]

PRACTICE = [0, 1, 2, 6, 7, 9, 10, 11, 12, 22, 23, 24]
HEART_UNIT = [3, 4, 5, 8, *range(13, 22), *range(25, 29)]
COLUMNS = [PRACTICE, HEART_UNIT]
WIDTH = 16
BATCH = 64


def head(columns: int) -> nn.Module:
    return nn.Sequential(nn.Linear(columns, WIDTH), nn.ReLU())


def joined_network() -> nn.Module:
    heads = [head(len(columns)) for columns in COLUMNS]
    return dure.VerticalModel(heads, nn.Linear(2 * WIDTH, 2), "concat", COLUMNS)


def alone_network(columns: int) -> nn.Module:
    return nn.Sequential(head(columns), nn.Linear(WIDTH, 2))


def linear(columns: int) -> nn.Module:
    return nn.Linear(columns, 2)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], nn.Module], Sequence[int]]] = {
    "logistic regression": (partial(linear, 29), linear, (2, 2)),
    "network": (joined_network, alone_network, (WIDTH, WIDTH)),
}
"""Of all columns, of so many columns, and the elements that leave each head."""


def hospitals(data: Path, epochs: int, seeds: int) -> list[JSON]:
    """A row for each model and each way; means over the seeds."""
    whole = dure.load_task("heart", data=data / "heart-disease")
    rows = []
    for title, (all_columns, some_columns, values) in MODELS.items():
        for way, (task, strategy) in ways(whole, all_columns, some_columns).items():
            runs = [
                dure.train(task, strategy, stop=dure.Stop(epochs=epochs), seed=seed)
                for seed in range(seeds)
            ]
            divided = isinstance(strategy, dure.VerticalSplit)
            # Up and down, of each example and epoch.
            formula = 2 * 4 * sum(values) * len(task.train) * epochs if divided else 0
            rows.append({"model": title, "way": way, **told(runs, formula)})
    return rows


def ways(
    whole: dure.Task,
    all_columns: Callable[[], nn.Module],
    some_columns: Callable[[int], nn.Module],
) -> dict[str, tuple[dure.Task, dure.Strategy]]:
    """Who trains on what."""
    single = dure.SingleWorker(BATCH)
    features = tuple(",".join(map(str, columns)) for columns in COLUMNS)
    joined = dataclasses.replace(whole, model=all_columns)
    practice, heart_unit = (
        dataclasses.replace(
            whole,
            model=partial(some_columns, len(columns)),
            train=columns_of(whole.train, columns),
            test=columns_of(whole.test, columns),
        )
        for columns in COLUMNS
    )
    return {
        "the practice alone": (practice, single),
        "the heart unit alone": (heart_unit, single),
        "both, their data in one place": (joined, single),
        "both, vertical split": (
            joined,
            dure.VerticalSplit(features=features, batch_size=BATCH),
        ),
    }


def columns_of(examples: Any, columns: Sequence[int]) -> Examples:
    return Examples(examples.inputs[:, list(columns)], examples.targets, classes=examples.classes)


def told(runs: Sequence[Run], formula: int) -> JSON:
    """What came of it. Raises ValueError for bytes that are not those of the formula."""
    sent = {run.summary["bytes_sent"] for run in runs}
    if sent != {formula}:
        raise ValueError(f"{sent} bytes were sent, and {formula} by the formula")
    row: JSON = {"weights": runs[0].summary["parameters"], "bytes": formula}
    for name in ("accuracy", "loss"):
        values = [run.summary[f"test_{name}"] for run in runs]
        row |= {name: statistics.mean(values), f"{name} of each": values}
    return row
