"""Two models trained apart and averaged: from common first weights, and from different ones.

This repeats the FedAvg paper's figure 1 (McMahan et al. 2017). Two MNIST 2NNs train on 600 examples
each, without common examples, with 240 updates of SGD at a rate of 0.1 and batches of 50 (20
passes). Then the loss over all 60,000 training images of the mixture theta·w + (1 - theta)·w' is
drawn over theta. Averaging, as in parallel SGD once (Zinkevich et al. 2010) and in FedAvg every
round, is the point theta = 1/2.

    python benchmarks/zinkevich.py --data DIR [--figure docs/images/two-parents.svg] \\
        --result result.json

Progress goes to standard error, the result as JSON to standard output. Each of --pairs has its own
seed.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from figures import Axis, Curve, lines, save
from outcome import give, takes_result
from torch import nn

import dure
from dure.data.examples import Examples

EXAMPLES = 600
BATCH = 50
PASSES = 20
RATE = 0.1
THETAS = [round(-0.2 + 0.05 * step, 2) for step in range(29)]


def part(task: dure.Task, start: int, seed: int) -> dure.Task:
    """The task with 600 of its training examples, drawn by `seed`: number `start` to start + 599 of
    a permutation."""
    order = torch.randperm(len(task.train), generator=torch.Generator().manual_seed(seed))
    chosen = Examples(*task.train.batch(order[start : start + EXAMPLES]))
    return dure.Task(task.model, task.loss, chosen, None, task.optimizer)


def parent(task: dure.Task, seed: int) -> nn.Module:
    """A model trained alone, from first weights that `seed` says."""
    return dure.train(
        task, dure.SingleWorker(BATCH), stop=dure.Stop(epochs=PASSES), seed=seed
    ).model


@torch.no_grad()
def mixture(one: nn.Module, other: nn.Module, theta: float) -> nn.Module:
    mixed = copy.deepcopy(one)
    for parameter, its in zip(mixed.parameters(), other.parameters(), strict=True):
        parameter.mul_(theta).add_(its, alpha=1 - theta)
    return mixed


@torch.no_grad()
def loss_of(model: nn.Module, task: dure.Task) -> float:
    """Mean over all training images."""
    batches = torch.arange(len(task.train)).split(10_000)
    total = 0.0
    for indices in batches:
        inputs, targets = task.train.batch(indices)
        total += float(task.loss(model(inputs), targets)) * len(indices)
    return total / len(task.train)


def row(task: dure.Task, pair: int, shared: bool) -> dict[str, Any]:
    """The loss of two parents and of their mixtures."""
    one, other = (part(task, start, pair) for start in (0, EXAMPLES))
    models = parent(one, 2 * pair), parent(other, 2 * pair + (0 if shared else 1))
    losses = [loss_of(mixture(*models, theta), task) for theta in THETAS]
    at = dict(zip(THETAS, losses, strict=True))
    start = "common" if shared else "different"
    print(
        f"pair {pair}, {start} first weights: parents {at[1.0]:.3f} and {at[0.0]:.3f}, "
        f"average {at[0.5]:.3f}",
        file=sys.stderr,
        flush=True,
    )
    return {
        "pair": pair,
        "shared": shared,
        "parents": [at[1.0], at[0.0]],
        "average": at[0.5],
        "losses": losses,
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    panels = []
    for shared, title in (
        (False, "From different first weights"),
        (True, "From common first weights"),
    ):
        own = [row for row in rows if row["shared"] == shared]
        curves = [
            Curve("each pair" if number == 0 else "", THETAS, row["losses"], colour=0)
            for number, row in enumerate(own)
        ]
        best = min(min(row["parents"]) for row in own)
        curves.append(
            Curve("best parent", [THETAS[0], THETAS[-1]], [best, best], dashed=True, colour=1)
        )
        loss = Axis("loss on all training data", low=0, high=1)
        panels.append(lines(title, curves, Axis("mixing weight theta"), loss))
    save(path, "Averaging two MNIST models that were trained apart", panels)


def medians_of(rows: list[dict[str, Any]], shared: bool) -> dict[str, float]:
    """Losses of the parents and of their averages, over the pairs."""
    own = [row for row in rows if row["shared"] == shared]
    parents = chain.from_iterable(row["parents"] for row in own)
    return {
        "parent": statistics.median(parents),
        "average": statistics.median(row["average"] for row in own),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of MNIST's four IDX files")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--figure", type=Path, default=None)
    takes_result(parser)
    asked = parser.parse_args()
    task = dure.load_task("mnist", data=str(asked.data), model="2nn", lr=RATE)
    rows = []
    for pair in range(asked.pairs):
        rows += [row(task, pair, shared) for shared in (True, False)]
    if asked.figure is not None:
        draw(rows, asked.figure)
    medians = {"common": medians_of(rows, True), "different": medians_of(rows, False)}
    updates = EXAMPLES // BATCH * PASSES
    setting = f"MNIST 2NN, 2 x {EXAMPLES} examples, {updates} updates, B={BATCH}, lr={RATE}"
    result = {
        "benchmark": "zinkevich",
        "setting": setting,
        "medians": medians,
        "thetas": THETAS,
        "rows": rows,
    }
    give(result, asked.result)


if __name__ == "__main__":
    main()
