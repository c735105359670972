"""Convex losses where every worker has other labels: parallel SGD, mixed or not, and ADMM.

The setting is that of Zinkevich et al. 2010 and of Boyd et al. 2011: logistic regression, here of
MNIST and of heart disease. Four workers have the examples sorted by label, a quarter each, so that
none of them represents the whole. Compared are parallel SGD on the examples as they lie, which
combines once or after every pass, the same after a shuffle, and ADMM, which needs none; with data
parallel as what they are compared with. All have the same joint batches, passes and first weights,
and rates that fall as 1/sqrt(1 + passes).

Shown is the excess of the training loss over its minimum, which L-BFGS finds on all data, after
every pass, against passes and against bytes that a worker has sent, examples included. Every system
trains with every rate of --rates, ADMM with every rho of --rhos as well. What ends with the least
training loss is shown, for all systems alike; all trials are in the result.

    python benchmarks/study_convex.py --data DIR [--figures docs/images] \\
        [--page docs/study-convex.md] --result benchmarks/results/study_convex.json

--data: a folder with `mnist`, which has MNIST's four IDX files, and `heart-disease`. Progress goes
to standard error, the result as JSON to standard output. Run folders are kept under --out: called
again with the same --out the benchmark takes the runs that are there, and continues one that was
interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from figures import NEUTRAL, Axis, Curve, lines, save
from outcome import give, takes_result
from pages import fill, table

import dure
from dure.averaging.shuffle import ExampleLayout
from dure.contracts.strategy import Strategy
from dure.record.run import Run

WORKERS = 4
BORN = dure.LabelShards(1)
ITERATIONS = 1_000
"""Of L-BFGS, at most."""


@dataclass(frozen=True)
class Setting:
    """A task, and how it is trained. batch: the joint one. folder: in --data."""

    name: str
    title: str
    folder: str
    batch: int
    passes: int
    options: dict[str, Any]


SETTINGS = (
    Setting("mnist", "MNIST", "mnist", 64, 20, {"model": "logistic"}),
    Setting("heart", "Heart disease", "heart-disease", 16, 60, {}),
)


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def falling(steps: int, step: int) -> float:
    """The factor of the learning rate. steps: of a pass."""
    return 1 / math.sqrt(1 + step / steps)


def task_of(setting: Setting, data: Path, rate: float) -> tuple[dure.Task, dure.Examples]:
    """The task, whose "test data" are the training data, as its training loss is what is measured;
    and the real test data."""
    task = dure.load_task(setting.name, data=str(data / setting.folder), lr=rate, **setting.options)
    schedule = functools.partial(falling, math.ceil(len(task.train) / setting.batch))
    return dataclasses.replace(task, test=task.train, lr_schedule=schedule), task.test


def systems(setting: Setting, rhos: list[float]) -> dict[str, list[tuple[str, Strategy]]]:
    """What is tried for every system: names of trials, and strategies."""
    batch = setting.batch

    def apart(shuffle: bool, every: int | None) -> dure.ParallelSGD:
        return dure.ParallelSGD(batch, partition=BORN, shuffle=shuffle, combine_every=every)

    return {
        "data parallel": [("", dure.DataParallel(batch))],
        "parallel SGD": [("", apart(False, None))],
        "parallel SGD, shuffled": [("", apart(True, None))],
        "parallel SGD every pass": [("", apart(False, 1))],
        "parallel SGD every pass, shuffled": [("", apart(True, 1))],
        "ADMM": [
            (f"rho={rho:g}", dure.ADMM(batch, rho, adaptive=False, partition=BORN)) for rho in rhos
        ],
    }


def trained(
    asked: argparse.Namespace, setting: Setting, name: str, strategy: Strategy, rate: float
) -> Run:
    """A new run, or the one that is there, gone on with if it was interrupted."""
    name = f"{setting.name}-{name}-lr-{rate:g}".replace(" ", "-").replace(",", "")
    folder = asked.out / name
    task, _ = task_of(setting, asked.data, rate)
    if (folder / "summary.json").exists():
        return dure.load_run(folder, task.model)
    if (folder / "config.json").exists():
        return dure.resume(folder, task=task)
    passes = setting.passes if asked.passes is None else asked.passes
    every = None
    if isinstance(strategy, dure.DataParallel):
        every = math.ceil(len(task.train) / setting.batch)
    return dure.train(
        task,
        strategy,
        dure.Processes(WORKERS),
        dure.Stop(epochs=passes),
        seed=asked.seed,
        out=folder,
        evaluate_every=every,
    )


def least_loss(task: dure.Task) -> float:
    """The minimum of the mean training loss, in float64."""
    model = task.model().double()
    inputs, targets = task.train.to(torch.float64).batch(torch.arange(len(task.train)))
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        max_iter=ITERATIONS,
        tolerance_grad=1e-9,
        tolerance_change=1e-14,
        history_size=50,
        line_search_fn="strong_wolfe",
    )

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = task.loss(model(inputs), targets)
        value.backward()
        return value

    optimizer.step(loss)
    with torch.no_grad():
        return float(task.loss(model(inputs), targets))


def known_least_loss(asked: argparse.Namespace, setting: Setting, task: dure.Task) -> float:
    """The minimum, looked for once."""
    path = asked.out / f"{setting.name}-least.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(least_loss(task)))
    return float(json.loads(path.read_text()))


@torch.no_grad()
def accuracy_of(run: Run, examples: dure.Examples) -> float:
    inputs, targets = examples.batch(torch.arange(len(examples)))
    return float((run.model.eval()(inputs).argmax(dim=1) == targets).double().mean())


def final_loss(run: Run) -> float:
    loss = run.summary["test_loss"]
    return math.inf if loss is None else loss


def measured(
    asked: argparse.Namespace,
    setting: Setting,
    system: str,
    trials: list[tuple[str, Strategy]],
    least: float,
    test: dure.Examples,
) -> dict[str, Any]:
    """One row: the best trial, and what the others came to."""
    runs: dict[tuple[str, float], Run] = {}
    for trial, strategy in trials:
        for rate in asked.rates:
            name = f"{system} {trial}".strip()
            try:
                run = trained(asked, setting, name, strategy, rate)
            except dure.errors.LossNotFiniteError as error:
                show(f"{setting.name}, {name}, lr {rate:g} diverges: {error}")
                continue
            runs[trial, rate] = run
            show(f"{setting.name}, {name}, lr {rate:g}: excess loss {final_loss(run) - least:.5f}")
    trial, rate = min(runs, key=lambda one: final_loss(runs[one]))
    run = runs[trial, rate]
    summary = run.summary
    points = run.history.evaluations
    return {
        "system": system,
        "trial": trial,
        "rate": rate,
        "trials": {
            f"{trial} lr {rate:g}".strip(): final_loss(run) - least
            for (trial, rate), run in runs.items()
        },
        "excess_loss": final_loss(run) - least,
        "test_accuracy": accuracy_of(run, test),
        "seconds": summary["seconds"],
        "bytes_sent_per_worker": summary["bytes_sent_per_worker"],
        "shuffle_bytes_per_worker": summary["shuffle_bytes"] / WORKERS,
        "shuffle_seconds": summary["shuffle_seconds"] / WORKERS,
        "curve": {
            "passes": [point.epoch for point in points],
            "bytes": [point.bytes_sent / WORKERS for point in points],
            "excess_loss": [(point.metrics["test_loss"] or math.nan) - least for point in points],
        },
    }


def studied(asked: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    """All systems on one task."""
    task, test = task_of(setting, asked.data, 0.1)
    least = known_least_loss(asked, setting, task)
    show(f"{setting.name}: the least training loss is {least:.6f}")
    rows = [
        measured(asked, setting, system, trials, least, test)
        for system, trials in systems(setting, asked.rhos).items()
    ]
    return {
        "task": setting.name,
        "title": setting.title,
        "examples": len(task.train),
        "example_bytes": ExampleLayout.of(task.train).nbytes,
        "parameters": sum(one.numel() for one in task.model().parameters()),
        "batch": setting.batch,
        "least_loss": least,
        "rows": rows,
    }


def draw(study: dict[str, Any], folder: Path) -> None:
    def curves(against: str) -> list[Curve]:
        return [
            Curve(
                row["system"],
                row["curve"][against],
                row["curve"]["excess_loss"],
                dashed="shuffled" in row["system"],
                colour=NEUTRAL if number == 0 else (number - 1) // 2,
            )
            for number, row in enumerate(study["rows"])
        ]

    excess = Axis("training loss above its minimum", log=True)
    sent = Axis("bytes sent by a worker, examples included", log=True, short=True)
    save(
        folder / f"convex-{study['task']}.svg",
        f"Logistic regression of workers with other labels: {study['title']}, four workers",
        [
            lines("At equal passes", curves("passes"), Axis("passes over the data"), excess),
            lines("At equal bytes", curves("bytes"), sent, excess),
        ],
    )


def describe(studies: list[dict[str, Any]], page: Path) -> None:
    """The tables of the page."""
    head = [
        "system",
        "rate",
        "excess loss",
        "test accuracy",
        "kB a worker",
        "kB of examples",
        "shuffle",
        "training",
    ]

    def one(row: dict[str, Any]) -> list[str]:
        moved = row["shuffle_bytes_per_worker"]
        return [
            row["system"],
            ", ".join(filter(None, [f"{row['rate']:g}", row["trial"]])),
            f"{row['excess_loss']:.4f}",
            f"{row['test_accuracy']:.1%}",
            f"{row['bytes_sent_per_worker'] / 1e3:,.1f}",
            f"{moved / 1e3:,.1f}" if moved else "none",
            f"{row['shuffle_seconds'] * 1e3:,.1f} ms" if moved else "",
            f"{row['seconds']:.2f} s",
        ]

    fill(
        page,
        {study["task"]: table(head, [one(row) for row in study["rows"]]) for study in studies},
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of both tasks' data")
    parser.add_argument("--tasks", nargs="+", default=[setting.name for setting in SETTINGS])
    parser.add_argument("--passes", type=float, default=None, help="instead of each task's own")
    parser.add_argument("--rates", nargs="+", type=float, default=[0.01, 0.03, 0.1, 0.3, 1.0])
    parser.add_argument("--rhos", nargs="+", type=float, default=[0.01, 0.03, 0.1, 0.3, 1.0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/study-convex"))
    parser.add_argument("--figures", type=Path, default=None, help="folder for the figures")
    parser.add_argument("--page", type=Path, default=None, help="the page whose tables to fill")
    takes_result(parser)
    asked = parser.parse_args()
    chosen = [setting for setting in SETTINGS if setting.name in asked.tasks]
    studies = [studied(asked, setting) for setting in chosen]
    if asked.figures is not None:
        for study in studies:
            draw(study, asked.figures)
    if asked.page is not None:
        describe(studies, asked.page)
    setting = (
        f"logistic regression, {WORKERS} workers, {BORN}, rates that fall as 1/sqrt(1 + passes)"
    )
    result = {
        "benchmark": "study_convex",
        "setting": setting,
        "seed": asked.seed,
        "studies": studies,
    }
    give(result, asked.result)


if __name__ == "__main__":
    main()
