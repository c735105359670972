"""Asynchronous federations: what staleness does to FedAsync, and how systems bear stragglers.

1. Staleness (Xie, Koyejo, Gupta 2019). Updates come one after another, each from a model that is 0
   to S versions old, drawn uniformly. The task is MNIST with the 2NN and 100 clients, with IID and
   with Dirichlet(0.3) labels, one local epoch, batches of 50. Constant mixing with alpha 0.9 is
   compared with polynomial (a = 0.5) and hinge (a = 10, b = 4), at S = 0, 4, 16. Each has the same
   clients, batches and staleness. Reported are the test accuracy at the end (mean over the second
   half's evaluations), and its swings there and before: the standard deviation of the differences
   between evaluations. Figures are medians over the seeds.
2. Stragglers. A tenth of the devices computes 10 times as slowly. Reported are virtual seconds and
   bytes to a target accuracy, for FedAvg that waits for all of a round, FedAvg that asks 1.3 times
   as many as it needs, FedAsync and FedBuff, with as many clients at work. All have the learning
   rate of the task.

    python benchmarks/asynchronous.py --data DIR --out docs/images \\
        --page docs/study-asynchronous.md --result benchmarks/results/asynchronous.json

Progress goes to standard error, the result as JSON to standard output.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from figures import Axis, Curve, lines, save
from outcome import give, takes_result
from pages import fill, table

import dure

STALENESS = (0, 4, 16)
MIXINGS: dict[str, dict[str, Any]] = {
    "constant": {"weighting": "constant"},
    "polynomial": {"weighting": "polynomial", "a": 0.5},
    "hinge": {"weighting": "hinge", "a": 10.0, "b": 4.0},
}
PARTITIONS: dict[str, Any] = {"IID": dure.IID(), "Dirichlet(0.3)": dure.Dirichlet(0.3, 10)}
CELLS = [  # nothing is stale, nothing is weighed
    cell for cell in product(PARTITIONS, STALENESS, MIXINGS) if cell[1] or cell[2] == "constant"
]
ALPHA = 0.9
TARGET = 0.95
DEVICES = "stragglers:0.1:10"


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def swing(accuracy: list[float]) -> float:
    """The standard deviation of the changes from one evaluation to the next."""
    return statistics.pstdev(after - before for before, after in pairwise(accuracy))


def stale(
    task: dure.Task, data: str, staleness: int, mixing: str, updates: int, seed: int
) -> dict[str, Any]:
    """One run of FedAsync with drawn staleness."""
    strategy = dure.FedAsync(
        clients=100,
        batch_size=50,
        partition=PARTITIONS[data],
        alpha=ALPHA,
        rho=0.005,
        stale=staleness,
        **MIXINGS[mixing],
    )
    run = dure.train(
        task,
        strategy,
        stop=dure.Stop(rounds=updates),
        seed=seed,
        evaluate_every=max(1, updates // 60),
    )
    step, accuracy = run.history.curve("test_accuracy")
    half = len(accuracy) // 2
    late = accuracy[half:]
    row = {
        "data": data,
        "staleness": staleness,
        "mixing": mixing,
        "seed": seed,
        "accuracy": statistics.mean(late),
        "swing": swing(late),
        "early_swing": swing(accuracy[half // 6 : half]),
        "worst": min(late),
        "curve": {"update": step, "accuracy": accuracy},
    }
    what = f"{data}, staleness <= {staleness}, {mixing}, seed {seed}"
    show(f"{what}: {row['accuracy']:.4f}, swings {row['swing']:.4f}, {row['worst']:.4f}")
    return row


def contestants() -> dict[str, Any]:
    """Ten clients at work in each."""
    options: dict[str, Any] = {
        "clients": 100,
        "fraction": 0.1,
        "batch_size": 10,
        "partition": dure.IID(),
    }
    return {
        "FedAvg": dure.FedAvg(**options),
        "FedAvg, asks 13 for 10": dure.FedAvg(selection="uniform:1.3", **options),
        "FedAsync, polynomial": dure.FedAsync(alpha=0.6, rho=0.0, **options),
        "FedBuff, 5": dure.FedBuff(buffer=5, **options),
    }


def race(task: dure.Task, name: str, strategy: Any, seed: int, most: int) -> dict[str, Any]:
    """Virtual seconds, client updates and bytes until the target."""
    per_model = {"FedAsync": 1, "FedBuff": 5}.get(name.split(",")[0], 10)
    run = dure.train(
        task,
        strategy,
        dure.Simulated(devices=DEVICES),
        dure.Stop(rounds=most * 10 // per_model, target={"test_accuracy": TARGET}),
        seed=seed,
        evaluate_every=max(1, 10 // per_model),
    )
    clock = dict(zip(*run.history.series("virtual_seconds"), strict=True))
    reached = run.summary["to_target"]["test_accuracy"]["reached"]
    evaluations = run.history.evaluations
    row = {
        "system": name,
        "reached": reached is not None,
        "virtual_seconds": clock[evaluations[-1].step],
        "updates": evaluations[-1].step * per_model,
        "bytes": evaluations[-1].bytes_sent,
        "curve": {
            "seconds": [clock.get(e.step, 0.0) for e in evaluations],
            "accuracy": [e.metrics["test_accuracy"] for e in evaluations],
        },
    }
    show(
        f"{name}, seed {seed}: {row['virtual_seconds']:.0f} virtual seconds, {row['updates']} "
        f"updates"
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="the folder of MNIST's four files")
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=5, help="of each run")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, help="where pictures go")
    parser.add_argument("--page", type=Path, help="the page whose tables are filled")
    takes_result(parser)
    asked = parser.parse_args()
    updates, seeds = (60, 1) if asked.quick else (asked.updates, asked.seeds)
    task = dure.load_task("mnist", data=str(asked.data), model="2nn", lr=0.1)
    stales = []
    for cell in CELLS:
        stales += [stale(task, *cell, updates, seed) for seed in range(seeds)]
    races = []
    for seed in range(seeds):
        races += [race(task, name, one, seed, 60) for name, one in contestants().items()]
    result = {
        "compared": "FedAsync's mixings under staleness; synchronous and asynchronous systems with "
        "stragglers",
        "alpha": ALPHA,
        "updates": updates,
        "target": TARGET,
        "devices": DEVICES,
        "staleness": stales,
        "stragglers": races,
    }
    give(result, asked.result)
    if asked.out is not None:
        pictures(stales, races, asked.out)
    if asked.page is not None:
        fill(
            asked.page,
            {"staleness": staleness_table(stales), "stragglers": stragglers_table(races)},
        )


def middle(rows: list[dict[str, Any]], of: str) -> float:
    """The median over the seeds."""
    return statistics.median(row[of] for row in rows)


def staleness_table(rows: list[dict[str, Any]]) -> str:
    cells = []
    for data, staleness, mixing in CELLS:
        own = [
            row
            for row in rows
            if (row["data"], row["staleness"], row["mixing"]) == (data, staleness, mixing)
        ]
        numbers = [100 * middle(own, of) for of in ("accuracy", "early_swing", "swing", "worst")]
        mixed = mixing if staleness else "any"
        cells.append(
            [
                data,
                str(staleness),
                mixed,
                *(f"{number:.{1 + (n in (1, 2))}f}" for n, number in enumerate(numbers)),
            ]
        )
    return table(
        [
            "data",
            "staleness up to",
            "mixing",
            "accuracy, %",
            "swings before",
            "swings",
            "lowest, %",
        ],
        cells,
    )


def stragglers_table(rows: list[dict[str, Any]]) -> str:
    cells = []
    for name in contestants():
        own = [row for row in rows if row["system"] == name]
        reached = sum(row["reached"] for row in own)
        cells.append(
            [
                name,
                f"{reached} of {len(own)}",
                f"{middle(own, 'virtual_seconds'):.0f}",
                f"{middle(own, 'updates'):.0f}",
                f"{middle(own, 'bytes') / 1e6:.0f}",
            ]
        )
    return table(["system", "reached", "virtual seconds", "updates", "MB sent"], cells)


def pictures(stales: list[dict[str, Any]], races: list[dict[str, Any]], out: Path) -> None:
    """Accuracy against updates for the largest staleness, and against virtual seconds with
    stragglers, of one seed."""
    for data, name in (("IID", "staleness-iid.svg"), ("Dirichlet(0.3)", "staleness.svg")):
        own = [
            row
            for row in stales
            if (row["data"], row["staleness"], row["seed"]) == (data, STALENESS[-1], 0)
        ]
        curves = [
            Curve(row["mixing"], row["curve"]["update"], row["curve"]["accuracy"]) for row in own
        ]
        title = f"{data}, models up to {STALENESS[-1]} versions old"
        save(out / name, title, lines(title, curves, Axis("updates"), Axis("test accuracy")))
    first = [row for row in races if row["system"] in contestants()][: len(contestants())]
    curves = [
        Curve(row["system"], row["curve"]["seconds"], row["curve"]["accuracy"]) for row in first
    ]
    title = "A tenth of the devices computes 10 times as slowly"
    save(
        out / "stragglers.svg",
        title,
        lines(title, curves, Axis("virtual seconds"), Axis("test accuracy")),
    )


if __name__ == "__main__":
    main()
