"""The content of summary.json (docs/run-folder.md)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dure.contracts.learner import Learner
from dure.data.examples import Examples
from dure.record.history import History, finite
from dure.record.idleness import idle_share, over_busy
from dure.record.meter import Counters, sum_of_counters
from dure.record.training_amount import training_amount
from dure.run.early_stopping import monitor_of
from dure.run.job import Job, Position

SUMS = (
    "bytes_sent",
    "bytes_received",
    "compute_seconds",
    "communication_seconds",
    "idle_seconds",
    "hidden_seconds",
    "shuffle_bytes",
    "shuffle_seconds",
)
"""Counters that are added over all ranks, or over all workers of a single rank."""


def summarise(
    job: Job,
    learner: Learner,
    position: Position,
    history: History,
    *,
    ended: str,
    ranks: int,
    everybody: list[Counters],
) -> dict[str, Any]:
    """Return the content of summary.json.

    Args:
        job: description of the run.
        learner: learner of this rank.
        position: final position of the run.
        history: steps and evaluations of the run.
        ended: reason for the end.
        ranks: number of ranks.
        everybody: counters of all ranks; of a single rank, the counters of all its workers: the
            server and its clients, or the master and its threads.
    """
    meters = learner.meters()
    # With several ranks, each rank is a worker; a single rank has workers inside.
    names = [f"rank {rank}" for rank in range(ranks)] if ranks > 1 else [m.name for m in meters]
    senders = everybody
    count = ranks
    # Bytes per worker: a server or a master sends too, but does not count as a worker.
    if ranks == 1:
        pairs = zip(meters, everybody, strict=True)
        senders = [counters for meter, counters in pairs if meter.is_worker]
        count = sum(meter.stands_for for meter in meters if meter.is_worker)
    target = job.stop.target or {}
    sums = {key: sum(getattr(counters, key) for counters in everybody) for key in SUMS}
    idle = idle_share(sums["compute_seconds"] + sums["communication_seconds"], sums["idle_seconds"])
    content = {
        "label": job.label,
        "strategy": job.strategy.name,
        "world": job.world,
        "unit": job.strategy.traits.unit,
        "seed": job.seed,
        "ended": ended,
        "steps": position.step,
        "epochs": position.samples / (learner.examples or len(job.task.train)),
        "samples": position.samples,
        "seconds": position.seconds,
        **finite(position.metrics),
        "best": history.best(),
        **_best_model(job, position, history),
        **_baseline(job),
        **({"mean_of": job.strategy.traits.mean_of} if job.strategy.traits.mean_of else {}),
        "train_loss": position.loss,
        "numbers": position.numbers,
        "parameters": job.parameters,
        **({"examples_of_ranks": list(lies)} if (lies := job.task.train.rank_counts) else {}),
        "proofs": [proof._asdict() for proof in (*job.proofs, *learner.proofs)],
        "workers": count,
        **sums,
        "idle_share": idle,
        "idle_over_busy": over_busy(idle),
        "bytes_sent_per_worker": sum(counters.bytes_sent for counters in senders) / count,
        "peak_memory": max(counters.peak_memory for counters in everybody),
        **_on_devices(sum_of_counters(everybody)),
        "per_worker": list(map(_line, names, everybody)),
        "to_target": {
            name: {"target": value, "reached": history.to_target(name, value)}
            for name, value in target.items()
        },
    }
    return {**content, "training_amount": training_amount(job.config, content)._asdict()}


def _on_devices(total: Counters) -> dict[str, Any]:
    """Return the entries about accelerators; {} for a run on CPUs."""
    found: dict[str, Any] = {}
    if total.device_allocated:
        found["peak_device_memory"] = total.device_allocated
        found["peak_device_reserved"] = total.device_reserved
    if total.available_flops:
        found["mfu"] = total.model_flops / total.available_flops
    return found


def _best_model(job: Job, position: Position, history: History) -> dict[str, Any]:
    """Return the entry about the best model; {} if no model is chosen."""
    monitor = monitor_of(job.task, job.stop)
    if monitor is None or position.best is None:
        return {}
    best = position.best
    found = (one.metrics for one in reversed(history.evaluations) if one.step == best.step)
    measured = finite(next(found, {}))
    return {
        "best_model": {
            "monitor": monitor,
            "step": best.step,
            "value": best.value,
            "metrics": measured,
        }
    }


def _baseline(job: Job) -> dict[str, Any]:
    """Return the test accuracy of always predicting the most frequent class of the training data.

    Returns {} if labels are not in memory, or must not be disclosed.
    """
    task = job.task
    train = task.train
    test = None if task.test is None else task.test.sets().get("test")
    # For a dataset every example might have to be read.
    here = type(train) is Examples and type(test) is Examples
    if "accuracy" not in task.measures or not here or job.strategy.run_traits.protects:
        return {}
    known = _known(train)
    labels = _known(test)
    if known is None or labels is None:
        return {}
    share = (labels == known.mode().values).double().mean()
    return {"baseline": {"test_accuracy": float(share)}}


def _known(examples: Examples | None) -> Tensor | None:
    """Return the labels that accuracy counts; None without any."""
    labels = None if examples is None else examples.labels()
    known = None if labels is None else labels[labels >= 0]
    return None if known is None or not len(known) else known


def _line(name: str, counters: Counters) -> dict[str, Any]:
    told = counters.written()
    del told["messages_sent"]
    return {"name": name, **told}
