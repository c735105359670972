"""Servers and workers as processes: what rank 0 drives, and what the other ranks do."""

from __future__ import annotations

import math
import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from dure.contracts.strategy import Learner, Place, Progress
from dure.contracts.task import Task
from dure.errors import LossNotFiniteError, PeerLostError
from dure.parameter_server.downpour_plan import DownpourPlan
from dure.parameter_server.embeddings import load_with_tables, reading, weights_of
from dure.parameter_server.manager import Manager
from dure.parameter_server.messages import MANAGER, server, worker
from dure.parameter_server.plan import Plan, first_states
from dure.parameter_server.processes.leader import Leader
from dure.parameter_server.processes.meeting import meet, name_of, pipeline_of
from dure.parameter_server.processes.port import Port
from dure.parameter_server.processes.replicas import Replicating
from dure.parameter_server.processes.said import Failed, Report
from dure.parameter_server.processes.serving import serve
from dure.parameter_server.processes.working import Working
from dure.parameter_server.server import Server
from dure.parameter_server.tables import Rows, TableRows, apart
from dure.record.meter import Counters, Meter, sum_of_counters
from dure.tasks.evaluation import evaluate
from dure.tasks.flops import flops_per_step
from dure.tasks.loss_shares import mean_over
from dure.tensors.buffers import Buffers, load_passing_buffers, passing_buffers

PATIENCE = 10.0
"""Seconds of silence after which a process is given up. One that dies is noticed at once."""


def assist(task: Task, place: Place, seed: int, plan: Plan) -> str:
    """What a rank other than the first does, until the run is over; by which limit that is.

    Raises PeerLostError if rank 0 is gone, and what the task raises.
    """
    model = place.model(task, seed)
    plan = plan.made_for(task, model)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    port = meet(place.group, plan, nbytes)
    pipeline = pipeline_of(place.group, plan)
    rank = place.group.rank
    place.outlives()
    try:
        if rank <= plan.servers:
            layout = plan.layout(model)
            # Streams lose nothing but when they break.
            terms = plan.terms_with_tables(task, model, seed)
            return serve(Server(rank - 1, layout, terms, patience=math.inf), port, place)
        place.prepared = lambda: model
        number = plan.workers[rank - 1 - plan.servers]
        if isinstance(plan, DownpourPlan):
            return Replicating(
                number, task, place, model, seed, plan=plan, group=pipeline, port=port
            ).live()
        return Working(number, task, place, seed, plan, port).live()
    except PeerLostError:
        raise
    except BaseException as error:
        _tell(error, name_of(rank, plan), place.group.step, port)
        raise
    finally:
        port.close()


def _tell(error: BaseException, who: str, step: str, port: Port) -> None:
    """Tells the leader what went wrong here."""
    if isinstance(error, LossNotFiniteError):
        port.say(MANAGER, Failed(error.where, error.when, "loss", str(error), value=error.loss))
        return
    reason = f"{type(error).__name__}: {error}"
    port.say(MANAGER, Failed(who, step, "error", reason, traceback.format_exc()[-20_000:]))


