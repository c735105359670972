"""DiLoCo against data parallel on character Shakespeare: the same samples, a fiftieth of the bytes.

A transformer of two layers (width 64, context 64, about 113,000 parameters) predicts the next
character. There are four workers, with AdamW inside. DiLoCo makes rounds of H = 50 steps and takes
the paper's outer optimizer (Nesterov, 0.7 and 0.9). Both systems try every rate of --rates for the
inner optimizer, from the same first weights and with the same samples in the same order. Each is
shown at the rate with the least test loss at the end, so that the choice gives neither an
advantage. Data parallel of a group walks the path of one worker up to rounding. So one worker tries
its rates, and the group runs the chosen one for its bytes and its loss.

    python benchmarks/diloco_shakespeare.py --data FILE [--figure docs/images/diloco.svg] \\
        --result result.json

FILE is a plain text. Progress goes to standard error, the result as JSON to standard output. Run
folders are kept under --out: called again with the same --out the benchmark takes the runs that are
there, and continues one that was interrupted.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from figures import NEUTRAL, Axis, Curve, lines, save
from outcome import give, takes_result
from pages import fill, table
from torch.nn import functional as F

import dure
from dure.contracts.strategy import Strategy
from dure.contracts.world import World
from dure.data.shakespeare import read_shakespeare
from dure.record.run import Run
from dure.tasks.models import Transformer

CONTEXT = 64
LAYERS = 2
WIDTH = 64
HEADS = 4
H = 50


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def task_of(data: Path, rate: float) -> dure.Task:
    text = read_shakespeare(data, CONTEXT)
    model = partial(Transformer, text.vocabulary, CONTEXT, LAYERS, HEADS, WIDTH)
    optimizer = partial(torch.optim.AdamW, lr=rate, betas=(0.9, 0.99), weight_decay=0.1)
    return dure.Task(model, F.cross_entropy, text.train, text.test, optimizer, name="shakespeare")


def trained(
    asked: argparse.Namespace, name: str, strategy: Strategy, world: World, rate: float
) -> Run:
    """A new run, or the one that is there, gone on with if it was interrupted."""
    folder = asked.out / f"{name}-lr-{rate:g}"
    task = task_of(asked.data, rate)
    rounds = strategy.traits.unit == "round"
    if (folder / "summary.json").exists():
        run = dure.load_run(folder, task.model)
    elif (folder / "config.json").exists():
        run = dure.resume(folder, task=task)
    else:
        stop = dure.Stop(rounds=asked.steps // H) if rounds else dure.Stop(steps=asked.steps)
        every = asked.every // H if rounds else asked.every
        run = dure.train(
            task, strategy, world, stop, seed=asked.seed, out=folder, evaluate_every=every
        )
    show(
        f"{name} lr {rate:g}: test loss {run.summary['test_loss']:.4f}, "
        f"{run.summary['seconds']:.0f} s"
    )
    return run


def row(run: Run, name: str, rate: float, trials: dict[str, float], workers: int) -> dict[str, Any]:
    points = run.history.evaluations
    return {
        "system": name,
        "rate": rate,
        "trials": trials,
        "test_loss": run.summary["test_loss"],
        "test_accuracy": run.summary["test_accuracy"],
        "samples": run.summary["samples"],
        "seconds": run.summary["seconds"],
        "bytes_sent_per_worker": run.summary["bytes_sent_per_worker"],
        "parameters": run.summary["parameters"],
        "curve": {
            "samples": [point.samples for point in points],
            "bytes": [point.bytes_sent / workers for point in points],
            "test_loss": [point.metrics["test_loss"] for point in points],
        },
    }


def measured(asked: argparse.Namespace) -> list[dict[str, Any]]:
    group = dure.Processes(asked.workers)
    alone = {
        rate: trained(asked, "one-worker", dure.SingleWorker(asked.batch), dure.Processes(1), rate)
        for rate in asked.rates
    }
    apart = {
        rate: trained(asked, "diloco", dure.DiLoCo(asked.batch, H), group, rate)
        for rate in asked.rates
    }

    def best(runs: dict[float, Run]) -> tuple[float, dict[str, float]]:
        losses = {rate: run.summary["test_loss"] for rate, run in runs.items()}
        return min(losses, key=lambda rate: losses[rate]), {
            f"{rate:g}": loss for rate, loss in losses.items()
        }

    rate, trials = best(alone)
    together = trained(asked, "data-parallel", dure.DataParallel(asked.batch), group, rate)
    own_rate, own_trials = best(apart)
    return [
        row(together, "data parallel", rate, trials, asked.workers),
        row(apart[own_rate], f"DiLoCo H={H}", own_rate, own_trials, asked.workers),
    ]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    def curves(against: str) -> list[Curve]:
        return [
            Curve(row["system"], row["curve"][against], row["curve"]["test_loss"], colour=colour)
            for row, colour in zip(rows, (NEUTRAL, 0), strict=True)
        ]

    loss = Axis("test loss a character", high=2.6)
    panels = [
        lines(
            "At equal samples",
            curves("samples"),
            Axis("sequences of 64 characters", short=True),
            loss,
        ),
        lines(
            "At equal bytes",
            curves("bytes"),
            Axis("bytes sent by a worker", log=True, short=True),
            loss,
        ),
    ]
    save(path, "DiLoCo and data parallel on Shakespeare, four workers", panels)


def describe(rows: list[dict[str, Any]], page: Path) -> None:
    """The table of the page."""
    head = ["system", "best rate", "test loss", "test accuracy", "MB a worker"]
    cells = [
        [
            row["system"],
            f"{row['rate']:g}",
            f"{row['test_loss']:.4f}",
            f"{row['test_accuracy']:.1%}",
            f"{row['bytes_sent_per_worker'] / 1e6:,.1f}",
        ]
        for row in rows
    ]
    fill(page, {"diloco": table(head, cells)})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="a text file")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument(
        "--batch", type=int, default=64, help="sequences of a step, over all workers"
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rates", nargs="+", type=float, default=[1.5e-3, 3e-3, 6e-3])
    parser.add_argument("--every", type=int, default=500, help="steps between evaluations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/diloco-shakespeare"))
    parser.add_argument("--figure", type=Path, default=None)
    parser.add_argument("--page", type=Path, default=None, help="the page whose table to fill")
    takes_result(parser)
    asked = parser.parse_args()
    rows = measured(asked)
    together, apart = rows
    worse = apart["test_loss"] / together["test_loss"] - 1
    fewer = together["bytes_sent_per_worker"] / apart["bytes_sent_per_worker"]
    show(f"DiLoCo's loss is {worse:+.2%} of data parallel's, at 1/{fewer:.2f} of the bytes")
    setting = (
        f"transformer {LAYERS}x{WIDTH}, {asked.workers} workers, batch {asked.batch}, "
        f"{asked.steps} steps, H={H}"
    )
    result = {
        "benchmark": "diloco_shakespeare",
        "setting": setting,
        "seed": asked.seed,
        "loss_excess": worse,
    }
    give({**result, "bytes_ratio": fewer, "rows": rows}, asked.result)
    if asked.figure is not None:
        draw(rows, asked.figure)
    if asked.page is not None:
        describe(rows, asked.page)


if __name__ == "__main__":
    main()
