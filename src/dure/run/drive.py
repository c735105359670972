"""The loop that drives every learner: advance, record, evaluate, checkpoint, until a limit is
reached.

It runs on every rank. What all ranks have to do together (an evaluation, a checkpoint, the end)
follows from numbers that all of them know, or from a wish of rank 0 that travelled with the step's
message; so no rank ever waits for one that went another way. Only rank 0 writes.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from dure.contracts.stop import Stop
from dure.contracts.strategy import (
    CHECKPOINT,
    INTERRUPT,
    STOP,
    Learner,
    Parted,
    Place,
    Progress,
    Strategy,
    Telling,
)
from dure.contracts.task import Task
from dure.errors import DureError, LossNotFiniteError, RunFolderError, WorkerFailedError
from dure.machine.compiler import left_out
from dure.machine.memory import memory_kept
from dure.machine.threads import threads, threads_for
from dure.randomness.seeds import generators_state, restore_generators, seed_generators
from dure.record.checkpoint import (
    pack_checkpoint,
    tree_from_bytes,
    tree_to_bytes,
    unpack_checkpoint,
)
from dure.record.history import Evaluation, History, Step, finite
from dure.record.meter import Counters, peak_memory, reset_peak_memory, sum_of_counters
from dure.record.run import RunFolder
from dure.record.trace import Lane, Trace

CHECKPOINT_SECONDS = 10.0
"""Without `checkpoint_every`, a checkpoint is written at the first evaluation after so many
seconds; in an elastic job, where all that came after the checkpoint is lost together with a rank,
after the first step."""

CHECKPOINT_SHARE = 0.05
"""Of the time that may go into such checkpoints; where writing one takes long, they are rarer."""

REPORT_SECONDS = 0.1

NO_WORKERS = ("server", "master", "loader")
"""Names of meters whose owners are no workers: a federation's server, the master of threads,
readers of batches."""


@dataclass(frozen=True)
class Job:
    """What is to be done, the same on every rank.

    folder: where rank 0 writes; None writes nothing. resume: go on from the folder's checkpoint, if
        it has one.
    elastic: the ranks may be ended and started again at any time, more or fewer of them.
    """

    task: Task
    strategy: Strategy
    stop: Stop
    seed: int
    label: str
    world: str
    parameters: int
    folder: Path | None = None
    evaluate_every: int | None = None
    checkpoint_every: int | None = None
    resume: bool = False
    elastic: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a run leaves. weights: on rank 0, elsewhere what that rank holds. buffers: those that
    are not weights."""

    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    history: History
    summary: dict[str, Any]


class Position(msgspec.Struct):
    """Where a run stands; it goes into every checkpoint."""

    step: int = 0
    samples: int = 0
    seconds: float = 0.0
    loss: float | None = None
    metrics: dict[str, float] = {}
    last_evaluation: int = -1
    numbers: dict[str, float | None] = {}


def drive(job: Job, place: Place) -> Outcome:
    """Does the job at this place."""
    with left_out(), memory_kept():
        return _drive(job, place)


def _drive(job: Job, place: Place) -> Outcome:
    before = generators_state()
    seed_generators(job.seed, "rank", place.group.rank, everything=True)
    reset_peak_memory()
    learner: Learner | None = None
    driver: Driver | None = None
    try:
        place.group.step = "the start"
        learner = job.strategy.learner(job.task, place, job.seed)
        driver = Driver(job, place, learner)
        with threads(threads_for(learner.flops_per_step())):
            return driver.run()
    except LossNotFiniteError as error:
        if driver is not None and error.intact:
            driver.keep_last_good()
        raise
    except DureError:
        raise
    except Exception as error:
        where = learner.where if learner is not None else f"rank {place.group.rank}"
        reason = f"{type(error).__name__}: {error}"
        raise WorkerFailedError(where, place.group.step, reason, traceback.format_exc()) from error
    finally:
        try:
            place.ending.close()
            restore_generators(before)  # the user's own draws go on as if there had been no run
        finally:
            if driver is not None and driver.folder is not None:
                driver.folder.close()


