"""Two hospitals that know different things of the same patients: each alone, both joined, and by
vertical split learning.

One knows what a practice knows of its patients (age, sex, chest pain, blood pressure, cholesterol,
blood sugar), the other what a heart unit measures. A server has the diagnosis, and the tail.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

import dure
from dure.data.examples import Examples

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


def columns_of(examples: Examples, columns: Sequence[int]) -> Examples:
    return Examples(examples.inputs[:, list(columns)], examples.targets, classes=examples.classes)


def hospitals(data: Path, epochs: int, seeds: int) -> list[JSON]:
    """A row for each model and each way; means over the seeds."""
    whole = dure.load_task("heart", data=data / "heart-disease")
    assert whole.test is not None
    rows: list[JSON] = []
    for title, (all_columns, some_columns, values) in MODELS.items():

        def task_of(columns: Sequence[int], model: Callable[[], nn.Module]) -> dure.Task:
            parts = [columns_of(one, columns) for one in (whole.train, whole.test)]
            return dure.Task(model, whole.loss, *parts, optimizer=whole.optimizer, name="heart")

        everything = task_of(range(29), all_columns)
        single = dure.SingleWorker(BATCH)
        features = tuple(",".join(map(str, columns)) for columns in COLUMNS)
        ways: dict[str, tuple[dure.Task, dure.Strategy]] = {
            "the practice alone": (
                task_of(PRACTICE, partial(some_columns, len(PRACTICE))),
                single,
            ),
            "the heart unit alone": (
                task_of(HEART_UNIT, partial(some_columns, len(HEART_UNIT))),
                single,
            ),
            "both, their data in one place": (everything, single),
            "both, vertical split": (
                everything,
                dure.VerticalSplit(features=features, batch_size=BATCH),
            ),
        }
        for way, (task, strategy) in ways.items():
            runs = [
                dure.train(task, strategy, stop=dure.Stop(epochs=epochs), seed=seed)
                for seed in range(seeds)
            ]
            row = {
                "model": title,
                "way": way,
                "accuracies": [run.summary["test_accuracy"] for run in runs],
                "losses": [run.summary["test_loss"] for run in runs],
                "weights": runs[0].summary["parameters"],
                "bytes": runs[0].summary["bytes_sent"],
                "formula": 0,
            }
            if isinstance(strategy, dure.VerticalSplit):
                # Up and down, of each example and epoch.
                row["formula"] = 2 * 4 * sum(values) * len(task.train) * epochs
                row["facts"] = runs[0].summary["facts"][0]["vertical"]
            if row["bytes"] != row["formula"]:
                raise ValueError(f"{way}: {row['bytes']} bytes, and {row['formula']} by formula")
            for what, one in (("accuracy", "accuracies"), ("loss", "losses")):
                row[what] = statistics.mean(row[one])
            rows.append(row)
    return rows
