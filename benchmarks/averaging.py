"""Systems that average weights against data parallel, at equal samples and at equal bytes.

There is one task (Fashion-MNIST, the FedAvg paper's 2NN of 199,210 parameters), one seed, four
ranks, joint batches of 64, and the same epochs for all. Every system trains with every rate of
--rates for all epochs, from the same first weights. The rate with the least training loss over the
last epoch is shown, for every system in the same way. The curve of a system is its test accuracy
at every half epoch, against epochs and against the bytes that a worker has sent. "At equal bytes"
is the accuracy when a worker has sent as much as a system that sends less does in a whole run.

    python benchmarks/averaging.py --data DIR [--figures docs/images] \\
        [--page docs/study-averaging.md] --result result.json

Progress goes to standard error, the result as JSON to standard output. Run folders are kept under
--out: called again with the same --out the benchmark takes the runs that are there, and continues
one that was interrupted.
"""

from __future__ import annotations

import argparse
import bisect
import sys
from pathlib import Path
from typing import Any

from figures import NEUTRAL, Axis, Curve, bars, lines, save
from outcome import give, takes_result
from pages import fill, table

import dure
from dure.contracts.strategy import Strategy
from dure.record.run import Run

BATCH = 64


def systems(steps: int) -> dict[str, Strategy]:
    """By name; steps: of the whole run."""
    return {
        "data parallel": dure.DataParallel(BATCH),
        "local SGD H=4": dure.LocalSGD(BATCH, 4),
        "local SGD H=16": dure.LocalSGD(BATCH, 16),
        "local SGD H=64": dure.LocalSGD(BATCH, 64),
        "post-local SGD H=16": dure.LocalSGD(BATCH, 16, local_from=steps // 4),
        "DiLoCo H=50": dure.DiLoCo(BATCH, 50),
        "ADMM": dure.ADMM(BATCH, rho=0.01, local_steps=100),
        "parallel SGD, average": dure.ParallelSGD(BATCH),
        "parallel SGD, best": dure.ParallelSGD(BATCH, "best"),
    }


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def half_epoch(strategy: Strategy, steps_per_epoch: int) -> int:
    """Units of the strategy between two evaluations."""
    steps = getattr(strategy, "period", None) or getattr(strategy, "local_steps", None) or 1
    return 1 if isinstance(strategy, dure.ParallelSGD) else max(1, steps_per_epoch // 2 // steps)


def trained(asked: argparse.Namespace, name: str, strategy: Strategy, rate: float) -> Run:
    """The run of one system with one rate: a new one, or the one that is there, gone on with if it
    was interrupted."""
    folder = asked.out / f"{name.replace(' ', '-').replace(',', '')}-lr-{rate:g}"
    task = dure.load_task("fashion-mnist", data=str(asked.data), model="2nn", lr=rate)
    if (folder / "summary.json").exists():
        return dure.load_run(folder, task.model)
    if (folder / "config.json").exists():
        return dure.resume(folder)
    every = half_epoch(strategy, -(-len(task.train) // BATCH))
    world = dure.Processes(asked.workers)
    stop = dure.Stop(epochs=asked.epochs)
    return dure.train(
        task, strategy, world, stop, seed=asked.seed, out=folder, evaluate_every=every
    )


def curve(run: Run, workers: int) -> dict[str, list[float]]:
    """Test accuracy and loss over the evaluations, and what a worker had sent by then."""
    points = run.history.evaluations
    return {
        "epochs": [point.epoch for point in points],
        "bytes": [point.bytes_sent / workers for point in points],
        "test_accuracy": [point.metrics["test_accuracy"] or 0.0 for point in points],
        "test_loss": [point.metrics["test_loss"] or 0.0 for point in points],
    }


def last_loss(run: Run) -> float:
    """Mean training loss over the examples of the last epoch."""
    steps = run.history.steps
    recent = [step for step in steps if step.epoch > steps[-1].epoch - 1]
    return sum(step.loss for step in recent) / len(recent)


KEYS = (
    "test_accuracy",
    "test_loss",
    "seconds",
    "bytes_sent_per_worker",
    "epochs",
    "compute_seconds",
    "communication_seconds",
    "idle_seconds",
)
"""What of a run's summary is reported."""


def measured(asked: argparse.Namespace, name: str, strategy: Strategy) -> dict[str, Any]:
    """One row: the chosen rate's run, and what the others came to."""
    trials: dict[float, Run] = {}
    for rate in asked.rates:
        try:
            trials[rate] = trained(asked, name, strategy, rate)
        except dure.errors.LossNotFiniteError as error:
            show(f"{name} lr {rate:g} diverges: {error}")
            continue
        run = trials[rate]
        accuracy = run.summary["test_accuracy"]
        seconds = run.summary["seconds"]
        show(
            f"{name} lr {rate:g}: training loss {last_loss(run):.4f}, accuracy {accuracy:.4f}, "
            f"{seconds:.0f} s"
        )
    rate = min(trials, key=lambda rate: last_loss(trials[rate]))
    run = trials[rate]
    return {
        "system": name,
        "rate": rate,
        "trials": {
            f"{tried:g}": {
                "train_loss": last_loss(run),
                "test_accuracy": run.summary["test_accuracy"],
            }
            for tried, run in trials.items()
        },
        **{key: run.summary[key] for key in KEYS},
        "train_loss": last_loss(run),
        "curve": curve(run, asked.workers),
    }


def at_bytes(row: dict[str, Any], nbytes: float) -> float | None:
    """The accuracy when a worker has sent so many bytes; None before the first evaluation."""
    sent = row["curve"]["bytes"]
    accuracy = row["curve"]["test_accuracy"]
    place = bisect.bisect_right(sent, nbytes * (1 + 1e-9))
    return accuracy[place - 1] if place > 1 else None


def draw(rows: list[dict[str, Any]], folder: Path) -> None:
    def curves(against: str) -> list[Curve]:
        return [
            Curve(
                row["system"],
                row["curve"][against],
                row["curve"]["test_accuracy"],
                dashed=number > 7,
                colour=NEUTRAL if number == 0 else (number - 1) % 7,
            )
            for number, row in enumerate(rows)
        ]

    accuracy = Axis("test accuracy", low=0.7)
    sent = Axis("bytes sent by a worker", log=True, short=True)
    names = [row["system"] for row in rows]
    ends = {"": [row["test_accuracy"] for row in rows]}
    totals = {"": [row["bytes_sent_per_worker"] for row in rows]}
    save(
        folder / "averaging.svg",
        "Averaging weights against averaging gradients: Fashion-MNIST, 2NN, four ranks",
        [
            lines("At equal samples", curves("epochs"), Axis("epochs"), accuracy),
            lines("At equal bytes", curves("bytes"), sent, accuracy),
            bars("Test accuracy at the end", names, ends, Axis("", low=0.8)),
            bars("Bytes sent by a worker", names, totals, Axis("bytes", log=True, short=True)),
        ],
    )


def describe(rows: list[dict[str, Any]], page: Path) -> None:
    """The table of the page. Accuracy at the bytes of DiLoCo: what a worker may send there."""
    budget = next(row for row in rows if row["system"].startswith("DiLoCo"))[
        "bytes_sent_per_worker"
    ]

    def one(row: dict[str, Any]) -> list[str]:
        there = at_bytes(row, budget)
        return [
            row["system"],
            f"{row['rate']:g}",
            f"{row['test_accuracy']:.1%}",
            f"{row['test_loss']:.3f}",
            f"{row['bytes_sent_per_worker'] / 1e6:,.1f}",
            "" if there is None else f"{there:.1%}",
        ]

    head = [
        "system",
        "rate",
        "test accuracy",
        "test loss",
        "MB a worker",
        f"accuracy at {budget / 1e6:.0f} MB",
    ]
    fill(page, {"averaging": table(head, [one(row) for row in rows])})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder of Fashion-MNIST's four IDX files"
    )
    parser.add_argument("--epochs", type=float, default=8)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rates", nargs="+", type=float, default=[0.03, 0.1, 0.3])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/averaging"))
    parser.add_argument("--figures", type=Path, default=None, help="folder for the figures")
    parser.add_argument("--page", type=Path, default=None, help="the page whose table to fill")
    takes_result(parser)
    asked = parser.parse_args()
    steps = round(asked.epochs * 60_000 / BATCH)
    rows = [measured(asked, name, strategy) for name, strategy in systems(steps).items()]
    budgets = sorted(row["bytes_sent_per_worker"] for row in rows)
    for row in rows:
        row["accuracy_at_bytes"] = {f"{budget:.0f}": at_bytes(row, budget) for budget in budgets}
    setting = (
        f"Fashion-MNIST, 2NN, {asked.workers} workers, joint batch {BATCH}, {asked.epochs:g} epochs"
    )
    give(
        {"benchmark": "averaging", "setting": setting, "seed": asked.seed, "rows": rows},
        asked.result,
    )
    if asked.figures is not None:
        draw(rows, asked.figures)
    if asked.page is not None:
        describe(rows, asked.page)


if __name__ == "__main__":
    main()
