"""What the server of split learning can learn, and what it costs to keep it from that.

    labels     is a digit a three (one in ten is), two cuts: every defence of gradients and labels
               at several settings of its knob. How well the server guesses labels in the first
               epoch (median AUC, by norm, direction and clusters of the activations), and how well
               the model does at the end (AUC and accuracy on the test examples)
    inputs     which digit, one cut: a decoder rebuilds digits from what leaves the head, knowing
               the head (handed over through the server), or a shadow of it (peer to peer),
               without defence and under NoPeek. Squared error, beside that of the mean picture, and
               SSIM

    python benchmarks/split_leakage.py --result benchmarks/results/split_leakage.json
    python benchmarks/split_leakage.py --pages benchmarks/results/split_leakage.json

The first takes a minute or two on one core; progress goes to standard error. The second writes the
tables and figures of docs/split-leakage.md from an earlier result.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from figures import Axis, Curve, lines, save
from outcome import give, takes_result
from pages import fill, table
from torch import nn
from torch.nn import functional as F

import dure
from dure.data.examples import Examples
from dure.errors import LossNotFiniteError
from dure.split.leakage.labels import auc
from dure.split.leakage.reconstruction import rebuild, shadow_head
from dure.tasks.models import TwoNN

JSON = dict[str, Any]

DEFENCES = {
    "none": [None],
    "marvell": [0.25, 1.0, 4.0, 16.0],
    "isotropic": [0.5, 1.0, 2.0, 4.0],
    "max-norm": [1.0, 4.0],
    "randomised-response": [0.5, 1.0, 2.0, 4.0],
}
ALPHAS = [0.0, 0.5, 1.0, 2.0, 3.0]
LEAKS = ["norm_leak_auc", "direction_leak_auc", "cluster_leak_auc"]
DOCS = Path(__file__).parents[1] / "docs"


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def threes(examples: Examples) -> Examples:
    return Examples(examples.inputs, (examples.targets == 3).long(), classes=["other", "three"])


def rare() -> dure.Task:
    digits = dure.load_task("digits")
    return dataclasses.replace(
        digits,
        name="threes",
        model=partial(TwoNN, features=64, classes=2),
        train=threes(digits.train),
        test=threes(digits.test),
        optimizer=partial(torch.optim.SGD, lr=0.3),
    )


def labels(defence: str, rounds: int) -> JSON:
    """One run, its leaks in the first epoch, and the model's worth at the end.

    All None where the noise drove the weights out of bounds.
    """
    task = rare()
    strategy = dure.SplitLearning(
        cut=("1", "2"), clients=2, batch_size=64, defence=defence, measure_leaks=True
    )
    try:
        run = dure.train(task, strategy, stop=dure.Stop(rounds=rounds), seed=0)
    except LossNotFiniteError:
        return dict.fromkeys([*LEAKS, "test_auc", "test_accuracy"])
    with torch.no_grad():
        scores = run.model(task.test.inputs)
    row: JSON = {name: run.history.series(name)[1][0] for name in LEAKS}
    row["test_auc"] = auc(scores[:, 1] - scores[:, 0], task.test.targets == 1)
    row["test_accuracy"] = run.summary["test_accuracy"]
    return row


def inputs(alpha: float, rounds: int) -> JSON:
    """One run, and what a decoder makes of what left its head."""
    digits = dure.load_task("digits", lr=0.3)
    defence = f"no-peek:{alpha}" if alpha else "none"
    strategy = dure.SplitLearning(
        cut=("1",), clients=2, batch_size=64, defence=defence, measure_leaks=True
    )
    run = dure.train(digits, strategy, stop=dure.Stop(rounds=rounds), seed=0)
    layers: nn.Sequential = run.model.layers
    head, tail = layers[:3], layers[3:]
    true = digits.train.inputs
    with torch.no_grad():
        seen = head(true)
    shadow = shadow_head(
        lambda: TwoNN(features=64).layers[:3],
        tail,
        F.cross_entropy,
        (digits.test.inputs, digits.test.targets),
        seen,
    )
    row: JSON = {
        "test_accuracy": run.summary["test_accuracy"],
        "distance_correlation": run.history.series("distance_correlation")[1][-1],
    }
    for name, guess in (("known", head), ("shadow", shadow)):
        found = rebuild(guess, digits.test.inputs, seen, true)
        row[name] = {"squared_error": found.squared_error, "ssim": found.ssim}
        row["of_mean"] = found.of_mean
        row[f"pictures_{name}"] = found.inputs[:4, 0].mul(16).round().int().tolist()
    return row


def measure(rounds: int) -> JSON:
    result: JSON = {"rounds": rounds, "labels": [], "inputs": []}
    for name, knobs in DEFENCES.items():
        for knob in knobs:
            text = name if knob is None else f"{name}:{knob}"
            row = {"defence": name, "knob": knob, **labels(text, rounds)}
            show(f"{text}: {row}")
            result["labels"].append(row)
    for alpha in ALPHAS:
        row = {"alpha": alpha, **inputs(alpha, rounds)}
        show(f"no-peek {alpha}: accuracy {row['test_accuracy']}, {row['known']}, {row['shadow']}")
        result["inputs"].append(row)
    return result


def shown(value: float | None) -> str:
    return "diverged" if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    return "diverged" if value is None else f"{100 * value:.1f} %"


def write_pages(result: JSON) -> None:
    """The tables and figures of docs/split-leakage.md."""
    rows = result["labels"]
    cells = [
        [
            f"`{row['defence']}`" if row["knob"] is None else f"`{row['defence']}:{row['knob']:g}`",
            *(shown(row[name]) for name in [*LEAKS, "test_auc"]),
            percent(row["test_accuracy"]),
        ]
        for row in rows
    ]
    head = ["defence", "norm", "direction", "clusters", "test AUC", "test accuracy"]
    rebuilt = [
        [
            f"`no-peek:{row['alpha']:g}`" if row["alpha"] else "`none`",
            f"{100 * row['test_accuracy']:.1f} %",
            f"{row['distance_correlation']:.2f}",
            f"{row['of_mean']:.4f}",
            f"{row['known']['squared_error']:.4f}",
            f"{row['known']['ssim']:.2f}",
            f"{row['shadow']['squared_error']:.4f}",
            f"{row['shadow']['ssim']:.2f}",
        ]
        for row in result["inputs"]
    ]
    columns = [
        "defence",
        "test accuracy",
        "dCor",
        "mean picture",
        "head known",
        "SSIM",
        "shadow",
        "SSIM",
    ]
    page = DOCS / "split-leakage.md"
    fill(page, {"labels": table(head, cells), "inputs": table(columns, rebuilt)})
    there = [row for row in rows if row["test_auc"] is not None]
    curves = [
        Curve(
            name,
            [row["direction_leak_auc"] for row in there if row["defence"] == name],
            [row["test_auc"] for row in there if row["defence"] == name],
            marks=True,
        )
        for name in DEFENCES
    ]
    trade = lines(
        "What a defence costs",
        curves,
        Axis("AUC of the server's guess, by direction", low=0.4, high=1.0),
        Axis("AUC of the model on test examples", low=0.4, high=1.0),
    )
    save(DOCS / "images" / "split-leakage.svg", "Labels guessed, and labels learned", trade)
    (DOCS / "images" / "split-rebuilt.svg").write_text(pictures(result["inputs"]))


CELL = 6
"""Pixels of a pixel."""


def pictures(rows: Sequence[JSON]) -> str:
    """Digits, and what a decoder has made of what left the head: one row of the page a picture.

    rows: of the results, without a defence and with the strongest one.
    """
    true = dure.load_task("digits").train.inputs[:4, 0].mul(16).round().int().tolist()
    lines_of = [("the digits", true)]
    for row in (rows[0], rows[-1]):
        name = f"no-peek:{row['alpha']:g}" if row["alpha"] else "no defence"
        lines_of.append((f"{name}, head known", row["pictures_known"]))
        lines_of.append((f"{name}, head unknown", row["pictures_shadow"]))
    side = 8 * CELL
    step = side + CELL
    parts = []
    for down, (text, several) in enumerate(lines_of):
        y = down * step
        parts.append(
            f'<text x="0" y="{y + side // 2}" font-size="13" fill="currentColor" '
            f'font-family="sans-serif">{text}</text>'
        )
        for across, one in enumerate(several):
            for i, line in enumerate(one):
                for j, value in enumerate(line):
                    shade = 255 - min(max(value, 0), 16) * 255 // 16
                    x = 190 + across * step + j * CELL
                    parts.append(
                        f'<rect x="{x}" y="{y + i * CELL}" width="{CELL}" height="{CELL}" '
                        f'fill="rgb({shade},{shade},{shade})"/>'
                    )
    width = 190 + 4 * step
    height = len(lines_of) * step
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">'
        f"<title>Digits, and what can be rebuilt of them</title>{''.join(parts)}</svg>\n"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--pages", type=Path, help="an earlier result, for the page")
    takes_result(parser)
    options = parser.parse_args(arguments)
    if options.pages is not None:
        write_pages(json.loads(options.pages.read_text()))
        return
    torch.set_num_threads(1)
    give(measure(options.rounds), options.result)


if __name__ == "__main__":
    main()
