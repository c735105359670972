"""Run folders as docs/run-folder.md describes them, with made-up but plausible contents."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

CLASSES = 10

# What a lane does in a step: name, category, microseconds.
SERVER_ROUND = [("aggregate", "compute", 500), ("wait for clients", "idle", 8000)]
STEP = [
    ("forward", "compute", 2400),
    ("backward", "compute", 4100),
    ("all_reduce", "communication", 1900),
    ("wait", "idle", 500),
]


def write_run(
    folder: Path,
    label: str,
    *,
    workers: int = 2,
    steps: int = 460,
    evaluations: int = 20,
    federated: bool = False,
    accuracy: float | None = 0.95,
    seconds: float = 3.1,
    bytes_per_step: float = 442_000,
    target: float | None = None,
    histograms: bool = True,
    killed: bool = False,
    trace: bool = True,
    seed: int = 0,
    config: dict[str, Any] | None = None,
) -> Path:
    """A finished run, or a killed one: no summary, no trace, and half a line at the end of the
    history."""
    folder.mkdir(parents=True)
    unit = "round" if federated else "step"
    names = [f"rank {rank}" for rank in range(workers)]
    if federated:
        names = ["server"] + [f"client {client}" for client in range(workers)]
    asked: dict[str, Any] = {
        "label": label,
        "task": {"name": "digits", "options": {}},
        "strategy": {"name": "fed-avg" if federated else "data-parallel", "batch_size": 64},
        "world": {"name": "simulated"}
        if federated
        else {"name": "processes", "ranks": workers, "deadline": 60.0},
        "stop": {"epochs": 20, "steps": None, "rounds": None, "seconds": None, "target": None},
        "seed": seed,
        "evaluate_every": None,
        "checkpoint_every": None,
        "parameters": 55_210,
        "train_examples": 1437,
        "test_examples": 360,
        "classes": [str(index) for index in range(CLASSES)],
        "partition": partition(workers, histograms) if federated else None,
        "versions": {"dure": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
    }
    (folder / "config.json").write_text(json.dumps(asked | (config or {})))
    done = steps * 2 // 3 if killed else steps
    lines = _history(done, steps, evaluations, workers, accuracy, seconds, bytes_per_step, seed)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "history.jsonl").write_text(text + ('{"kind": "step", "step": 99' if killed else ""))
    if killed:
        return folder
    if trace:
        (folder / "trace.json").write_text(json.dumps(_trace(label, names, federated)))
    last = lines[-1]
    best = {
        key: (max if key == "test_accuracy" else min)(
            line["metrics"][key] for line in lines if "metrics" in line
        )
        for key in last["metrics"]
    }
    reached = (
        {
            "test_accuracy": {
                "target": target,
                "reached": steps / 3 if accuracy and accuracy >= target else None,
            }
        }
        if target
        else {}
    )
    world = (
        f"{workers} simulated clients" if federated else f"{workers} process" + "es" * (workers > 1)
    )
    summary = {
        "label": label, "strategy": asked["strategy"]["name"], "world": world, "unit": unit,
        "ended": "epochs", "steps": steps, "epochs": 20.0, "samples": 28_740, "seconds": seconds,
        **last["metrics"], "best": best, "train_loss": last["loss"], "parameters": 55_210,
        "workers": workers,
        "bytes_sent": last["bytes_sent"], "bytes_received": last["bytes_sent"],
        "bytes_sent_per_worker": last["bytes_sent"] / workers,
        "compute_seconds": last["compute_seconds"],
        "communication_seconds": last["communication_seconds"],
        "idle_seconds": last["idle_seconds"], "peak_memory": 291_504_128 + 1_000_000 * workers,
        "per_worker": [_worker(name, seconds, place) for place, name in enumerate(names)],
        "to_target": reached,
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def partition(clients: int, histograms: bool = True) -> dict[str, Any]:
    """Label shards: two classes a client."""
    chance = random.Random(clients)
    rows = [[0] * CLASSES for _ in range(clients)]
    for client, row in enumerate(rows):
        for label in (client, client * 3 + 1):
            row[label % CLASSES] += chance.randint(20, 90)
    return {
        "description": "label shards, 2 a client",
        "counts": [sum(row) for row in rows],
        "label_histograms": rows if histograms else None,
    }


def _history(
    done: int,
    steps: int,
    evaluations: int,
    workers: int,
    accuracy: float | None,
    seconds: float,
    bytes_per_step: float,
    seed: int,
) -> list[dict[str, Any]]:
    chance = random.Random(seed + steps)
    rate = max(3.0, 22 / (1 + 0.3 * seed + 0.2 * workers))
    lines: list[dict[str, Any]] = []
    every = max(1, steps // evaluations) if evaluations else steps + 1
    for step in range(done + 1):
        part = step / steps
        loss = 2.3 * math.exp(-rate / 2 * part) + 0.1 + 0.08 * chance.random()
        line = {
            "step": step, "epoch": 20 * part, "samples": round(28_740 * part),
            "loss": loss if step else None,
            "seconds": seconds * part, "bytes_sent": round(bytes_per_step * step),
            "bytes_received": 0,
            "compute_seconds": 0.7 * seconds * part, "communication_seconds": 0.2 * seconds * part,
            "idle_seconds": 0.1 * seconds * part,
        }  # fmt: skip
        if step:
            lines.append({"kind": "step", **line})
        if evaluations and (step % every == 0 or step == steps):
            metrics = {"test_loss": loss + 0.05 * chance.random()}
            if accuracy:
                metrics["test_accuracy"] = (
                    0.1 + (accuracy - 0.1) * (1 - math.exp(-rate * part)) + 0.01 * chance.random()
                )
            everybody = {
                key: line[key] * workers
                for key in line
                if key.startswith("bytes") or key.endswith("_seconds")
            }
            lines.append(
                {
                    "kind": "evaluation",
                    **line,
                    **everybody,
                    "metrics": metrics,
                    "peak_memory": 291_504_128,
                }
            )
    if not evaluations:
        lines.append({**lines[-1], "kind": "evaluation", "metrics": {}, "peak_memory": 291_504_128})
    return lines


def _worker(name: str, seconds: float, place: int) -> dict[str, Any]:
    busy = seconds * (0.9 - 0.5 * ((place * 7) % 10) / 10)
    return {
        "name": name, "compute_seconds": 0.75 * busy, "communication_seconds": 0.25 * busy,
        "idle_seconds": seconds - busy, "bytes_sent": 100, "bytes_received": 100,
        "peak_memory": 301_504_128,
    }  # fmt: skip


def _trace(label: str, names: list[str], federated: bool) -> dict[str, Any]:
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": label}}
    ]
    for lane, name in enumerate(names):
        chance = random.Random(lane)
        events.append(
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": lane, "args": {"name": name}}
        )
        events.append(
            {"ph": "M", "name": "spans_dropped", "pid": 1, "tid": lane, "args": {"count": 1234}}
        )
        now = 1520.0
        for step in range(40 if len(names) > 100 else 120):
            waits = list(SERVER_ROUND if federated and not lane else STEP)
            if step % 20 == 19:
                waits.append(("evaluate", "evaluation", 9000))
            if step % 40 == 39:
                waits.append(("checkpoint", "checkpoint", 4000))
            for name, category, usual in waits:
                length = usual * (0.7 + 0.6 * chance.random())
                span = {
                    "ph": "X",
                    "name": name,
                    "cat": category,
                    "pid": 1,
                    "tid": lane,
                    "ts": now,
                    "dur": length,
                }
                events.append({**span, "args": {"step": step}})
                now += length
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_comparison(folder: Path) -> Path:
    """Nine systems as dure compare leaves them: two federations, one that was killed, one that
    failed."""
    write_run(
        folder / "single-worker",
        "single-worker",
        workers=1,
        bytes_per_step=0,
        seconds=5.4,
        target=0.95,
    )
    write_run(folder / "ring", "data-parallel ring x2", target=0.95, seed=1)
    write_run(folder / "tree", "data-parallel tree x4", workers=4, seconds=2.2, target=0.95, seed=2)
    write_run(
        folder / "zero",
        "zero stage 2 x4",
        workers=4,
        seconds=2.6,
        target=0.95,
        accuracy=0.955,
        seed=3,
    )
    write_run(
        folder / "pipeline",
        "pipeline 1f1b x4",
        workers=4,
        bytes_per_step=60_000,
        seconds=3.8,
        target=0.95,
        seed=4,
    )
    write_run(
        folder / "local-sgd",
        "local-sgd, period 16, x4",
        workers=4,
        bytes_per_step=28_000,
        target=0.95,
        seed=5,
    )
    federation: dict[str, Any] = {
        "workers": 10,
        "federated": True,
        "steps": 50,
        "bytes_per_step": 2.2e6,
        "target": 0.95,
    }
    write_run(folder / "fed-avg", "fed-avg", **federation, accuracy=0.91, seconds=41)
    write_run(
        folder / "fed-prox", "fed-prox mu 0.1", **federation, accuracy=0.93, seconds=47, seed=7
    )
    write_run(
        folder / "split",
        "split learning, cut at layer 2",
        workers=4,
        bytes_per_step=9e5,
        seconds=8,
        killed=True,
    )
    names = [
        "single-worker",
        "ring",
        "tree",
        "zero",
        "pipeline",
        "local-sgd",
        "fed-avg",
        "fed-prox",
        "split",
    ]
    comparison = {
        "task": "digits", "seed": 0, "stop": {"epochs": 20}, "runs": names,
        "failed": {
            "scaffold": "client 3 failed in round 1: ValueError: the model has <BatchNorm2d>"
        },
    }  # fmt: skip
    (folder / "comparison.json").write_text(json.dumps(comparison))
    return folder
