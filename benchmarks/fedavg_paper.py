"""FedAvg as in its paper: rounds until a test accuracy, and those of the paper's tables 1 and 2.

    2nn                 MNIST, 784-200-200-10, until 97 %, one local epoch, C from one client to all
                        (table 1)
    cnn                 MNIST, the CNN of 1,663,370 parameters, until 99 %: E = 5 (table 1), and
                        C = 0.1 (table 2)
    shakespeare         the next character, an LSTM, until 54 %, C = 0.1 (table 2); non-IID: a role
                        is a client
    lstm64              the same with 64 units a layer instead of 256, until 45 %: not the paper's,
                        but 600 rounds of FedSGD take one core an hour

MNIST has 100 clients of 600 images, IID or two label shards a client. FedSGD is E = 1 with all of a
client's data in one batch, B = none. A row is named model/partition/C/E/B, and --rows takes
patterns of names:

    python benchmarks/fedavg_paper.py --data DIR --list
    python benchmarks/fedavg_paper.py --data DIR --rows "2nn/*" \\
        --result benchmarks/results/fedavg_paper.json

DIR holds the folders mnist and shakespeare. As in the paper each row has its own learning rate,
from a multiplicative grid of 10^(1/3). Every rate of --rates trains for a tenth of the paper's
rounds (at least 4). The one with the best test accuracy continues until it reaches the target, or
for --patience times the paper's rounds, or for --seconds. Rounds are counted on the monotone curve
with linear interpolation.

Runs are kept under --out and continue there if they were interrupted. Progress goes to standard
error. The rows are written as JSON to --result, or else to standard output. Rows that --result has
already and that are not run again stay. --page FILE fills the table of a page with all of them.

Source: H. B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pages import fill, table

import dure
from dure.data.partition import parse
from dure.record.disk import write_atomically
from dure.record.run import Run

JSON = dict[str, Any]


class Row(NamedTuple):
    """A cell of the paper's tables. rounds: the paper's, of its model; None where it did not get
    there."""

    model: str
    partition: str
    fraction: float
    epochs: int
    batch: int | None
    rounds: int | None

    @property
    def name(self) -> str:
        return (
            f"{self.model}/{self.partition}/{self.fraction:g}/{self.epochs}/{self.batch or 'none'}"
        )

    def is_named(self, patterns: Iterable[str]) -> bool:
        """Whether one of the patterns is its name."""
        return any(fnmatch(self.name, pattern) for pattern in patterns)

    @property
    def target(self) -> float:
        return {"2nn": 0.97, "cnn": 0.99, "shakespeare": 0.54, "lstm64": 0.45}[self.model]


PARTITIONS = {"iid": "iid", "shards": "label-shards:2", "roles": "natural-key"}


def table_1(model: str, epochs: int, cells: dict[float, tuple[int | None, ...]]) -> list[Row]:
    columns = [("iid", None), ("iid", 10), ("shards", None), ("shards", 10)]
    rows = []
    for fraction, cell in cells.items():
        for (partition, batch), rounds in zip(columns, cell, strict=True):
            rows.append(Row(model, partition, fraction, epochs, batch, rounds))
    return rows


def table_2(
    model: str, partitions: tuple[str, str], cells: dict[tuple[int, int | None], tuple[int, int]]
) -> list[Row]:
    rows = []
    for (epochs, batch), cell in cells.items():
        for partition, rounds in zip(partitions, cell, strict=True):
            rows.append(Row(model, partition, 0.1, epochs, batch, rounds))
    return rows


ROWS = [
    *table_1(
        "2nn",
        1,
        {
            0.01: (1455, 316, 4278, 3275),
            0.1: (1474, 87, 1796, 664),
            0.2: (1658, 77, 1528, 619),
            0.5: (None, 75, None, 443),
            1.0: (None, 70, None, 380),
        },
    ),
    *table_1(
        "cnn",
        5,
        {
            0.01: (387, 50, 1181, 956),
            0.2: (337, 18, 978, 200),
            0.5: (164, 18, 1067, 261),
            1.0: (246, 16, None, 97),
        },
    ),
    *table_2(
        "cnn",
        ("iid", "shards"),
        {
            (1, None): (626, 483),
            (5, None): (179, 1000),
            (1, 50): (65, 600),
            (20, None): (234, 672),
            (1, 10): (34, 350),
            (5, 50): (29, 334),
            (20, 50): (32, 426),
            (5, 10): (20, 229),
            (20, 10): (18, 173),
        },
    ),
    *table_2(
        "shakespeare",
        ("iid", "roles"),
        {
            (1, None): (2488, 3906),
            (1, 50): (1635, 549),
            (5, None): (613, 597),
            (1, 10): (460, 164),
            (5, 50): (401, 152),
            (5, 10): (192, 41),
        },
    ),
    Row("lstm64", "roles", 0.1, 1, None, 3906),
    Row("lstm64", "roles", 0.1, 5, 10, 41),
]
"""Table 1's CNN row with C = 0.1 is table 2's, whose numbers differ a little."""


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def trained(asked: argparse.Namespace, row: Row, rate: float, rounds: int) -> Run:
    """The run of one rate, begun or gone on with until so many rounds, the target, or the end of
    the time. Ctrl-C ends all, with what has been done in the run's folder."""
    run = begun_or_resumed(asked, row, rate, rounds)
    if run.summary["ended"] == "interrupt":
        sys.exit(f"interrupted; the same command goes on with {run.folder}")
    return run


