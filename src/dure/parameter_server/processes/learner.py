"""Servers and workers as processes: the learner of rank 0, and the work of the other ranks."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

import msgspec
from torch import Tensor

from dure.contracts.learner import STOP, Learner, StepResult
from dure.contracts.task import Task
from dure.contracts.world import RankContext
from dure.errors import LossNotFiniteError, PeerLostError, described, traceback_of
from dure.machine.devices import to_cpu
from dure.parameter_server.compressed import push_bytes
from dure.parameter_server.downpour_plan import DownpourPlan
from dure.parameter_server.embeddings import load_with_tables, reading, weights_of
from dure.parameter_server.graceful_stop import ResumePoint
from dure.parameter_server.manager import Manager
from dure.parameter_server.messages import MANAGER, server, worker
from dure.parameter_server.plan import ParameterServerPlan, first_states, in_words
from dure.parameter_server.processes.endpoint import Endpoint
from dure.parameter_server.processes.leader import Leader
from dure.parameter_server.processes.meeting import meet, name_of, pipeline_of
from dure.parameter_server.processes.messages import ProcessCounters, RankFailed, Report
from dure.parameter_server.processes.replica_process import ReplicaProcess
from dure.parameter_server.processes.serving import serve
from dure.parameter_server.processes.worker_process import WorkerProcess
from dure.parameter_server.server import ShardServer
from dure.parameter_server.tables import SparseRows, TableRows, split_rows
from dure.record.meter import Counters, Meter, sum_of_counters
from dure.tasks.evaluation import evaluate
from dure.tasks.flops import flops_per_step
from dure.tasks.loss_shares import mean_over
from dure.tensors.buffers import BufferNames, load_non_persistent_buffers, non_persistent_buffers_of

PATIENCE = 10.0
"""Seconds of silence after which a process is dropped. A closed connection is noticed at once."""

_LOOK_SECONDS = 0.1
"""Seconds between checks for the end of the run, during a round."""

_COUNT_SECONDS = 1.0
"""Seconds between counts of traffic, which may end the run."""


def run_server_or_worker(
    task: Task, context: RankContext, seed: int, plan: ParameterServerPlan
) -> str:
    """Run a rank other than the first; returns the limit by which the run has ended.

    Raises PeerLostError if rank 0 is lost, and errors of the task.
    """
    model = context.host_model(task, seed)
    plan = plan.made_for(task, model)
    port = meet(context.group, plan, model)
    pipeline = pipeline_of(context.group, plan)
    rank = context.group.rank
    context.survives_peer_loss()
    try:
        if rank <= plan.servers:
            layout = plan.layout(model)
            # A connection loses messages only by breaking, so retries need no timeout.
            terms = plan.terms_with_tables(task, model, seed)
            return serve(ShardServer(rank - 1, layout, terms, patience=math.inf), port, context)
        context.prepared = lambda: model
        number = plan.workers[rank - 1 - plan.servers]
        if isinstance(plan, DownpourPlan):
            own = model if plan.stage_keys else model.to(context.device)
            return ReplicaProcess(
                number, task, context, own, seed, plan=plan, group=pipeline, endpoint=port
            ).live()
        return WorkerProcess(number, task, context, seed, plan, port).live()
    except PeerLostError:
        raise
    except BaseException as error:
        _tell(error, name_of(rank, plan), context.group.step, port)
        raise
    finally:
        port.close()


def _tell(error: BaseException, who: str, step: str, endpoint: Endpoint) -> None:
    """Report an error of this process to the leader."""
    if isinstance(error, LossNotFiniteError):
        endpoint.say(
            MANAGER, RankFailed(error.where, error.when, "loss", str(error), value=error.loss)
        )
        return
    reason = described(error)
    endpoint.say(MANAGER, RankFailed(who, step, "error", reason, traceback_of(error)[-20_000:]))


class ProcessesLearner(Learner):
    """Learner of rank 0, which leads, and evaluates the weights of the servers."""

    where = "rank 0"

    def __init__(
        self, task: Task, context: RankContext, seed: int, plan: ParameterServerPlan
    ) -> None:
        self.task = task
        self.context = context
        self.group = context.group.alone()
        self.trace = context.trace
        self.group.meter.name = "leader"
        self.group.meter.is_worker = False
        self.model = context.model(task, seed).train()
        plan = plan.made_for(task, self.model)
        self.plan = plan
        port = meet(context.group, plan, self.model)
        pipeline_of(context.group, plan)
        context.survives_peer_loss()
        self.terms = plan.terms_with_tables(task, self.model, seed)
        self.shards = plan.shards(self.model)
        self.table_shards = plan.table_shards(self.model)
        portions = plan.all_portions(self.model)
        layout = plan.layout(self.model)
        self.tables = plan.tables(self.model, self.terms.tables)
        self.computing = plan.gradients(task, self.model, seed)
        self.computing.tables = self.tables
        steps = plan.steps_per_epoch(self.computing)
        self.period = plan.period or steps
        self.units_per_epoch = max(1, steps // self.period)
        self.round = 0
        self.standing = self._at(0)
        self._control_flags = 0
        self._loss = (0.0, 0.0)
        """Finished part of a round: sum of the losses, and their count."""
        self._counting: Future[list[ProcessCounters]] | None = None
        self._counted_at = 0.0
        self.buffers = BufferNames(self.model)
        self.own_buffers: dict[int, list[Tensor]] = {}
        """Buffers of each worker's model, such as the statistics of batch norm."""
        self.staleness: dict[int, int] = {}
        self.pushes = 0
        self.waiting = 0.0
        self.worker_meters = {number: Meter(worker(number)) for number in plan.workers}
        self.server_meters = [Meter(server(n), is_worker=False) for n in range(plan.servers)]
        self.manager = Manager(layout, plan.servers, plan.staleness, PATIENCE, plan.replicas)
        holds = in_words(
            self.shards, self.computing.flat.buffers, self.table_shards, self.terms.tables
        )
        self.leader = Leader(plan, self.manager, portions, holds, port, context.deadline)
        context.ending.callback(self.leader.end)
        self._told: set[str] = set()
        self._before: dict[str, Counters] = {}
        """Counters of earlier processes of each node, in a resumed run."""
        self._unsent: dict[int, list[Tensor]] = {}
        """Residuals of each worker's compressed pushes, in a resumed run."""
        self._started = False
        self._states: Sequence[Mapping[str, Any]] = first_states(
            self.shards, self.computing, self.terms, self.table_shards
        )

    def flops_per_step(self) -> float:
        return flops_per_step(
            self.model, self.computing.examples, self.computing.batches[0].batch_size
        )

    def _begin(self) -> None:
        """Send the initial weights, or those of a checkpoint, once."""
        if not self._started:
            self._started = True
            self.leader.start(self._states, self.standing, self.own_buffers, self._unsent)
            self._states = ()
            self._unsent = {}

    def advance(self, control_flags: int) -> StepResult:
        """Run a round: `period` batches of every group, or fewer if the run is to end."""
        self._begin()
        self._control_flags = control_flags
        before = self._spent()
        reports: list[Report] = []
        if self.round == 0 and any(self.plan.worker_batches(who, 0) for who in self.plan.workers):
            # The warm start, before the other replicas begin.
            reports += self._met(0)
        if self.leader.standing is None:
            reports += self._met((self.round + 1) * self.period)
        end = self._at((self.round + 1) * self.period)
        standing = self.leader.standing or end
        samples = self._samples(standing, reports)
        self.standing = standing
        whole = standing == end
        if self._counting is not None:
            self._take_accounts(self._counting.result())
            self._counting = None
        self._take_accounts(self.leader.accounts().result())
        for report in reports:
            self._take(report)
        computed, everything = (now - then for now, then in zip(self._spent(), before, strict=True))
        self.waiting = 1 - computed / everything if everything else 0.0
        self._tell_of_the_dead()
        total, counted = self._loss
        total += sum(report.loss for report in reports)
        counted += sum(report.counted for report in reports)
        self._loss = (0.0, 0.0) if whole else (total, counted)
        self.round += whole
        return StepResult(
            loss=mean_over(total, counted),
            samples=samples,
            control_flags=self._control_flags,
            numbers=self._numbers(),
            whole=whole,
        )

    def _met(self, until: int) -> list[Report]:
        """Return the workers' reports after a round, or after a graceful stop."""
        meeting = self.leader.meet(until)
        ends = False
        while not wait([meeting], _LOOK_SECONDS).done:
            self._count()
            if not ends:
                self._control_flags |= self.context.control_flags()
                ends = bool(self._control_flags & STOP)
                if ends:
                    self.leader.hold()
        return meeting.result()

    def _count(self) -> None:
        """Update the counters at regular intervals within a round."""
        now = time.monotonic()
        if self._counting is not None and self._counting.done():
            self._take_accounts(self._counting.result())
            self._counting = None
        if self._counting is None and now > self._counted_at + _COUNT_SECONDS:
            self._counted_at = now
            self._counting = self.leader.accounts(workers=True)

    def _take_accounts(self, accounts: Sequence[ProcessCounters]) -> None:
        meters = {meter.name: meter for meter in self.meters()}
        for account in accounts:
            self._counted(meters[account.name], account.counters, account.trace)

    def _at(self, batches: int) -> ResumePoint:
        """Return the progress of the workers after so many batches of a group."""
        until = {
            who: self.plan.worker_batches(who, batches) if batches else 0
            for who in self.plan.workers
        }
        return ResumePoint(until, [() for _ in self.plan.groups])

    def _samples(self, standing: ResumePoint, reports: Sequence[Report]) -> int:
        """Return the examples of the round up to `standing`, including unreported examples.

        If no worker takes over another's work, return the reported examples.
        """
        if not self.plan.shares_data:
            return sum(report.examples for report in reports)
        return self._done(standing) - self._done(self.standing)

    def _done(self, standing: ResumePoint) -> int:
        """Return the round's examples that are done at `standing`."""
        done = 0
        for number, group in enumerate(self.plan.groups):
            batches = range(self.round * self.period, standing.until[group[0]])
            done += sum(len(self.computing.batches[number].at(batch)) for batch in batches)
            undone = standing.undone[number]
            done -= sum(self.computing.examples_of(work, number) for work in undone)
        return done

    def _spent(self) -> tuple[float, float]:
        """Return computing seconds and total seconds of the workers."""
        total = sum_of_counters(meter.counters for meter in self.worker_meters.values())
        waited = total.communication_seconds + total.idle_seconds
        return total.compute_seconds, total.compute_seconds + waited

    def _take(self, report: Report) -> None:
        self._counted(self.worker_meters[report.worker], report.counters, report.trace)
        self.pushes += report.pushes
        for behind, often in report.staleness.items():
            self.staleness[behind] = self.staleness.get(behind, 0) + often
        self.own_buffers[report.worker] = [buffer.clone() for buffer in report.buffers]
        if report.worker == self.plan.workers[0]:
            self.buffers.load(self.model, report.buffers)

    def _counted(self, meter: Meter, told: list[float], trace: bytes) -> None:
        """Add a process's counters since its start to those of earlier processes."""
        before = self._before.setdefault(meter.name, meter.counters)
        meter.counters = sum_of_counters([before, Counters.from_list(told)])
        self.trace.take(trace)

    def _tell_of_the_dead(self) -> None:
        for name, reason in self.manager.dead.items():
            if name not in self._told:
                self._told.add(name)
                warnings.warn(
                    f"round {self.round}: {name} {reason}; the others continue without it",
                    stacklevel=2,
                )

    def _numbers(self) -> dict[str, float]:
        often = sum(self.staleness.values())
        mean = sum(behind * times for behind, times in self.staleness.items()) / max(1, often)
        return {"staleness": mean, "waiting": self.waiting, "pushes": float(self.pushes)}

    def _load(self) -> list[TableRows]:
        """Load the servers' weights into the model; returns the rows of its tables, by shard."""
        if not self._started:
            states = [state["table"] for state in self._states[len(self.shards) :]]
            return self._table_rows([SparseRows(one["rows"], one["values"]) for one in states])
        dense, changed = split_rows(self.leader.values().result())
        for keys, value in zip(self.shards, dense, strict=True):
            self.computing.flat.buffers[keys.vector][keys.start : keys.stop] = value
        return self._table_rows(changed)

    def _table_rows(self, changed: Sequence[SparseRows]) -> list[TableRows]:
        """Return readable copies of the servers' table rows, by shard."""
        copies = []
        for keys, rows in zip(self.table_shards, changed, strict=True):
            copy = TableRows(self.terms.tables[keys.vector], keys.start, keys.stop)
            copy.take(rows)
            copies.append(copy)
        return copies

    def evaluate(self) -> dict[str, float]:
        rows = self._load()
        with self._watched(), reading(self.tables, rows):
            return evaluate(self.task, self.model, self.computing.test, self.group, self.round)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Context manager: the leader's thread monitors the batches of a measurement."""
        step = f"round {self.round}" if self.round else "the first evaluation"
        hook = self.model.register_forward_pre_hook(lambda *_: self.leader.measures(step))
        self.leader.measures(step)
        try:
            yield
        finally:
            self.leader.measured()
            hook.remove()

    def ended(self, reason: str) -> None:
        self.leader.ended = reason

    def weights(self) -> dict[str, Tensor]:
        rows = self._load()
        found = weights_of(self.model, self.tables, [one.changed for one in rows])
        weights: dict[str, Tensor] = to_cpu(found)
        return weights

    def state(self) -> dict[str, Any]:
        shards = self.leader.states().result() if self._started else self._states
        asks = self._started and self.plan.remembers
        return {
            "version": 1,
            "round": self.round,
            "standing": msgspec.to_builtins(self.standing),
            "loss": list(self._loss),
            "shards": list(shards),
            "unsent": self.leader.unsent().result() if asks else self._unsent,
            "staleness": dict(self.staleness),
            "pushes": self.pushes,
            "own_buffers": {number: list(own) for number, own in self.own_buffers.items()},
            "buffers": to_cpu(non_persistent_buffers_of(self.model)),
        }

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        load_with_tables(self.model, self.tables, weights)
        load_non_persistent_buffers(self.model, state["buffers"])
        self.round = state["round"]
        self.standing = msgspec.convert(state["standing"], ResumePoint)
        total, counted = state["loss"]
        self._loss = (total, counted)
        self.staleness = dict(state["staleness"])
        self.pushes = state["pushes"]
        self.own_buffers = {number: list(own) for number, own in state["own_buffers"].items()}
        self._states = state["shards"]
        if self.plan.remembers:
            self._unsent = dict(state["unsent"])

    def meters(self) -> Sequence[Meter]:
        return [self.group.meter, *self.server_meters, *self.worker_meters.values()]

    def facts(self) -> dict[str, Any]:
        """Return owners of shards, lost nodes, and the staleness of weights in clocks."""
        vectors = self.computing.flat.buffers
        return {
            "parameter_server": {
                "shards": [[keys.vector, keys.start, keys.stop] for keys in self.shards],
                "shard_bytes": [len(keys) * vectors[keys.vector].itemsize for keys in self.shards],
                "tables": [[keys.vector, keys.start, keys.stop] for keys in self.table_shards],
                "owners": [placed.owner for placed in self.manager.layout.shards],
                "staleness": sorted(self.staleness.items()),
                "staleness_counts": "clocks",
                "pushes": self.pushes,
                "push_bytes": push_bytes(self.terms.coding, self.shards),
                "lost": [list(one) for one in self.manager.dead.items()],
            }
        }
