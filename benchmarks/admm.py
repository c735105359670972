"""ADMM, FedProx's local loss and FedAvg where every worker has other labels, at equal rounds.

The task is MNIST with the 2NN. Four workers have two label shards each: the data are sorted by
label and cut into eight. A round is one pass of every worker over its own data in batches of 16,
and one exchange of weights. Every system trains with every rate of --rates, ADMM and FedProx with
every rho of --rhos. The setting with the best mean test accuracy over all rounds is shown, so that
all systems are chosen by the same measure. All trials are in the result.

    python benchmarks/admm.py --data DIR [--figure docs/images/admm.svg] --result result.json

Progress goes to standard error, the result as JSON to standard output. Run folders are kept under
--out: called again with the same --out the benchmark takes the runs that are there, and continues
one that was interrupted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from figures import Axis, Curve, lines, save
from outcome import give, takes_result

import dure
from dure.contracts.strategy import Strategy
from dure.contracts.world import World
from dure.record.run import Run

WORKERS = 4
BATCH = 16
NUMBERS = ("primal_residual", "dual_residual", "rho")
SHARDS = dure.LabelShards(2)


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def trained(
    asked: argparse.Namespace, name: str, strategy: Strategy, world: World, rate: float
) -> Run:
    """A new run, or the one that is there, gone on with if it was interrupted."""
    folder = asked.out / f"{name.replace(' ', '-')}-lr-{rate:g}"
    task = dure.load_task("mnist", data=str(asked.data), model="2nn", lr=rate)
    if (folder / "summary.json").exists():
        return dure.load_run(folder, task.model)
    if (folder / "config.json").exists():
        return dure.resume(folder)
    return dure.train(
        task, strategy, world, dure.Stop(rounds=asked.rounds), seed=asked.seed, out=folder
    )


def trials_of(asked: argparse.Namespace) -> dict[str, list[tuple[str, Strategy, World]]]:
    """What is tried for every system."""
    ranks = dure.Processes(WORKERS)

    def admm(rho: float, duals: bool) -> dure.ADMM:
        return dure.ADMM(BATCH * WORKERS, rho, adaptive=False, duals=duals, partition=SHARDS)

    return {
        "FedAvg": [
            ("FedAvg", dure.FedAvg(WORKERS, batch_size=BATCH, partition=SHARDS), dure.Simulated())
        ],
        "FedProx's loss": [(f"FedProx mu={rho:g}", admm(rho, False), ranks) for rho in asked.rhos],
        "ADMM": [(f"ADMM rho={rho:g}", admm(rho, True), ranks) for rho in asked.rhos],
    }


def curve(run: Run) -> list[float]:
    return run.history.curve("test_accuracy")[1]


def measured(
    asked: argparse.Namespace, system: str, trials: list[tuple[str, Strategy, World]]
) -> dict[str, Any]:
    """One row: the best trial, and what the others came to."""
    runs: dict[tuple[str, float], Run] = {}
    for name, strategy, world in trials:
        for rate in asked.rates:
            try:
                runs[name, rate] = trained(asked, name, strategy, world, rate)
            except dure.errors.LossNotFiniteError as error:
                show(f"{name} lr {rate:g} diverges: {error}")
                continue
            accuracy = curve(runs[name, rate])
            show(
                f"{name} lr {rate:g}: accuracy {accuracy[-1]:.4f} at the end, "
                f"{statistics.fmean(accuracy):.4f} mean"
            )
    name, rate = max(runs, key=lambda trial: statistics.fmean(curve(runs[trial])))
    run = runs[name, rate]
    return {
        "system": system,
        "chosen": name,
        "rate": rate,
        "trials": {f"{name} lr {rate:g}": curve(run) for (name, rate), run in runs.items()},
        "test_accuracy": curve(run),
        "bytes_sent_per_worker": run.summary["bytes_sent_per_worker"],
        "residuals": {number: run.history.series(number)[1] for number in NUMBERS},
    }


def residual_of(row: dict[str, Any], word: str, colour: int) -> Curve:
    values = row["residuals"][f"{word}_residual"]
    rounds = range(1, len(values) + 1)
    return Curve(f"{row['system']}: {word}", rounds, values, dashed=word == "dual", colour=colour)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    accuracies = [
        Curve(
            f"{row['chosen']}, lr {row['rate']:g}",
            range(len(row["test_accuracy"])),
            row["test_accuracy"],
        )
        for row in rows
    ]
    residuals = []
    for colour, row in enumerate(rows):
        if row["residuals"]["rho"]:
            residuals.append(residual_of(row, "primal", colour))
            residuals.append(residual_of(row, "dual", colour))
    panels = [
        lines("Test accuracy", accuracies, Axis("rounds"), Axis("", low=0.4)),
        lines("Residuals", residuals, Axis("rounds"), Axis("", log=True)),
    ]
    save(
        path,
        "ADMM where every worker has other labels: MNIST, 2NN, four workers with two shards each",
        panels,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of MNIST's four IDX files")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rates", nargs="+", type=float, default=[0.03, 0.1])
    parser.add_argument("--rhos", nargs="+", type=float, default=[0.03, 0.1, 0.3])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/admm"))
    parser.add_argument("--figure", type=Path, default=None)
    takes_result(parser)
    asked = parser.parse_args()
    rows = [measured(asked, system, trials) for system, trials in trials_of(asked).items()]
    if asked.figure is not None:
        draw(rows, asked.figure)
    setting = (
        f"MNIST 2NN, {WORKERS} workers, {SHARDS}, batch {BATCH} a worker, "
        f"{asked.rounds} rounds of one pass"
    )
    give({"benchmark": "admm", "setting": setting, "seed": asked.seed, "rows": rows}, asked.result)


if __name__ == "__main__":
    main()