def begun_or_resumed(asked: argparse.Namespace, row: Row, rate: float, rounds: int) -> Run:
    folder = asked.out / row.name.replace("/", "-") / f"lr-{rate:g}"
    stop = dure.Stop(rounds=rounds, target={"test_accuracy": row.target}, seconds=asked.seconds)

    def progress(event: JSON) -> None:
        accuracy = event["metrics"].get("test_accuracy", 0.0)
        show(
            f"{row.name} lr {rate:g}: round {event['step']}, accuracy {accuracy:.4f}, "
            f"{event['seconds']:.0f} s"
        )

    if (folder / "config.json").exists():
        return dure.resume(folder, stop=stop, on_progress=progress)
    every = max(1, (row.rounds or 1000) // 100)
    strategy = dure.FedAvg(
        clients=None if row.partition == "roles" else 1129 if row.model == "shakespeare" else 100,
        fraction=row.fraction,
        local_epochs=row.epochs,
        batch_size=row.batch,
        partition=parse(PARTITIONS[row.partition]),
    )
    return dure.train(
        task(asked.data, row.model, rate),
        strategy,
        stop=stop,
        seed=asked.seed,
        out=folder,
        evaluate_every=every,
        checkpoint_every=max(1, every // 2),
        on_progress=progress,
    )


def task(data: Path, model: str, rate: float) -> dure.Task:
    if model in ("shakespeare", "lstm64"):
        width = 64 if model == "lstm64" else None
        return dure.load_task(
            "shakespeare", data=str(data / "shakespeare" / "plays_moby"), lr=rate, width=width
        )
    return dure.load_task("mnist", data=str(data / "mnist"), model=model, lr=rate)


def best_accuracy(run: Run) -> float:
    return float(run.summary["best"]["test_accuracy"])


def trial(asked: argparse.Namespace, row: Row, rate: float) -> float:
    """Best test accuracy of a rate's trial; zero for a rate at which the loss diverges."""
    try:
        history = trained(asked, row, rate, trial_rounds(row)).history
    except dure.errors.TooFewClientsError as error:
        show(f"{row.name} lr {rate:g} diverges: {error}")
        return 0.0
    if history.steps[-1].loss is None:  # no client's training was finite
        show(f"{row.name} lr {rate:g} diverges")
        return 0.0
    rounds, accuracies = history.curve("test_accuracy")
    within = [
        accuracy
        for round, accuracy in zip(rounds, accuracies, strict=True)
        if round <= trial_rounds(row)
    ]
    return max(within)  # an earlier command may have gone on for longer


def trial_rounds(row: Row) -> int:
    return max(4, (row.rounds or 1000) // 10)


def measured(asked: argparse.Namespace, row: Row) -> JSON:
    """One row of the result: the trials, the chosen rate, and its rounds to the accuracy."""
    trials = {rate: trial(asked, row, rate) for rate in asked.rates}
    rate = max(trials, key=lambda rate: trials[rate])
    run = trained(asked, row, rate, round(asked.patience * (row.rounds or 1000)))
    return {
        "name": row.name,
        "target": row.target,
        "paper": row.rounds,
        "rounds": run.history.to_target("test_accuracy", row.target),
        "rate": rate,
        "trials": {f"{tried:g}": accuracy for tried, accuracy in trials.items()},
        "trained": run.summary["steps"],
        "best_accuracy": best_accuracy(run),
        "seconds": run.summary["seconds"],
        "curve": run.history.curve("test_accuracy"),
    }


def rounds_of(value: float | None, otherwise: str) -> str:
    return otherwise if value is None else f"{value:.0f}"


def line(row: JSON) -> list[str]:
    """A row of the table."""
    model, partition, fraction, epochs, batch = row["name"].split("/")
    unreached = f"not in {row['trained']} ({row['best_accuracy']:.1%})"
    comparable = row["rounds"] and row["paper"] and model != "lstm64"
    ratio = f"{row['rounds'] / row['paper']:.2f}" if comparable else "–"
    cells = [
        f"{model}, {partition}",
        fraction,
        epochs,
        "all" if batch == "none" else batch,
        f"{row['rate']:g}",
    ]
    return [
        *cells,
        rounds_of(row["rounds"], unreached),
        rounds_of(row["paper"], "not reached"),
        ratio,
    ]


HEAD = ["model, partition", "C", "E", "B", "learning rate", "rounds", "the paper's", "ratio"]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder of the folders mnist and shakespeare"
    )
    parser.add_argument("--rows", nargs="+", default=["cnn/*/0.1/5/10"], help="patterns of names")
    parser.add_argument(
        "--list", action="store_true", help="print the names of the rows that --rows names, and end"
    )
    parser.add_argument("--rates", nargs="+", type=float, default=[0.0464, 0.1, 0.215])
    parser.add_argument("--patience", type=float, default=1.5, help="times the paper's rounds")
    parser.add_argument("--seconds", type=float, help="of a run, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--out", type=Path, default=Path("runs/fedavg-paper"))
    parser.add_argument("--result", type=Path, help="a file of rows, to which these are added")
    parser.add_argument("--page", type=Path, help="a page whose table is filled")
    return parser.parse_args()


def main() -> None:
    asked = parsed()
    rows = [row for row in ROWS if row.is_named(asked.rows)]
    if not rows:
        sys.exit(
            f"no row is named like {' or '.join(asked.rows)}; --list prints the names, as "
            f"{ROWS[0].name}"
        )
    if asked.list:
        print("\n".join(row.name for row in rows))
        return
    if asked.result is not None and not asked.result.parent.is_dir():
        sys.exit(f"there is no folder {asked.result.parent} for --result")
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    kept = (
        json.loads(asked.result.read_text())["rows"]
        if asked.result is not None and asked.result.exists()
        else []
    )
    results = {row["name"]: row for row in kept}
    for row in rows:
        results[row.name] = measured(asked, row)
        show(
            "  ".join(
                f"{name} {cell}" for name, cell in zip(HEAD, line(results[row.name]), strict=True)
            )
        )
        if asked.result is not None:
            write_atomically(asked.result, as_json(results).encode())
    if asked.result is None:
        print(as_json(results), end="")
    if asked.page:
        table_of = [line(results[row.name]) for row in ROWS if row.name in results]
        fill(asked.page, {"fedavg-paper": table(HEAD, table_of)})


def as_json(results: Mapping[str, JSON]) -> str:
    """The rows, in the order of the paper's tables."""
    ordered = [results[row.name] for row in ROWS if row.name in results]
    return json.dumps({"benchmark": "fedavg_paper", "rows": ordered}, indent=1) + "\n"


if __name__ == "__main__":
    main()
