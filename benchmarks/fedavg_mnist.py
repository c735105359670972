"""FedAvg on MNIST as its paper ran it: rounds until 97, 98 and 99 % test accuracy, beside the paper's.

The CNN of 1,663,370 parameters, 100 clients, C=0.1, E=5, B=10; IID, and two label shards a client (McMahan et al.
2017, table 2). The learning rate is chosen as in the paper, from a multiplicative grid of 10^(1/3): every rate of
--rates trains for --trial-rounds, the one with the best test accuracy goes on until 99 % or --rounds. Rounds to an
accuracy are counted on the monotone curve with linear interpolation.

    python benchmarks/fedavg_mnist.py --data DIR [--partitions iid label-shards:2] > result.json

Progress goes to standard error, the result as JSON to standard output. Run folders are kept under --out: called
again with the same --out it goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

import dure
from dure.data.partition import parse
from dure.record.run import Run

PAPER = {"iid": {"0.99": 20}, "label-shards:2": {"0.99": 229}}
"""Rounds in the paper's table 2, row E=5, B=10, u=300."""

ACCURACIES = (0.97, 0.98, 0.99)


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def trained(asked: argparse.Namespace, partition: str, rate: float, rounds: int) -> Run:
    """The run of one rate, begun or gone on with until `rounds` or 99 %."""
    folder = asked.out / f"{partition.replace(':', '-')}-lr-{rate:g}"
    stop = dure.Stop(rounds=rounds, target={"test_accuracy": ACCURACIES[-1]})

    def progress(event: dict[str, Any]) -> None:
        accuracy = event["metrics"].get("test_accuracy", 0.0)
        show(f"{partition} lr {rate:g}: round {event['step']}, accuracy {accuracy:.4f}, {event['seconds']:.0f} s")

    if (folder / "config.json").exists():
        return dure.resume(folder, stop=stop, on_progress=progress)
    strategy = dure.FedAvg(clients=100, fraction=0.1, local_epochs=5, batch_size=10, partition=parse(partition))
    task = dure.load_task("mnist", data=str(asked.data), model="cnn", lr=rate)
    return dure.train(task, strategy, stop=stop, seed=asked.seed, out=folder, checkpoint_every=1, on_progress=progress)


def best_accuracy(run: Run) -> float:
    return float(run.summary["best"]["test_accuracy"])


def trial(asked: argparse.Namespace, partition: str, rate: float) -> float:
    """Best test accuracy of a rate's trial; zero for a rate at which the loss diverges."""
    try:
        return best_accuracy(trained(asked, partition, rate, asked.trial_rounds))
    except dure.errors.LossNotFiniteError as error:
        show(f"{partition} lr {rate:g} diverges: {error}")
        return 0.0


def measured(asked: argparse.Namespace, partition: str) -> dict[str, Any]:
    """One row of the result: the trials, the chosen rate, and its rounds to each accuracy."""
    trials = {rate: trial(asked, partition, rate) for rate in asked.rates}
    rate = max(trials, key=lambda rate: trials[rate])
    run = trained(asked, partition, rate, asked.rounds)
    rounds = {f"{accuracy:g}": run.history.to_target("test_accuracy", accuracy) for accuracy in ACCURACIES}
    return {
        "partition": partition,
        "rate": rate,
        "trials": {f"{tried:g}": accuracy for tried, accuracy in trials.items()},
        "trial_rounds": asked.trial_rounds,
        "rounds_to": rounds,
        "paper_rounds_to": PAPER.get(partition, {}),
        "rounds": run.summary["steps"],
        "best_accuracy": best_accuracy(run),
        "seconds": run.summary["seconds"],
        "bytes_sent_per_client": run.summary["bytes_sent_per_worker"],
        "curve": run.history.curve("test_accuracy"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of MNIST's four IDX files")
    parser.add_argument("--partitions", nargs="+", default=["iid", "label-shards:2"])
    parser.add_argument("--rates", nargs="+", type=float, default=[0.0464, 0.1, 0.215])
    parser.add_argument("--trial-rounds", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=350)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--out", type=Path, default=Path("runs/fedavg-mnist"))
    asked = parser.parse_args()
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    rows = [measured(asked, partition) for partition in asked.partitions]
    for row in rows:
        for accuracy, reached in row["rounds_to"].items():
            paper = row["paper_rounds_to"].get(accuracy, "–")
            ours = "not reached" if reached is None else f"{reached:.1f}"
            show(f"{row['partition']:<16} {float(accuracy):.0%}: {ours} rounds (paper: {paper})")
    json.dump({"benchmark": "fedavg_mnist", "setting": "CNN, K=100, C=0.1, E=5, B=10", "rows": rows}, sys.stdout)


if __name__ == "__main__":
    main()
