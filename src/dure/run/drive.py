"""The loop that drives every learner: advance, record, evaluate, checkpoint, until a limit.

The loop runs on every rank. Joint actions of all ranks (an evaluation, a checkpoint, the end)
follow from numbers that all ranks know, or from control flags of rank 0 that travel with the step's
message; so no rank ever waits for a rank on another path. Only rank 0 writes.
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

from dure.contracts.learner import (
    CALLBACK,
    CHECKPOINT,
    INTERRUPT,
    STOP,
    TRANSFER_BUDGET_SPENT,
    Learner,
    StepInterrupted,
    StepResult,
)
from dure.contracts.world import RankContext
from dure.errors import (
    DureError,
    LossNotFiniteError,
    StopRun,
    WorkerFailedError,
    described,
    traceback_of,
)
from dure.machine.compiler import deferred_compiler
from dure.machine.devices import peak_bytes, reset_peak_bytes, synchronize, to_cpu
from dure.machine.memory import keep_freed_memory, return_freed_memory, trim_heap
from dure.machine.threads import threads, threads_for
from dure.protocol.server_context import ServerContext
from dure.randomness.seeds import generators_state, restore_generators, seed_generators
from dure.record.best import keep_best, restore_best
from dure.record.disk_tensors import DiskTensors, Leaf, in_memory
from dure.record.history import Evaluation, History, Record, Step, finite
from dure.record.live_status import LiveStatus, delete_status
from dure.record.meter import Counters, peak_memory, reset_peak_memory, sum_of_counters
from dure.record.run import RunFolder
from dure.record.settings import LINEAGE
from dure.record.trace import Lane, Trace
from dure.run import early_stopping
from dure.run.checkpoints import Checkpoints
from dure.run.job import Job, Position, RunOutcome
from dure.run.lineage import METADATA, lineage_of, signed
from dure.run.rank_data import check_as_before, with_own_data
from dure.run.summary import summarise
from dure.run.utilisation import Utilisation, accelerators_of
from dure.run.validation import with_validation
from dure.run.watch import page_of
from dure.run.weight_averaging import with_average


def drive(job: Job, context: RankContext) -> RunOutcome:
    """Execute the job on this rank, and return its results."""
    serves = isinstance(context, ServerContext) and context.network is not None
    trains = not serves or job.strategy.traits.trains_at_server
    keeps = trains and not job.strategy.run_traits.spares_memory
    memory = keep_freed_memory() if keeps else return_freed_memory()
    with deferred_compiler(), memory:
        return _drive(job, context)


def _drive(job: Job, context: RankContext) -> RunOutcome:
    # Each rank seeds the generators for draws outside of steps; steps seed their own.
    before = generators_state()
    seed_generators(job.seed, "rank", context.group.rank, everything=True)
    reset_peak_memory()
    reset_peak_bytes(accelerators_of(job, context))
    learner: Learner | None = None
    driver: Driver | None = None
    try:
        context.group.step = "the start"
        # The process that prepared the model uses it; other processes create their own.
        if job.fresh is not None:
            context.prepared = job.fresh.take
        job = dataclasses.replace(job, task=with_validation(job.task, job.seed))
        job = dataclasses.replace(job, task=with_own_data(job.task, job.strategy, context.group))
        context.check = job.check
        context.folder = job.folder
        context.config = job.config
        if isinstance(context, ServerContext) and job.folder is not None:
            context.page = partial(page_of, job.folder)
        if job.strategy.traits.coordinated and context.group.rank:
            ended = job.strategy.run_assistant(job.task, context, job.seed)
            return RunOutcome({}, {}, History(), {"ended": ended})
        learner = with_average(
            job.strategy.learner(job.task, context, job.seed), job.task.ema, context.group
        )
        if job.strategy.traits.coordinated:
            # The coordinating rank continues alone: the other ranks may be dead by then.
            context.group = context.group.alone()
        driver = Driver(job, context, learner)
        # After the driver, which notes the number of threads for evaluations.
        flops = learner.flops_per_step()
        driver.utilisation = Utilisation(job, context, learner, flops)
        with threads(threads_for(flops)):
            return driver.run()
    except LossNotFiniteError as error:
        # The loss was checked before the update: the weights are still those of the previous step.
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
        # An error of the user's code, or of dure, gets the rank and the step. SystemExit too,
        # which would end the process with success.
        where = learner.where if learner is not None else f"rank {context.group.rank}"
        step = context.group.step
        failed = WorkerFailedError(where, step, described(error), traceback_of(error))
        if driver is not None and driver.checkpoints.doubtful:
            raise driver.checkpoints.perhaps_damaged(failed) from error
        raise failed from error
    finally:
        try:
            # First, since threads of the run may draw from the generators until they end.
            context.ending.close()
            restore_generators(before)  # the user's own draws go on as if there had been no run
        finally:
            if driver is not None and driver.folder is not None:
                driver.folder.close()


class Driver:
    """A rank's part of a run."""

    def __init__(self, job: Job, context: RankContext, learner: Learner) -> None:
        self.job = job
        self.context = context
        self.group = context.group
        self.learner = learner
        self.is_leader = context.group.rank == 0
        # None on all ranks but rank 0, whether or not the run has a folder.
        self.folder = RunFolder(job.folder) if self.is_leader and job.folder is not None else None
        self.all_threads = torch.get_num_threads()
        self.position = Position(lies=list(job.task.train.rank_counts or ()))
        self.history = History()
        self.checkpoints = Checkpoints(job, self.group, learner, self.folder)
        self.proofs = [*job.proofs, *learner.proofs]
        self.travelled = 0.0
        self.monitor = early_stopping.monitor_of(job.task, job.stop)
        self.best: Mapping[str, Tensor] | None = None
        """On rank 0, the weights of the best evaluation, if no folder has them."""
        # With several ranks, no rank alone has the counters of all.
        tells = self.folder is not None and self.group.size == 1
        self.now = LiveStatus(self.folder.path) if self.folder is not None and tells else None
        if self.now is not None:
            self.now.facts = learner.facts
            context.report = _heard_by(self.now, context.report)
        self.devices = accelerators_of(job, context)
        self.utilisation: Utilisation | None = None
        self._stopped = False
        """Whether a callback has requested the end of the run."""
        self._reported = 0.0
        self._began = 0.0
        """Time of the start of the current step, by time.perf_counter."""
        self._went_past = False
        """Whether training continued after the newest step, within the next step."""
        if self.group.size == 1:
            context.control_flags = self._control_flags_within

    def run(self) -> RunOutcome:
        """Run from the start, or the newest checkpoint, to the first limit. Collective."""
        # Locked before the first read, so that no other process changes the folder meanwhile.
        if self.folder is not None:
            self.folder.hold()
        if self.job.elastic:
            self.checkpoints.check_folder()
        if self.job.resume:
            self._resume()
        # A new run is evaluated before training; a resumed run has been.
        if self.position.last_evaluation < 0:
            self._evaluate()
        limit = self.job.stop.seconds  # which a resumed run, on all ranks, may have used up
        # Before the first step too: a resumed run may have reached its limits already.
        ended = self._limit(STOP if limit is not None and self.position.seconds >= limit else 0)
        while ended is None:
            ended = self._advance()
        # No evaluation: torchrun waits for at most half a minute before it kills the ranks.
        makes_way = ended == "interrupt" and self.job.elastic
        position = self.position
        measured = position.last_evaluation == position.step and not self._went_past
        if not measured and not makes_way:
            self._evaluate()
        # Depends on the job, not on this rank's folder: the checkpoint is collective.
        if self.job.folder is not None and (position.step > 0 or position.midway):
            self._checkpoint()
        return self._finish(ended)

    def _advance(self) -> str | None:
        """Execute one step or round, and the evaluation and checkpoint that are due after it.

        Returns the limit that ends the run, else None.
        """
        position = self.position
        self.group.step = f"{self.unit} {position.step + 1}"
        self._began = time.perf_counter()
        try:
            progress = self.learner.advance(self._control_flags() if self.is_leader else 0)
        except StepInterrupted:
            return "interrupt"
        # An evaluation would wait for the last update too.
        if self.devices and (position.step + 1) % self.evaluate_every == 0:
            self._wait()
        # Training time only, without evaluations and checkpoints.
        spent = time.perf_counter() - self._began
        position.seconds += spent
        if self.utilisation is not None:
            counters = self.learner.meters()[0].counters
            self.utilisation.step(counters, progress.samples, spent)
        position.samples += progress.samples
        position.midway = not progress.whole
        # A round without a valid update keeps the loss of the round before.
        position.loss = position.loss if progress.loss is None else progress.loss
        position.numbers = finite(progress.numbers or {})
        if position.midway:
            self._went_past = True
            return self._limit(progress.control_flags)
        position.step += 1
        self._record(progress)
        # Before the limits are checked: an evaluation may reach a target.
        if position.step % self.evaluate_every == 0:
            self._evaluate()
        ended = self._limit(progress.control_flags)
        # The end writes a checkpoint anyway, after the last evaluation.
        if progress.control_flags & CHECKPOINT and ended is None:
            self._checkpoint()
        return ended

    def _wait(self) -> None:
        """Wait until the accelerators have done all that was queued."""
        for device in self.devices:
            synchronize(device)

    def _control_flags(self) -> int:
        """Return rank 0's control flags for all ranks after the next step.

        They depend on rank 0's clock and user alone.
        """
        control_flags = 0
        seconds = self.job.stop.seconds
        if self.context.interrupted():
            control_flags |= STOP | INTERRUPT
        elif self._stopped:
            control_flags |= STOP | CALLBACK
        elif seconds is not None and self.position.seconds >= seconds:
            control_flags |= STOP
        if self.job.folder is not None:
            # The flags travel with the next step, and apply after that step.
            following = self.position.step + 1
            due = self.checkpoints.due(following, following % self.evaluate_every == 0)
            control_flags |= CHECKPOINT if due else 0
        return control_flags

    def _control_flags_within(self) -> int:
        """Return the control flags within a step, for a run of a single rank."""
        stop = self.job.stop
        if self.context.interrupted():
            return STOP | INTERRUPT
        spent = self.position.seconds + time.perf_counter() - self._began
        if stop.seconds is not None and spent >= stop.seconds:
            return STOP
        return STOP if stop.bytes is not None and self._travelled() >= stop.bytes else 0

    @property
    def examples(self) -> int:
        """Examples of an epoch; for clients that do not report them, the known number so far."""
        return self.learner.examples or len(self.job.task.train) or 1

    @property
    def unit(self) -> str:
        """Unit of progress: "step" or "round"."""
        return self.job.strategy.traits.unit

    @property
    def evaluate_every(self) -> int:
        """Current number of steps or rounds between evaluations; rounds may grow."""
        return self.job.evaluate_every or self.learner.units_per_epoch

    def _limit(self, control_flags: int) -> str | None:
        """Return the limit that was reached, else None.

        Only rank 0 sees seconds and interrupts; its flag STOP is in `control_flags`.
        """
        position = self.position
        stop = self.job.stop
        # The sum is a collective, so it is computed only if bytes are a limit.
        if stop.bytes is not None:
            self.travelled = self._travelled()
        reached = stop.reached(
            self.unit,
            position.step,
            position.samples,
            self.examples,
            position.metrics,
            self.travelled,
        )
        reached = reached or self._waited() or self.learner.exhausted()
        if self.group.size == 1:  # nobody else has to be told first
            control_flags |= self._control_flags()
        # A limit that all ranks know precedes a limit that only rank 0 has seen.
        if reached is not None or not control_flags & STOP:
            return reached
        if control_flags & INTERRUPT:
            return "interrupt"
        if control_flags & CALLBACK:
            return "callback"
        return "transfers" if control_flags & TRANSFER_BUDGET_SPENT else "seconds"

    def _waited(self) -> str | None:
        """Return "patience" if the monitored metric has not improved for long enough, else None."""
        patience = self.job.stop.patience
        best = self.position.best
        if patience is None or best is None or best.waited < patience:
            return None
        return "patience"

    def _travelled(self) -> float:
        """Return the bytes sent by all workers, as in summary.json."""
        mine = sum(meter.counters.bytes_sent for meter in self.learner.meters())
        return sum(told for (told,) in self.group.all_gather_values([float(mine)], "bytes sent"))

    def _record(self, progress: StepResult) -> None:
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
        if self.is_leader and time.monotonic() - self._reported > self.context.report_seconds:
            self._report()

    def _report(self) -> None:
        self._reported = time.monotonic()
        position = self.position
        self.context.report(
            {
                "unit": self.unit,
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
        """Return every worker's counters on every rank, in order of rank.

        In a federation the server's counters come first, then its clients'.
        """
        mine = self.learner.meters()
        # The peak is that of the whole process, so its first worker has it. An earlier part of a
        # resumed run may have had a higher peak.
        own = mine[0].counters
        own.peak_memory = max(own.peak_memory, peak_memory())
        for peaks in peak_bytes(self.devices).values():
            own.device_allocated = max(own.device_allocated, peaks["allocated"])
            own.device_reserved = max(own.device_reserved, peaks["reserved"])
        values = [value for meter in mine for value in meter.counters.as_list()]
        workers: list[Counters] = []
        for told in self.group.all_gather_values(values):
            workers.extend(Counters.in_a_row(told))
        return workers

    def _evaluate(self) -> None:
        position = self.position
        if position.step == 0:
            self.group.step = "the first evaluation"
        # Large batches without gradients: more threads pay even if a step is small.
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
            peak_device_memory=total.device_allocated,
        )
        self.history.append(record)
        if self.folder is not None:
            self.folder.append(record)
            # A run that is killed now keeps this evaluation.
            self.folder.flush(patient=True)
        if self.is_leader:
            self._report()
        if self.monitor is not None:
            self._choose(self.monitor)
        self._tell(record)

    def _choose(self, monitor: str) -> None:
        """Store the model if it is the best so far. All ranks reach the same result."""
        position = self.position
        before = position.best
        position.best = early_stopping.updated_best(
            before, self.job.stop, monitor, position.step, position.metrics
        )
        if before is not None and position.best.step == before.step:
            return
        # Collective: a divided model is gathered here.
        weights = self.learner.weights()
        if self.folder is not None:
            keep_best(self.folder.path, to_cpu(weights), position.step)
        elif self.is_leader and self.job.folder is None:
            self.best = {name: _kept(one) for name, one in weights.items()}

    def _tell(self, record: Record) -> None:
        """Report a record to callbacks in the user's process."""
        if not self.is_leader or not self.job.told:
            return
        content = History.encode(record)
        about = {"counts": self.unit, "step": self.position.step, "record": content}
        try:
            self.context.report(about)
        except StopRun:
            self._stopped = True

    def _checkpoint(self) -> None:
        """Write a checkpoint. Collective after the same step."""
        self.checkpoints.write(self.position, self._all_counters())

    def _resume(self) -> None:
        """Continue from the newest checkpoint, or from the start without a checkpoint.

        The history of steps after the checkpoint is removed.
        """
        position = self.checkpoints.read()
        if position is not None:
            check_as_before(self.job.folder, position.lies, self.position.lies)
            self.position = position
        if self.folder is not None:
            # Steps after the checkpoint will be executed and written again.
            self.history = self.folder.take_back()
            if self.monitor is not None:
                best = self.position.best
                restore_best(self.folder.path, None if best is None else best.step)

    def _finish(self, ended: str) -> RunOutcome:
        self.learner.ended(ended)
        workers = self._all_counters()
        # All ranks have facts or none has: the gathering is collective.
        facts = self.learner.facts()
        told = None if facts is None else self.group.gather_bytes(msgspec.json.encode(facts))
        lanes = self._lanes()
        self.learner.rest()
        trim_heap()
        weights = _all_apart(self.learner.weights())
        buffers = {name: _apart(one) for name, one in self.learner.non_persistent_buffers().items()}
        # Gathering the weights may take the most memory of all; its bytes are no training traffic.
        for one, later in zip(workers, self._all_counters(), strict=True):
            one.peak_memory = later.peak_memory
            one.device_allocated = later.device_allocated
            one.device_reserved = later.device_reserved
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
            delete_status(self.folder.path)
        return RunOutcome(weights, buffers, self.history, summary, self.best)

    def _signed(self, summary: dict[str, Any]) -> tuple[dict[str, Any], Any, Any]:
        """Return (summary, metadata of the model, files beside the model), signed by a server."""
        sign = self.context.signs if isinstance(self.context, ServerContext) else None
        if sign is None:
            return summary, None, None
        lineage = lineage_of(self.job.config, summary)
        return (
            {**summary, "lineage": lineage},
            {METADATA: json.dumps(lineage, default=str)},
            {LINEAGE: partial(signed, lineage, sign=sign)},
        )

    def _lanes(self) -> list[Lane]:
        """Return the timelines of all ranks on rank 0; an empty list elsewhere."""
        parts = self.group.gather_bytes(self.context.trace.packed(self.context.clock_offset))
        return [lane for part in parts for lane in Trace.unpacked(part)]


def _heard_by(
    now: LiveStatus, report: Callable[[dict[str, Any]], None]
) -> Callable[[dict[str, Any]], None]:
    """Return a report function that also stores a server's news of its clients."""

    def heard(event: dict[str, Any]) -> None:
        now.hears(event)
        report(event)

    return heard


def _all_apart(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the weights, each in memory of its own; weights in files are read on access."""
    if isinstance(weights, DiskTensors):
        return weights
    return {name: _apart(tensor) for name, tensor in weights.items()}


def _kept(leaf: Leaf) -> Tensor:
    """Return a copy of the current tensor, in memory of its own, on the CPU."""
    return in_memory(leaf).detach().cpu().clone()


def _apart(tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU, without the rest of its storage, such as of a flat buffer."""
    own = tensor.detach().cpu()
    return own if own.untyped_storage().nbytes() == own.nbytes else own.clone()