class ProcessesLearner(Learner):
    """Rank 0: it leads, and measures what the servers have."""

    unit = "round"
    where = "rank 0"

    def __init__(self, task: Task, place: Place, seed: int, plan: Plan) -> None:
        self.task = task
        self.group = place.group.alone()
        self.trace = place.trace
        self.group.meter.name = "leader"
        self.group.meter.is_worker = False
        self.model = place.model(task, seed).train()
        plan = plan.made_for(task, self.model)
        self.plan = plan
        nbytes = sum(parameter.nbytes for parameter in self.model.parameters())
        port = meet(place.group, plan, nbytes)
        pipeline_of(place.group, plan)
        place.outlives()
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
        self.buffers = Buffers(self.model)
        self.staleness: dict[int, int] = {}
        self.pushes = 0
        self.waiting = 0.0
        self.worker_meters = {number: Meter(worker(number)) for number in plan.workers}
        self.server_meters = [Meter(server(n), is_worker=False) for n in range(plan.servers)]
        self.manager = Manager(layout, plan.servers, plan.staleness, PATIENCE, plan.replicas)
        self.leader = Leader(plan, self.manager, portions, port, place.deadline)
        place.ending.callback(self.leader.end)
        self._told: set[str] = set()
        self._before: dict[str, Counters] = {}
        """What each had counted in processes of before, where the run was interrupted."""
        self._started = False
        self._states: Sequence[Mapping[str, Any]] = first_states(
            self.shards, self.computing, self.terms, self.table_shards
        )

    def flops_per_step(self) -> float:
        return flops_per_step(
            self.model, self.computing.examples, self.computing.batches[0].batch_size
        )

    def _begin(self) -> None:
        """Hands out the weights, those of the beginning or of a checkpoint, once."""
        if not self._started:
            self._started = True
            self.leader.start(self._states, self.round * self.period)
            self._states = ()

    def advance(self, wish: int) -> Progress:
        """One round: so many batches of every group, until all meet."""
        self._begin()
        reports: list[Report] = []
        if self.round == 0 and any(self.plan.until(who, 0) for who in self.plan.workers):
            # What some do before the others begin.
            reports += self.leader.meet(0).result()
        reports += self.leader.meet((self.round + 1) * self.period).result()
        self.round += 1
        before = self._spent()
        for account in self.leader.accounts().result():
            self._counted(self.server_meters[account.server], account.counters, account.trace)
        for report in reports:
            self._take(report)
        computed, everything = (now - then for now, then in zip(self._spent(), before, strict=True))
        self.waiting = 1 - computed / everything if everything else 0.0
        self._tell_of_the_dead()
        counted = sum(report.counted for report in reports)
        return Progress(
            loss=mean_over(sum(report.loss for report in reports), counted),
            samples=self._samples(reports),
            wish=wish,
            numbers=self._numbers(),
        )

    def _samples(self, reports: Sequence[Report]) -> int:
        """Examples of the round's batches: also those of workers that died without a report.

        Where nobody does what another has left, those that were reported.
        """
        if not self.plan.shares_data:
            return sum(report.examples for report in reports)
        batches = range((self.round - 1) * self.period, self.round * self.period)
        return sum(len(group.at(batch)) for group in self.computing.batches for batch in batches)

    def _spent(self) -> tuple[float, float]:
        """Seconds that the workers have computed, and all their seconds."""
        total = sum_of_counters(meter.counters for meter in self.worker_meters.values())
        waited = total.communication_seconds + total.idle_seconds
        return total.compute_seconds, total.compute_seconds + waited

    def _take(self, report: Report) -> None:
        self._counted(self.worker_meters[report.worker], report.counters, report.trace)
        self.pushes += report.pushes
        for behind, often in report.staleness.items():
            self.staleness[behind] = self.staleness.get(behind, 0) + often
        if report.worker == self.plan.workers[0]:
            self.buffers.load(self.model, report.buffers)

    def _counted(self, meter: Meter, told: list[float], trace: bytes) -> None:
        """Takes over what a process has counted since it began."""
        before = self._before.setdefault(meter.name, meter.counters)
        meter.counters = sum_of_counters([before, Counters.from_list(told)])
        self.trace.take(trace)

    def _tell_of_the_dead(self) -> None:
        for name, reason in self.manager.dead.items():
            if name not in self._told:
                self._told.add(name)
                warnings.warn(
                    f"round {self.round}: {name} {reason}; the others go on without it",
                    stacklevel=2,
                )

    def _numbers(self) -> dict[str, float]:
        often = sum(self.staleness.values())
        mean = sum(behind * times for behind, times in self.staleness.items()) / max(1, often)
        return {"staleness": mean, "waiting": self.waiting, "pushes": float(self.pushes)}

    def _load(self) -> list[TableRows]:
        """The weights of the servers into the model; the rows of its tables, by shard."""
        if not self._started:
            states = [state["table"] for state in self._states[len(self.shards) :]]
            return self._table_rows([Rows(one["rows"], one["values"]) for one in states])
        dense, changed = apart(self.leader.values().result())
        for keys, value in zip(self.shards, dense, strict=True):
            self.computing.flat.buffers[keys.vector][keys.start : keys.stop] = value
        return self._table_rows(changed)

    def _table_rows(self, changed: Sequence[Rows]) -> list[TableRows]:
        """Copies of what servers have of tables, by shard, to be read here."""
        copies = []
        for keys, rows in zip(self.table_shards, changed, strict=True):
            copy = TableRows(self.terms.tables[keys.vector], keys.start, keys.stop)
            copy.take(rows)
            copies.append(copy)
        return copies

    def evaluate(self) -> dict[str, float]:
        rows = self._load()
        with reading(self.tables, rows):
            return evaluate(self.task, self.model, self.computing.test, self.group, self.round)

    def ended(self, reason: str) -> None:
        self.leader.ended = reason

    def weights(self) -> dict[str, Tensor]:
        rows = self._load()
        return weights_of(self.model, self.tables, [one.changed for one in rows])

    def state(self) -> dict[str, Any]:
        shards = self.leader.states().result() if self._started else self._states
        return {
            "version": 1,
            "round": self.round,
            "shards": list(shards),
            "staleness": dict(self.staleness),
            "pushes": self.pushes,
            "buffers": passing_buffers(self.model),
        }

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        load_with_tables(self.model, self.tables, weights)
        load_passing_buffers(self.model, state["buffers"])
        self.round = state["round"]
        self.staleness = dict(state["staleness"])
        self.pushes = state["pushes"]
        self._states = state["shards"]

    def meters(self) -> Sequence[Meter]:
        return [self.group.meter, *self.server_meters, *self.worker_meters.values()]

    def facts(self) -> dict[str, Any]:
        """Who owned what, who was lost, and how stale the weights of workers were, in clocks."""
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
                "lost": [list(one) for one in self.manager.dead.items()],
            }
        }
