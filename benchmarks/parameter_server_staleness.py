"""Parameter servers: staleness 0, 1, 2, 4, 8 and any with stragglers, and many workers at a link.

1. Stragglers. Four workers, one server, joint batches of 64, plain SGD. All workers are alike; or
   one of the four always computes 5 times slower; or each step, with probability 0.2, takes 5 times
   longer. Time is virtual: a worker takes 10 ms an example, a message as long as links of 100
   Mbit/s take. Reported are the seconds until the test loss that synchronous workers reach halfway,
   how many times faster that is than theirs, the loss when asynchronous workers have ended, and the
   share of the workers' time in which they did not compute. All meet, to be evaluated, every
   --period steps. Medians over the seeds.
2. The same, smaller, in real time: processes whose steps sleep instead of computing (10 ms, or 50
   where they are slow), so that few cores do.
3. Many workers. 10 to 1,000 workers at the links of 1 and 4 servers; a step of a worker is 0.1 s.
   Reported are virtual seconds a step of all, against what the links allow, and idle shares.

    python benchmarks/parameter_server_staleness.py [--data DIR] [--figures docs/images] \\
        [--page docs/study-parameter-server.md] \\
        --result benchmarks/results/parameter_server_staleness.json

Without --data the task is the built-in digits; with it Fashion-MNIST, from the folder of its four
files. Progress goes to standard error, the result as JSON to standard output.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from figures import Axis, Curve, bars, lines, save
from outcome import give, takes_result
from pages import fill, table
from torch import Tensor

import dure
from dure.record import idleness

IDLE = "idle (over busy)"
WORKERS = 4
STALENESS: tuple[int | None, ...] = (0, 1, 2, 4, 8, None)
FACTOR = 5
SHARE = 0.2
SPEED = 100.0
MBIT = 100.0
STRAGGLERS = ("none", "one of four, always", "each step, with probability 0.2")
MANY = (10, 30, 100, 300, 1000)


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def named(staleness: int | None) -> str:
    return "any" if staleness is None else str(staleness)


def devices(stragglers: str, folder: Path) -> str:
    if stragglers == STRAGGLERS[1]:
        # A share of stragglers is drawn; here it has to be one of four.
        file = folder / "devices.csv"
        speeds = [SPEED / FACTOR, *[SPEED] * (WORKERS - 1)]
        rows = [f"{number},{speed},{MBIT},{MBIT}" for number, speed in enumerate(speeds)]
        file.write_text("\n".join(["client,examples_per_second,down_mbit,up_mbit", *rows]))
        return f"file:{file}"
    if stragglers == STRAGGLERS[2]:
        return f"jitter:{SHARE}:{FACTOR}:{SPEED}:{MBIT}:{MBIT}"
    return f"equal:{SPEED}:{MBIT}:{MBIT}"


# Staleness and stragglers, in virtual time.


def simulated(
    asked: argparse.Namespace, stragglers: str, staleness: int | None, seed: int
) -> dict[str, Any]:
    """One run under the virtual clock: its loss at each meeting, and how the time went."""
    with tempfile.TemporaryDirectory() as folder:
        world = dure.Simulated(devices=devices(stragglers, Path(folder)), server_mbit=10 * MBIT)
        run = dure.train(
            asked.task,
            dure.ParameterServer(
                servers=1, workers=WORKERS, staleness=staleness, period=asked.period
            ),
            world,
            dure.Stop(rounds=asked.rounds),
            seed=seed,
        )
    clock = dict(zip(*run.history.series("virtual_seconds"), strict=True))
    evaluations = run.history.evaluations
    ends = clock[evaluations[-1].step]
    computed = sum(one["compute_seconds"] for one in run.summary["per_worker"])
    row = {
        "stragglers": stragglers,
        "staleness": staleness,
        "seed": seed,
        "seconds": [clock.get(one.step, 0.0) for one in evaluations],
        "loss": [one.metrics["test_loss"] for one in evaluations],
        "accuracy": evaluations[-1].metrics["test_accuracy"],
        "idle": 1 - computed / (WORKERS * ends),
        "observed": run.summary["facts"][0]["parameter_server"]["staleness"],
    }
    show(
        f"{stragglers}; staleness {named(staleness)}, seed {seed}: {ends:.1f} s, loss "
        f"{row['loss'][-1]:.4f}, idle {row['idle']:.0%}"
    )
    return row


def at_loss(row: dict[str, Any], target: float) -> float | None:
    """Seconds until a loss, on the best-so-far curve, interpolated between evaluations."""
    best = row["loss"][0]
    for number in range(1, len(row["loss"])):
        loss = min(best, row["loss"][number])
        if loss <= target:
            before, after = row["seconds"][number - 1], row["seconds"][number]
            share = (best - target) / (best - loss) if best > loss else 1.0
            return float(before + share * (after - before))
        best = loss
    return None


def at_seconds(row: dict[str, Any], seconds: float) -> float:
    """The loss at a time, interpolated between evaluations; at the end for a later one."""
    times = row["seconds"]
    for number in range(1, len(times)):
        if times[number] >= seconds:
            share = (seconds - times[number - 1]) / (times[number] - times[number - 1])
            before, after = row["loss"][number - 1], row["loss"][number]
            return float(before + share * (after - before))
    return float(row["loss"][-1])


def compared(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each against the synchronous workers of its stragglers and seed; medians of the seeds."""
    found = []
    for stragglers in STRAGGLERS:
        for staleness in STALENESS:
            reached, faster, then = [], [], []
            for row in _of(rows, stragglers, staleness):
                synchronous = _one(rows, stragglers, 0, row["seed"])
                asynchronous = _one(rows, stragglers, None, row["seed"])
                target = synchronous["loss"][len(synchronous["loss"]) // 2]
                seconds = at_loss(row, target)
                base = at_loss(synchronous, target)
                reached.append(seconds)
                faster.append(None if seconds is None or base is None else base / seconds)
                then.append(at_seconds(row, asynchronous["seconds"][-1]))
            own = _of(rows, stragglers, staleness)
            found.append(
                {
                    "stragglers": stragglers,
                    "staleness": staleness,
                    "seconds_to_loss": middle(reached),
                    "times_faster": middle(faster),
                    "loss_when_asynchronous_end": middle(then),
                    "accuracy": middle([row["accuracy"] for row in own]),
                    "idle": middle([row["idle"] for row in own]),
                    "mean_staleness": middle([_mean(row["observed"]) for row in own]),
                }
            )
    return found


def _of(
    rows: Sequence[dict[str, Any]], stragglers: str, staleness: int | None
) -> list[dict[str, Any]]:
    return [row for row in rows if (row["stragglers"], row["staleness"]) == (stragglers, staleness)]


def _one(
    rows: Sequence[dict[str, Any]], stragglers: str, staleness: int | None, seed: int
) -> dict[str, Any]:
    return next(row for row in _of(rows, stragglers, staleness) if row["seed"] == seed)


def _mean(observed: Sequence[Sequence[int]]) -> float:
    return sum(behind * often for behind, often in observed) / sum(often for _, often in observed)


def middle(values: Sequence[float | None]) -> float | None:
    """The median; None where a run has none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


# The same in real time.


def slow(stragglers: str, file: Path, outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy that sleeps while a worker trains, as a slow machine would compute."""
    if torch.is_grad_enabled():
        time.sleep(0.01 * (FACTOR if _is_slow(stragglers, file) else 1))
    return torch.nn.functional.cross_entropy(outputs, targets)


_MINE: dict[str, Any] = {}
"""What this process has found out about itself, by the file of its run."""


def _is_slow(stragglers: str, file: Path) -> bool:
    if stragglers == STRAGGLERS[2]:
        return bool(_MINE.setdefault("draws", random.Random(os.getpid())).random() < SHARE)
    if stragglers == STRAGGLERS[1]:
        # The first worker that computes is the slow one.
        if str(file) not in _MINE:
            try:
                os.close(os.open(file, os.O_CREAT | os.O_EXCL))
                _MINE[str(file)] = True
            except FileExistsError:
                _MINE[str(file)] = False
        return bool(_MINE[str(file)])
    return False


def real(asked: argparse.Namespace, stragglers: str, staleness: int | None) -> dict[str, Any]:
    """One run in processes of this machine: seconds of training, and how they went."""
    with tempfile.TemporaryDirectory() as folder:
        loss = partial(slow, stragglers, Path(folder) / "slow")
        run = dure.train(
            replace(dure.load_task("digits"), loss=loss),
            dure.ParameterServer(servers=1, workers=WORKERS, staleness=staleness, period=60),
            stop=dure.Stop(rounds=asked.real_rounds),
        )
    workers = [one for one in run.summary["per_worker"] if one["name"].startswith("worker")]
    spent = sum(one["compute_seconds"] for one in workers)
    row = {
        "stragglers": stragglers,
        "staleness": staleness,
        "seconds": run.summary["seconds"],
        "loss": run.summary["test_loss"],
        "idle": 1 - spent / (WORKERS * run.summary["seconds"]),
    }
    show(
        f"real time: {stragglers}; staleness {named(staleness)}: {row['seconds']:.2f} s, loss "
        f"{row['loss']:.4f}, idle {row['idle']:.0%}"
    )
    return row


# Many workers at the links of few servers.


def crowded(workers: int, servers: int, mbit: float) -> dict[str, Any]:
    """Synchronous workers of one example each, at servers whose links are narrow."""
    run = dure.train(
        dure.load_task("digits", model="logistic"),
        dure.ParameterServer(servers=servers, workers=workers, batch_size=workers, period=1),
        dure.Simulated(devices=f"equal:10:{MBIT}:{MBIT}", server_mbit=mbit),
        dure.Stop(rounds=1),
    )
    nbytes = sum(run.summary["facts"][0]["parameter_server"]["shard_bytes"])
    row = {
        "workers": workers,
        "servers": servers,
        "seconds": run.summary["numbers"]["virtual_seconds"],
        # All weights go out to every worker. Gradients come in the other way, meanwhile.
        "links": workers * nbytes / servers / (mbit * 125_000),
        "idle": run.summary["numbers"]["waiting"],
    }
    show(
        f"{workers} workers, {servers} servers: {row['seconds']:.3f} s a step, links "
        f"{row['links']:.3f} s, idle {row['idle']:.0%}"
    )
    return row


# What comes of it.


def draw(rows: list[dict[str, Any]], crowd: list[dict[str, Any]], folder: Path) -> None:
    loss = Axis("test loss", log=True)
    panels = [
        lines(
            f"Stragglers: {stragglers}",
            [
                Curve(f"staleness {named(staleness)}", own["seconds"], own["loss"])
                for staleness in STALENESS
                for own in [_one(rows, stragglers, staleness, 0)]
            ],
            Axis("virtual seconds"),
            loss,
        )
        for stragglers in STRAGGLERS
    ]
    idle = {
        stragglers: [
            100 * (middle([row["idle"] for row in _of(rows, stragglers, staleness)]) or 0.0)
            for staleness in STALENESS
        ]
        for stragglers in STRAGGLERS
    }
    names = [f"staleness {named(staleness)}" for staleness in STALENESS]
    panels.append(bars("Idle share of the workers' time", names, idle, Axis("%")))
    title = "Loss against time, and idle time, by staleness and stragglers"
    save(folder / "parameter-server-staleness.svg", title, panels)
    curves = []
    for servers in dict.fromkeys(row["servers"] for row in crowd):
        own = [row for row in crowd if row["servers"] == servers]
        workers = [row["workers"] for row in own]
        plural = "servers" if servers > 1 else "server"
        name = f"{servers} {plural}"
        curves.append(Curve(name, workers, [row["seconds"] for row in own], marks=True))
        links = [row["links"] for row in own]
        curves.append(Curve(f"{name}: its links alone", workers, links, dashed=True))
    save(
        folder / "parameter-server-links.svg",
        "Many workers at the links of few servers",
        lines(
            "A step of all workers",
            curves,
            Axis("workers", log=True),
            Axis("virtual seconds", log=True),
        ),
    )


def describe(
    rows: list[dict[str, Any]], timed: list[dict[str, Any]], crowd: list[dict[str, Any]], page: Path
) -> None:
    def of(row: dict[str, Any], key: str, form: str) -> str:
        return "" if row[key] is None else format(row[key], form)

    first = [
        [
            row["stragglers"],
            named(row["staleness"]),
            of(row, "seconds_to_loss", ".1f"),
            of(row, "times_faster", ".2f"),
            of(row, "loss_when_asynchronous_end", ".3f"),
            of(row, "accuracy", ".1%"),
            idleness.written(row["idle"]),
            of(row, "mean_staleness", ".2f"),
        ]
        for row in rows
    ]
    second = [
        [
            row["stragglers"],
            named(row["staleness"]),
            f"{row['seconds']:.2f}",
            f"{_synchronous(timed, row) / row['seconds']:.2f}",
            f"{row['loss']:.3f}",
            idleness.written(row["idle"]),
        ]
        for row in timed
    ]
    third = [
        [
            f"{row['workers']:,}",
            str(row["servers"]),
            f"{row['seconds']:.3f}",
            f"{row['links']:.3f}",
            idleness.written(row["idle"]),
        ]
        for row in crowd
    ]
    fill(
        page,
        {
            "stragglers": table(
                [
                    "stragglers",
                    "staleness",
                    "seconds to the loss",
                    "times faster",
                    "loss at equal time",
                    "accuracy at the end",
                    IDLE,
                    "observed staleness",
                ],
                first,
            ),
            "real": table(
                ["stragglers", "staleness", "seconds", "times faster", "loss at the end", IDLE],
                second,
            ),
            "links": table(["workers", "servers", "seconds a step", "links alone, s", IDLE], third),
        },
    )


def _synchronous(timed: Sequence[dict[str, Any]], row: dict[str, Any]) -> float:
    return next(
        one["seconds"]
        for one in timed
        if (one["stragglers"], one["staleness"]) == (row["stragglers"], 0)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST's four IDX files")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--period", type=int, default=88, help="steps between two meetings")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--real-rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="fewer runs, to see that it works")
    parser.add_argument("--figures", type=Path, help="folder for the figures")
    parser.add_argument("--page", type=Path, help="the page whose tables to fill")
    takes_result(parser)
    asked = parser.parse_args()
    many = MANY
    if asked.quick:
        asked.seeds, asked.rounds, asked.real_rounds, many = 1, 3, 1, MANY[:2]
    if asked.data is None:
        asked.task = dure.load_task("digits", lr=0.1)
    else:
        asked.task = dure.load_task("fashion-mnist", data=str(asked.data), model="2nn", lr=0.1)
    rows = [
        simulated(asked, stragglers, staleness, seed)
        for stragglers in STRAGGLERS
        for staleness in STALENESS
        for seed in range(asked.seeds)
    ]
    timed = [
        real(asked, stragglers, staleness)
        for stragglers in STRAGGLERS
        for staleness in (0, 4, None)
    ]
    crowd = [crowded(workers, servers, 10.0) for servers in (1, 4) for workers in many]
    result = {
        "benchmark": "parameter_server_staleness",
        "setting": f"{asked.task.name}, {WORKERS} workers, joint batch 64, {asked.rounds} rounds "
        f"of {asked.period} steps, {asked.seeds} seeds",
        "compared": compared(rows),
        "runs": rows,
        "real": timed,
        "links": crowd,
    }
    give(result, asked.result)
    if asked.figures is not None:
        draw(rows, crowd, asked.figures)
    if asked.page is not None:
        describe(result["compared"], timed, crowd, asked.page)


if __name__ == "__main__":
    main()
