"""Servers and workers as processes: what rank 0 drives, and what the other ranks do."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from dure.contracts.strategy import Learner, Place, Progress
from dure.contracts.task import Task
from dure.errors import LossNotFiniteError, PeerLostError
from dure.parameter_server.embeddings import load_with_tables, reading, weights_of
from dure.parameter_server.manager import Manager
from dure.parameter_server.messages import MANAGER, worker
from dure.parameter_server.plan import Plan
from dure.parameter_server.processes.leader import Leader
from dure.parameter_server.processes.meeting import meet, name_of
from dure.parameter_server.processes.port import Port
from dure.parameter_server.processes.said import Failed, Report
from dure.parameter_server.processes.serving import serve
from dure.parameter_server.processes.working import Working
from dure.parameter_server.server import Server
from dure.parameter_server.shard import Shard
from dure.parameter_server.table_shard import TableShard
from dure.parameter_server.tables import Rows, TableRows, apart
from dure.record.meter import Counters, Meter
from dure.tasks.evaluation import evaluate
from dure.tasks.flops import flops_per_step
from dure.tasks.loss_shares import mean_over
from dure.tensors.buffers import Buffers, load_passing_buffers, passing_buffers

PATIENCE = 10.0
"""Seconds of silence after which a process is given up. One that dies is noticed at once."""


def assist(task: Task, place: Place, seed: int, plan: Plan) -> None:
    """What a rank other than the first does, until rank 0 says that the run is over.

    Raises PeerLostError if rank 0 is gone, and what the task raises.
    """
    model = place.model(task, seed)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    port = meet(place.group, plan, nbytes)
    rank = place.group.rank
    place.outlives()
    try:
        if rank <= plan.servers:
            serve(
                Server(rank - 1, plan.layout(model), plan.terms_with_tables(task, model, seed)),
                port,
            )
        else:
            place.prepared = lambda: model
            number = plan.workers[rank - 1 - plan.servers]
            Working(number, task, place, seed, plan, port).live()
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
        self.plan = plan
        self.group = place.group.alone()
        self.group.meter.name = "leader"
        self.group.meter.is_worker = False
        self.model = place.model(task, seed).train()
        nbytes = sum(parameter.nbytes for parameter in self.model.parameters())
        port = meet(place.group, plan, nbytes)
        place.outlives()
        self.terms = plan.terms_with_tables(task, self.model, seed)
        self.shards = plan.shards(self.model)
        self.table_shards = plan.table_shards(self.model)
        portions = plan.all_portions(self.model)
        layout = plan.layout(self.model)
        self.tables = plan.tables(self.model, self.terms.tables)
        self.computing = plan.gradients(task, self.model, seed)
        self.computing.tables = self.tables
        self.period = plan.period or self.computing.steps_per_epoch
        self.units_per_epoch = max(1, self.computing.steps_per_epoch // self.period)
        self.round = 0
        self.buffers = Buffers(self.model)
        self.staleness: dict[int, int] = {}
        self.pushes = 0
        self.worker_meters = {number: Meter(worker(number)) for number in plan.workers}
        self.manager = Manager(layout, plan.servers, plan.staleness, PATIENCE, plan.replicas)
        self.leader = Leader(plan, self.manager, portions, port)
        place.ending.callback(self.leader.end)
        self._told: set[str] = set()
        self._started = False
        self._states: Sequence[Mapping[str, Any]] = [
            self._first(number) for number in range(len(portions))
        ]

    def flops_per_step(self) -> float:
        return flops_per_step(
            self.model, self.computing.examples, self.computing.batches[0].batch_size
        )

    def _first(self, number: int) -> Mapping[str, Any]:
        if number >= len(self.shards):
            rows = self.table_shards[number - len(self.shards)]
            return TableShard(number, rows, self.terms).state()
        keys = self.shards[number]
        values = self.computing.flat.buffers[keys.vector][keys.start : keys.stop].clone()
        return Shard(number, keys, values, self.terms).state()

    def _begin(self) -> None:
        """Hands out the weights, those of the beginning or of a checkpoint, once."""
        if not self._started:
            self._started = True
            self.leader.start(self._states, self.round * self.period)
            self._states = ()

    def advance(self, wish: int) -> Progress:
        """One round: so many batches of every group, until all meet."""
        self._begin()
        reports: list[Report] = self.leader.meet((self.round + 1) * self.period).result()
        self.round += 1
        for report in reports:
            self._take(report)
        self._tell_of_the_dead()
        counted = sum(report.counted for report in reports)
        return Progress(
            loss=mean_over(sum(report.loss for report in reports), counted),
            samples=self._samples(),
            wish=wish,
            numbers=self._numbers(),
        )

    def _samples(self) -> int:
        """Examples of the round's batches: also those of workers that died without a report."""
        batches = range((self.round - 1) * self.period, self.round * self.period)
        return sum(len(group.at(batch)) for group in self.computing.batches for batch in batches)

    def _take(self, report: Report) -> None:
        self.worker_meters[report.worker].counters = Counters.from_list(report.counters)
        self.pushes += report.pushes
        for behind, often in report.staleness.items():
            self.staleness[behind] = self.staleness.get(behind, 0) + often
        if report.worker == self.plan.workers[0]:
            self.buffers.load(self.model, report.buffers)

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
        return {"staleness": mean, "pushes": float(self.pushes)}

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
        return [self.group.meter, *self.worker_meters.values()]

    def facts(self) -> dict[str, Any]:
        """Who owned what, who was lost, and how stale the weights of workers were, in clocks."""
        return {
            "parameter_server": {
                "shards": [[keys.vector, keys.start, keys.stop] for keys in self.shards],
                "tables": [[keys.vector, keys.start, keys.stop] for keys in self.table_shards],
                "owners": [placed.owner for placed in self.manager.layout.shards],
                "staleness": sorted(self.staleness.items()),
                "staleness_counts": "clocks",
                "pushes": self.pushes,
                "lost": [list(one) for one in self.manager.dead.items()],
            }
        }
