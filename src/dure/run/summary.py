"""The content of summary.json (docs/run-folder.md)."""

from __future__ import annotations

from typing import Any

import msgspec

from dure.contracts.strategy import Learner
from dure.record.history import History, finite
from dure.record.meter import Counters
from dure.run.job import Job, Position

NO_WORKERS = ("server", "master", "loader")
"""Names of meters whose owners are no workers: a federation's server, the master of threads,
readers of batches."""


def summarise(
    job: Job,
    learner: Learner,
    position: Position,
    history: History,
    ended: str,
    names: list[str],
    workers: list[Counters],
) -> dict[str, Any]:
    """The content of summary.json. names, workers: all ranks, or the server or master and its
    clients or threads."""
    senders = [
        one for name, one in zip(names, workers, strict=True) if name.split()[0] not in NO_WORKERS
    ]
    total = {
        key: sum(getattr(counters, key) for counters in workers)
        for key in (
            "bytes_sent",
            "bytes_received",
            "compute_seconds",
            "communication_seconds",
            "idle_seconds",
            "hidden_seconds",
        )
    }
    per_worker = [
        {
            "name": name,
            **{
                key: value
                for key, value in msgspec.to_builtins(counters).items()
                if key != "messages_sent"
            },
        }
        for name, counters in zip(names, workers, strict=True)
    ]
    target = job.stop.target or {}
    many = sum(
        meter.stands_for for meter in learner.meters() if meter.name.split()[0] not in NO_WORKERS
    )
    count = len(senders) if len(names) > len(learner.meters()) else many
    return {
        "label": job.label,
        "strategy": job.strategy.name,
        "world": job.world,
        "unit": learner.unit,
        "ended": ended,
        "steps": position.step,
        "epochs": position.samples / len(job.task.train),
        "samples": position.samples,
        "seconds": position.seconds,
        **finite(position.metrics),
        "best": history.best(),
        "train_loss": position.loss,
        "numbers": position.numbers,
        "parameters": job.parameters,
        "workers": count,
        **total,
        "bytes_sent_per_worker": sum(counters.bytes_sent for counters in senders) / count,
        "peak_memory": max(counters.peak_memory for counters in workers),
        "per_worker": per_worker,
        "to_target": {
            name: {"target": value, "reached": history.to_target(name, value)}
            for name, value in target.items()
        },
    }
