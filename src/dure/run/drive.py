"""The loop that drives every learner: advance, record, evaluate, checkpoint, until a limit.

It runs on every rank. What all ranks have to do together (an evaluation, a checkpoint, the end)
follows from numbers that all of them know, or from a wish of rank 0 that travelled with the step's
message; so no rank ever waits for one that went another way. Only rank 0 writes.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from dure.contracts.strategy import (
    CALLBACK,
    CHECKPOINT,
    INTERRUPT,
    SPENT,
    STOP,
    Interrupted,
    Learner,
    Place,
    Progress,
)
from dure.errors import (
    DureError,
    LossNotFiniteError,
    StopRun,
    WorkerFailedError,
    described,
    traceback_of,
)
from dure.machine.compiler import left_out
from dure.machine.memory import give_back, memory_kept, memory_returned
from dure.machine.threads import threads, threads_for
from dure.randomness.seeds import generators_state, restore_generators, seed_generators
from dure.record.best import go_back, keep_best
from dure.record.history import Evaluation, History, Record, Step, finite
from dure.record.meter import Counters, peak_memory, reset_peak_memory, sum_of_counters
from dure.record.now import Now, forget
from dure.record.on_disk import Leaf, TensorsOnDisk, in_memory
from dure.record.run import RunFolder
from dure.record.settings import LINEAGE
from dure.record.trace import Lane, Trace
from dure.run import early
from dure.run.averaged import with_average
from dure.run.checkpoints import Checkpoints
from dure.run.job import Job, Outcome, Position
from dure.run.lineage import METADATA, lineage_of, signed
from dure.run.own_data import check_as_before, with_own_data
from dure.run.summary import summarise
from dure.run.validation import with_validation
from dure.run.watch import page_of


def drive(job: Job, place: Place) -> Outcome:
    """Does the job at this place."""
    trains = place.network is None or job.strategy.trains_at_server
    keeps = trains and not job.strategy.spares_memory
    memory = memory_kept() if keeps else memory_returned()
    with left_out(), memory:
        return _drive(job, place)


def _drive(job: Job, place: Place) -> Outcome:
    # A state of its own for each rank, for whatever draws outside of steps: those seed anew.
    before = generators_state()
    seed_generators(job.seed, "rank", place.group.rank, everything=True)
    reset_peak_memory()
    learner: Learner | None = None
    driver: Driver | None = None
    try:
        place.group.step = "the start"
        # The prepared model itself where this process has prepared it; elsewhere one made anew.
        if job.fresh is not None:
            place.prepared = job.fresh.take
        job = dataclasses.replace(job, task=with_validation(job.task, job.seed))
        job = dataclasses.replace(job, task=with_own_data(job.task, job.strategy, place.group))
        place.check = job.check
        place.folder = job.folder
        place.config = job.config
        place.page = None if job.folder is None else partial(page_of, job.folder)
        if job.strategy.led and place.group.rank:
            ended = job.strategy.assist(job.task, place, job.seed)
            return Outcome({}, {}, History(), {"ended": ended})
        learner = with_average(
            job.strategy.learner(job.task, place, job.seed), job.task.ema, place.group
        )
        if job.strategy.led:
            # What follows is the affair of this rank alone: others may be dead by then.
            place.group = place.group.alone()
        driver = Driver(job, place, learner)
        # After the driver is made: it notes how many threads evaluations may use.
        with threads(threads_for(learner.flops_per_step())):
            return driver.run()
    except LossNotFiniteError as error:
        # The loss was seen before the update: the weights are still those of the step before.
        if driver is not None and error.intact:
            driver.checkpoints.keep_last_good(driver.position)
        raise
    except WorkerFailedError as error:
        if driver is not None and driver.checkpoints.doubtful:
            raise driver.checkpoints.perhaps_damaged(error) from error
        raise
    except DureError:
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # An error of the user's own code, or of ours: told with the rank and the step. So is
        # SystemExit, which would end the process as if all were well.
        where = learner.where if learner is not None else f"rank {place.group.rank}"
        step = place.group.step
        failed = WorkerFailedError(where, step, described(error), traceback_of(error))
        if driver is not None and driver.checkpoints.doubtful:
            raise driver.checkpoints.perhaps_damaged(failed) from error
        raise failed from error
    finally:
        try:
            # First, since threads of the run may draw from the generators until they end.
            place.ending.close()
            restore_generators(before)  # the user's own draws go on as if there had been no run
        finally:
            if driver is not None and driver.folder is not None:
                driver.folder.close()


class Driver:
    """One rank's part of a run."""

    def __init__(self, job: Job, place: Place, learner: Learner) -> None:
        self.job = job
        self.place = place
        self.group = place.group
        self.learner = learner
        self.leads = place.group.rank == 0
        # None on all ranks but rank 0, whether or not the run has a folder.
        self.folder = RunFolder(job.folder) if self.leads and job.folder is not None else None
        self.all_threads = torch.get_num_threads()
        self.position = Position(lies=list(job.task.train.lies or ()))
        self.history = History()
        self.checkpoints = Checkpoints(job, self.group, learner, self.folder)
        self.proofs = [*job.proofs, *learner.proofs]
        self.travelled = 0.0
        self.monitor = early.monitor_of(job.task, job.stop)
        self.best: Mapping[str, Tensor] | None = None
        """The weights of the best evaluation, on rank 0, where no folder has them."""
        # Of several ranks no one knows alone what all of them have done.
        tells = self.folder is not None and self.group.size == 1
        self.now = Now(self.folder.path) if self.folder is not None and tells else None
        if self.now is not None:
            self.now.facts = learner.facts
            place.report = _heard_by(self.now, place.report)
        self._stopped = False
        """Whether a callback wants the run to end."""
        self._reported = 0.0
        self._began = 0.0
        """When the step began."""
        self._went_past = False
        """Whether something was learned after the newest step, in the middle of the next one."""
        if self.group.size == 1:
            place.wish = self._wish_within

    def run(self) -> Outcome:
        """From the start, or the newest checkpoint, to the first limit; called on every rank."""
        # Held before anything is read: nobody else may change it meanwhile.
        if self.folder is not None:
            self.folder.hold()
        if self.job.elastic:
            self.checkpoints.check_folder()
        if self.job.resume:
            self._resume()
        # A new run is measured untrained; a resumed one has been.
        if self.position.last_evaluation < 0:
            self._evaluate()
        limit = self.job.stop.seconds  # which a resumed run, on all ranks, may have used up
        # Before the first step too: a run that is resumed may have reached its limits already.
        ended = self._limit(STOP if limit is not None and self.position.seconds >= limit else 0)
        while ended is None:
            ended = self._advance()
        # at once: torchrun waits half a minute at most
        makes_way = ended == "interrupt" and self.job.elastic
        position = self.position
        measured = position.last_evaluation == position.step and not self._went_past
        if not measured and not makes_way:
            self._evaluate()
        # Asked of the job, not of the own folder: all ranks have to come, or none.
        if self.job.folder is not None and (position.step > 0 or position.midway):
            self._checkpoint()
        return self._finish(ended)

    def _advance(self) -> str | None:
        """One step or round and all that is due after it.

        Returns the limit that ends the run, if any.
        """
        position = self.position
        self.group.step = f"{self.learner.unit} {position.step + 1}"
        self._began = time.perf_counter()
        try:
            progress = self.learner.advance(self._wish() if self.leads else 0)
        except Interrupted:
            return "interrupt"
        # Training time only: evaluations and checkpoints are left out.
        position.seconds += time.perf_counter() - self._began
        position.samples += progress.samples
        position.midway = not progress.whole
        # A round in which no update counted keeps the loss of the round before.
        position.loss = position.loss if progress.loss is None else progress.loss
        position.numbers = finite(progress.numbers or {})
        if position.midway:
            self._went_past = True
            return self._limit(progress.wish)
        position.step += 1
        self._record(progress)
        # Before the limit is looked at: a target is reached by an evaluation.
        if position.step % self.evaluate_every == 0:
            self._evaluate()
        ended = self._limit(progress.wish)
        # At the end comes a checkpoint anyway, after the last evaluation.
        if progress.wish & CHECKPOINT and ended is None:
            self._checkpoint()
        return ended

    def _wish(self) -> int:
        """What rank 0 wants all ranks to do after the next step.

        Its clock and its user alone decide that.
        """
        wish = 0
        seconds = self.job.stop.seconds
        if self.place.interrupted():
            wish |= STOP | INTERRUPT
        elif self._stopped:
            wish |= STOP | CALLBACK
        elif seconds is not None and self.position.seconds >= seconds:
            wish |= STOP
        if self.job.folder is not None:
            # The wish travels with the step to come, and is about what follows that step.
            following = self.position.step + 1
            due = self.checkpoints.due(following, following % self.evaluate_every == 0)
            wish |= CHECKPOINT if due else 0
        return wish

    def _wish_within(self) -> int:
        """What is wished in the middle of a step, where nobody else has to be told."""
        stop = self.job.stop
        if self.place.interrupted():
            return STOP | INTERRUPT
        spent = self.position.seconds + time.perf_counter() - self._began
        if stop.seconds is not None and spent >= stop.seconds:
            return STOP
        return STOP if stop.bytes is not None and self._travelled() >= stop.bytes else 0

    @property
    def examples(self) -> int:
        """Of an epoch; of a federation whose clients do not say, as far as sums have told."""
        return self.learner.examples or len(self.job.task.train) or 1

    @property
    def evaluate_every(self) -> int:
        """Steps or rounds between evaluations, as it is now: rounds may grow."""
        return self.job.evaluate_every or self.learner.units_per_epoch

    def _limit(self, wish: int) -> str | None:
        """The limit that was reached.

        Seconds and interrupts are rank 0's to see: it wished for the stop.
        """
        position = self.position
        stop = self.job.stop
        # Asked of all ranks where it is a limit, and only then.
        if stop.bytes is not None:
            self.travelled = self._travelled()
        reached = stop.reached(
            self.learner.unit,
            position.step,
            position.samples,
            self.examples,
            position.metrics,
            self.travelled,
        )
        reached = reached or self._waited() or self.learner.exhausted()
        if self.group.size == 1:  # nobody else has to be told first
            wish |= self._wish()
        # A limit that all ranks know comes before one that only rank 0 has seen.
        if reached is not None or not wish & STOP:
            return reached
        if wish & INTERRUPT:
            return "interrupt"
        if wish & CALLBACK:
            return "callback"
        return "transfers" if wish & SPENT else "seconds"

    def _waited(self) -> str | None:
        """Whether the validation set's metric has not been better for long enough."""
        patience = self.job.stop.patience
        best = self.position.best
        if patience is None or best is None or best.waited < patience:
            return None
        return "patience"

    def _travelled(self) -> float:
        """Bytes that all workers have sent, as summary.json adds them up: each counts once."""
        mine = sum(meter.counters.bytes_sent for meter in self.learner.meters())
        return sum(told for (told,) in self.group.all_gather_values([float(mine)], "bytes sent"))

    def _record(self, progress: Progress) -> None:
        counters = self.group.meter.counters
        position = self.position
        record = Step(
            step=position.step,
            epoch=position.samples / self.examples,
            samples=position.samples,
            loss=progress.loss,
            seconds=position.seconds,
            bytes_sent=counters.bytes_sent,
            bytes_received=counters.bytes_received,
            compute_seconds=counters.compute_seconds,
            communication_seconds=counters.communication_seconds,
            idle_seconds=counters.idle_seconds,
            numbers=position.numbers or None,
        )
        self.history.append(record)
        if self.folder is not None:
            self.folder.append(record)
        if self.now is not None:
            self.now.write()
        self._tell(record)
        if self.leads and time.monotonic() - self._reported > self.place.report_seconds:
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
                "numbers": dict(position.numbers),
                "bytes": self.travelled,
                "evaluated": position.last_evaluation,
                "proofs": [tuple(proof) for proof in self.proofs],
            }
        )

    def _all_counters(self) -> list[Counters]:
        """Every worker's counters on every rank, in order of rank.

        In a federation: the server's first, then its clients'.
        """
        mine = self.learner.meters()
        # The peak is the whole process's: one of its workers stands for all. Before the run was
        # interrupted it may have been higher.
        mine[0].counters.peak_memory = max(mine[0].counters.peak_memory, peak_memory())
        values = [value for meter in mine for value in meter.counters.as_list()]
        workers: list[Counters] = []
        for told in self.group.all_gather_values(values):
            workers.extend(Counters.in_a_row(told))
        return workers

    def _evaluate(self) -> None:
        position = self.position
        if position.step == 0:
            self.group.step = "the first evaluation"
        # Large batches, no gradients: more threads pay even where a step is small.
        with threads(self.all_threads):
            position.metrics = self.learner.evaluate()
        numbers = finite(self.learner.numbers())
        position.numbers = {**position.numbers, **numbers}
        position.last_evaluation = position.step
        workers = self._all_counters()
        total = sum_of_counters(workers)
        record = Evaluation(
            step=position.step,
            epoch=position.samples / self.examples,
            samples=position.samples,
            loss=position.loss,
            seconds=position.seconds,
            metrics=finite(position.metrics),
            bytes_sent=total.bytes_sent,
            bytes_received=total.bytes_received,
            compute_seconds=total.compute_seconds,
            communication_seconds=total.communication_seconds,
            idle_seconds=total.idle_seconds,
            peak_memory=total.peak_memory,
            numbers=numbers or None,
        )
        self.history.append(record)
        if self.folder is not None:
            self.folder.append(record)
            # So that a run that is killed now keeps this evaluation.
            self.folder.flush(patient=True)
        if self.leads:
            self._report()
        if self.monitor is not None:
            self._choose(self.monitor)
        self._tell(record)

    def _choose(self, monitor: str) -> None:
        """Keeps the model if it is the best one so far. All ranks come to the same result."""
        position = self.position
        before = position.best
        position.best = early.after(before, self.job.stop, monitor, position.step, position.metrics)
        if before is not None and position.best.step == before.step:
            return
        # On every rank: a model that is divided is put together here.
        weights = self.learner.weights()
        if self.folder is not None:
            keep_best(self.folder.path, weights, position.step)
        elif self.leads and self.job.folder is None:
            self.best = {name: _kept(one) for name, one in weights.items()}

    def _tell(self, record: Record) -> None:
        """Callbacks hear of it, in the process that the user has called from."""
        if not self.leads or not self.job.told:
            return
        content = History.encode(record)
        about = {"counts": self.learner.unit, "step": self.position.step, "record": content}
        try:
            self.place.report(about)
        except StopRun:
            self._stopped = True

    def _checkpoint(self) -> None:
        """All ranks come here after the same step."""
        self.checkpoints.write(self.position, self._all_counters())

    def _resume(self) -> None:
        """Goes on from the newest checkpoint, or from the start.

        What the history says of later steps is taken back.
        """
        position = self.checkpoints.read()
        if position is not None:
            check_as_before(self.job.folder, position.lies, self.position.lies)
            self.position = position
        if self.folder is not None:
            # Steps after the checkpoint will be done again, and written again.
            self.history = self.folder.take_back()
            if self.monitor is not None:
                best = self.position.best
                go_back(self.folder.path, None if best is None else best.step)

    def _finish(self, ended: str) -> Outcome:
        self.learner.ended(ended)
        workers = self._all_counters()
        # Facts on all ranks or on none: the gathering is one of all ranks.
        facts = self.learner.facts()
        told = None if facts is None else self.group.gather_bytes(msgspec.json.encode(facts))
        lanes = self._lanes()
        self.learner.rest()
        give_back()
        weights = _all_apart(self.learner.weights())
        buffers = {name: _apart(one) for name, one in self.learner.passing_buffers().items()}
        # To gather the weights may take the most memory of all. What it sends is no training.
        for one, later in zip(workers, self._all_counters(), strict=True):
            one.peak_memory = later.peak_memory
        summary = summarise(
            self.job,
            self.learner,
            self.position,
            self.history,
            ended=ended,
            ranks=self.group.size,
            everybody=workers,
        )
        if told is not None:
            summary["facts"] = [msgspec.json.decode(each) for each in told]
        if self.learner.elsewhere:
            summary["weights_elsewhere"] = list(self.learner.elsewhere)
        summary, metadata, beside = self._signed(summary)
        if self.folder is not None:
            summary = self.folder.finish(weights, summary, lanes, metadata, beside)
            forget(self.folder.path)
        return Outcome(weights, buffers, self.history, summary, self.best)

    def _signed(self, summary: dict[str, Any]) -> tuple[dict[str, Any], Any, Any]:
        """(the summary, metadata of the model, what lies beside it), where a server signs it."""
        sign = self.place.signs
        if sign is None:
            return summary, None, None
        lineage = lineage_of(self.job.config, summary)
        return (
            {**summary, "lineage": lineage},
            {METADATA: json.dumps(lineage, default=str)},
            {LINEAGE: partial(signed, lineage, sign=sign)},
        )

    def _lanes(self) -> list[Lane]:
        """The timelines of all ranks, on rank 0."""
        parts = self.group.gather_bytes(self.place.trace.packed(self.place.clock_offset))
        return [lane for part in parts for lane in Trace.unpacked(part)]


def _heard_by(
    now: Now, report: Callable[[dict[str, Any]], None]
) -> Callable[[dict[str, Any]], None]:
    """What tells whoever watches the run, and keeps what a server says of its clients."""

    def heard(event: dict[str, Any]) -> None:
        now.hears(event)
        report(event)

    return heard


def _all_apart(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Weights of which each is apart; those in files are, whenever they are asked for."""
    if isinstance(weights, TensorsOnDisk):
        return weights
    return {name: _apart(tensor) for name, tensor in weights.items()}


def _kept(leaf: Leaf) -> Tensor:
    """The tensor as it is now, in memory that is its own."""
    return in_memory(leaf).detach().cpu().clone()


def _apart(tensor: Tensor) -> Tensor:
    """The tensor without what else lies in its memory, such as the rest of a flat buffer."""
    own = tensor.detach()
    return own if own.untyped_storage().nbytes() == own.nbytes else own.clone()