class Driver:
    """One rank's part of a run."""

    def __init__(self, job: Job, place: Place, learner: Learner) -> None:
        self.job, self.place, self.group, self.learner = job, place, place.group, learner
        self.leads = place.group.rank == 0
        self.folder = RunFolder(job.folder) if self.leads and job.folder is not None else None
        self.examples = len(job.task.train)
        self.all_threads = torch.get_num_threads()
        self.position = Position()
        self.history = History()
        self._checkpointed = time.monotonic()
        self._checkpoint_seconds = 0.0
        self._reported = 0.0

    def run(self) -> Outcome:
        if self.folder is not None:
            self.folder.hold()
        if self.job.elastic:
            self._check_folder()
        if self.job.resume:
            self._resume()
        if self.position.last_evaluation < 0:
            self._evaluate()
        limit = self.job.stop.seconds  # which a resumed run, on all ranks, may have used up
        ended = self._limit(STOP if limit is not None and self.position.seconds >= limit else 0)
        while ended is None:
            ended = self._advance()
        makes_way = (
            ended == "interrupt" and self.job.elastic
        )  # at once: torchrun waits half a minute at most
        if self.position.last_evaluation != self.position.step and not makes_way:
            self._evaluate()
        if self.job.folder is not None and self.position.step > 0:
            self._checkpoint()
        return self._finish(ended)

    def _advance(self) -> str | None:
        """One step or round and all that is due after it; returns the limit that ends the run, if
        any."""
        position = self.position
        self.group.step = f"{self.learner.unit} {position.step + 1}"
        started = time.perf_counter()
        progress = self.learner.advance(self._wish() if self.leads else 0)
        position.seconds += time.perf_counter() - started
        position.step += 1
        position.samples += progress.samples
        position.loss = position.loss if progress.loss is None else progress.loss
        position.numbers = finite(progress.numbers or {})
        self._record(progress)
        if position.step % self.evaluate_every == 0:
            self._evaluate()
        ended = self._limit(progress.wish)
        if progress.wish & CHECKPOINT and ended is None:
            self._checkpoint()
        return ended

    def _wish(self) -> int:
        """What rank 0 wants all ranks to do after the next step; decided by its clock and its user
        alone."""
        wish = 0
        seconds = self.job.stop.seconds
        if self.place.interrupted():
            wish |= STOP | INTERRUPT
        elif seconds is not None and self.position.seconds >= seconds:
            wish |= STOP
        if self.job.folder is not None:
            following, every = self.position.step + 1, self.job.checkpoint_every
            if every is not None:
                due = following % every == 0
            else:
                pause = max(CHECKPOINT_SECONDS, self._checkpoint_seconds / CHECKPOINT_SHARE)
                late = time.monotonic() - self._checkpointed > pause
                due = late and (self.job.elastic or following % self.evaluate_every == 0)
            wish |= CHECKPOINT if due else 0
        return wish

    @property
    def evaluate_every(self) -> int:
        """Steps or rounds between evaluations, as it is now: rounds may grow."""
        return self.job.evaluate_every or self.learner.units_per_epoch

    def _limit(self, wish: int) -> str | None:
        """The limit that was reached. Seconds and interrupts are rank 0's to see: it wished for the
        stop."""
        position, stop = self.position, self.job.stop
        reached = stop.reached(
            self.learner.unit, position.step, position.samples, self.examples, position.metrics
        )
        if self.group.size == 1:  # nobody else has to be told first
            wish |= self._wish()
        if reached is not None or not wish & STOP:
            return reached
        return "interrupt" if wish & INTERRUPT else "seconds"

    def _record(self, progress: Progress) -> None:
        counters, position = self.group.meter.counters, self.position
        record = Step(
            position.step,
            position.samples / self.examples,
            position.samples,
            progress.loss,
            position.seconds,
            counters.bytes_sent,
            counters.bytes_received,
            counters.compute_seconds,
            counters.communication_seconds,
            counters.idle_seconds,
            position.numbers or None,
        )
        self.history.append(record)
        if self.folder is not None:
            self.folder.append(record)
        if self.leads and time.monotonic() - self._reported > REPORT_SECONDS:
            self._report()

    def _report(self) -> None:
        self._reported = time.monotonic()
        position = self.position
        self.place.report(
            {
                "unit": self.learner.unit,
                "step": position.step,
                "epoch": position.samples / self.examples,
                "samples": position.samples,
                "seconds": position.seconds,
                "loss": position.loss,
                "metrics": dict(position.metrics),
                "evaluated": position.last_evaluation,
            }
        )

    def _all_counters(self) -> list[Counters]:
        """Every worker's counters on every rank, in order of rank (the server first, then its
        clients)."""
        mine = self.learner.meters()
        mine[0].counters.peak_memory = peak_memory()
        width = len(Counters().as_list())
        values = [value for meter in mine for value in meter.counters.as_list()]
        rows = [
            row[start : start + width]
            for row in self.group.all_gather_values(values)
            for start in range(0, len(row), width)
        ]
        return [Counters.from_list(row) for row in rows]

    def _evaluate(self) -> None:
        position = self.position
        if position.step == 0:
            self.group.step = "the first evaluation"
        with threads(self.all_threads):
            position.metrics = self.learner.evaluate()
        position.last_evaluation = position.step
        workers = self._all_counters()
        record = Evaluation(
            position.step,
            position.samples / self.examples,
            position.samples,
            position.loss,
            position.seconds,
            finite(position.metrics),
            sum(c.bytes_sent for c in workers),
            sum(c.bytes_received for c in workers),
            sum(c.compute_seconds for c in workers),
            sum(c.communication_seconds for c in workers),
            sum(c.idle_seconds for c in workers),
            max(c.peak_memory for c in workers),
        )
        self.history.append(record)
        if self.folder is not None:
            self.folder.append(record)
            self.folder.flush()
        if self.leads:
            self._report()

    def _checkpoint(self) -> None:
        """All ranks come here after the same step."""
        started = time.perf_counter()
        self._save(self._all_counters())
        self._checkpointed = time.monotonic()
        self._checkpoint_seconds = time.perf_counter() - started
        self.group.meter.mark(
            "checkpoint", "checkpoint", started, time.perf_counter(), self.position.step
        )

    def keep_last_good(self) -> None:
        """After a loss that was not finite: keeps the state before that step, unless it is spoilt
        as well."""
        if self.folder is None or self.position.step == 0:
            return
        if all(
            bool(w.isfinite().all())
            for w in self.learner.weights().values()
            if w.is_floating_point()
        ):
            self._save(
                [meter.counters for meter in self.learner.meters()]
            )  # the others are ending as well

    def _save(self, workers: list[Counters]) -> None:
        """Writes the state as a checkpoint, on rank 0. Every rank calls it, for a model may lie on
        all of them."""
        learner = self.learner.state()
        if isinstance(self.learner, Parted):
            parts = self.group.gather_bytes(tree_to_bytes(self.learner.part()))
            learner = {**learner, "parts": [tree_from_bytes(part) for part in parts]}
        state = {
            "position": msgspec.to_builtins(self.position),
            "workers": [counters.as_list() for counters in workers],
            "learner": learner,
            "generators": generators_state(),
            "ranks": self.group.size,
        }
        weights = self.learner.weights()
        if self.folder is not None:
            self.folder.save_checkpoint(self.position.step, pack_checkpoint(weights, state))

    def _resume(self) -> None:
        """Every rank takes over rank 0's checkpoint, so that only rank 0 needs the folder."""
        parts = self.folder.read_checkpoint() if self.folder is not None else None
        packed = self.group.broadcast_bytes(msgspec.msgpack.encode(parts) if self.leads else None)
        received = msgspec.msgpack.decode(packed, type=tuple[bytes, bytes, bytes] | None)
        if received is None:
            if self.folder is not None:
                self.folder.rewrite_history(History())
            return
        weights, state = unpack_checkpoint(received)
        self._check_ranks(state.get("ranks", self.group.size))
        self.learner.restore(weights, state["learner"])
        self.position = msgspec.convert(state["position"], Position)
        for meter, counters in zip(
            self.learner.meters(), self._counters_from(state["workers"]), strict=True
        ):
            meter.counters = counters
        restore_generators(state["generators"])
        if self.folder is not None:
            self.history = self.folder.history().until(self.position.step)
            self.folder.rewrite_history(self.history)

    def _check_folder(self) -> None:
        """Raises RunFolderError if a rank does not see the folder: it could not go on if it became
        rank 0."""
        path = self.job.folder
        sees = [
            seen
            for (seen,) in self.group.all_gather_values([float(path is not None and path.is_dir())])
        ]
        blind = ", ".join(f"rank {rank}" for rank, seen in enumerate(sees) if not seen)
        if blind:
            raise RunFolderError(
                f"{blind} does not see the run folder {path}: an elastic job needs one on a disk "
                f"that all its machines "
                "share, for any of them may become rank 0"
            )

    def _check_ranks(self, before: int) -> None:
        """Raises RunFolderError if the checkpoint is of another number of ranks, each of which held
        its own part."""
        name, now = self.job.strategy.name, self.group.size
        if (
            before != now
            and isinstance(self.learner, Parted)
            and not getattr(self.learner, "resizes", False)
        ):
            raise RunFolderError(
                f"{self.job.folder} was written by {before} ranks, and {name} cannot go on with "
                f"{now}, for each rank "
                f"keeps a state of its own: start {before} again"
            )

    def _counters_from(self, rows: list[list[float]]) -> list[Counters]:
        """What the meters of this place take over from a checkpoint's. Ranks that are gone leave
        theirs to those that are there, so that sums over all workers go on; new ranks begin at
        zero."""
        here = len(self.learner.meters())
        first, there = (self.group.rank, self.group.size) if self.group.size > 1 else (0, here)
        return [sum_of_counters(rows[index::there]) for index in range(first, first + here)]

    def _finish(self, ended: str) -> Outcome:
        names = [meter.name for meter in self.learner.meters()]
        if self.group.size > 1:
            names = [f"rank {rank}" for rank in range(self.group.size)]
        workers = self._all_counters()
        lanes = self._lanes()
        summary = summarise(
            self.job, self.learner, self.position, self.history, ended, names, workers
        )
        if isinstance(self.learner, Telling):
            told = self.group.gather_bytes(msgspec.json.encode(self.learner.facts()))
            summary["facts"] = [msgspec.json.decode(facts) for facts in told]
        weights = {name: tensor.detach().clone() for name, tensor in self.learner.weights().items()}
        buffers = {
            name: tensor.detach().clone()
            for name, tensor in self.learner.state()["buffers"].items()
        }
        if self.folder is not None:
            self.folder.finish(weights, summary, lanes)
        return Outcome(weights, buffers, self.history, summary)

    def _lanes(self) -> list[Lane]:
        """The timelines of all ranks, on rank 0."""
        parts = self.group.gather_bytes(self.place.trace.packed(self.place.clock_offset))
        return [lane for part in parts for lane in Trace.unpacked(part)]


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
