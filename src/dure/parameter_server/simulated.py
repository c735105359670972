"""Learner of servers and workers under a virtual clock.

The state machines are those of real processes, and the gradients are computed; only the time is
simulated. The duration of a gradient follows from the worker's device, the duration of a message
from the links (`virtual`). A straggler among four workers, or a thousand workers at a server's
link, cost no more than their gradients, and a run is reproducible to the bit. The servers' weights
and all messages are in the CPU's memory; gradients are computed on the device of the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from dure.contracts.learner import Learner, StepResult
from dure.contracts.task import Task
from dure.contracts.world import RankContext
from dure.fleet.virtual_network import NodeLink, Transmission
from dure.machine.devices import device_of_model, to_cpu
from dure.parameter_server.compressed import compressors_of, push_bytes
from dure.parameter_server.embeddings import load_with_tables, reading, weights_of
from dure.parameter_server.gradients import ComputedGradients
from dure.parameter_server.layout import ReassignedWork, ShardLayout
from dure.parameter_server.messages import server, worker
from dure.parameter_server.plan import ParameterServerPlan, first_states
from dure.parameter_server.scheduler import BatchPart, Scheduler
from dure.parameter_server.tables import SparseRows, TableRows, split_rows
from dure.parameter_server.virtual_servers import VirtualServers
from dure.parameter_server.worker import CONNECTED, WorkerProtocol
from dure.parameter_server.worker_node import WorkerNode
from dure.protocol.server_context import conditions_in
from dure.randomness.seeds import generators_state, restore_generators
from dure.record.meter import Meter
from dure.tasks.evaluation import evaluate
from dure.tasks.flops import flops_per_step
from dure.tasks.loss_shares import mean_over
from dure.tensors.buffers import BufferNames, load_non_persistent_buffers, non_persistent_buffers_of

_SPANS = 4_000
"""Largest number of recorded spans of the timeline, for servers and workers together."""


class SimulatedParameterServer(Learner):
    """All servers and workers of a run, in a single process."""

    where = "server"

    def __init__(
        self, task: Task, context: RankContext, seed: int, plan: ParameterServerPlan
    ) -> None:
        self.plan = plan
        self.seed = seed
        self.group = context.group
        self.conditions = conditions_in(context)
        self.model = context.model(task, seed).train()
        self.task = task = task.on(device_of_model(self.model))
        self.terms = plan.terms_with_tables(task, self.model, seed)
        self.shards = plan.shards(self.model)
        self.table_shards = plan.table_shards(self.model)
        self.portions = plan.all_portions(self.model)
        self.layout = plan.layout(self.model)
        self.tables = plan.tables(self.model, self.terms.tables)
        self.computing = plan.gradients(task, self.model, seed)
        self.computing.tables = self.tables
        self.period = plan.period or self.computing.steps_per_epoch
        self.units_per_epoch = max(1, self.computing.steps_per_epoch // self.period)
        self.round = 0
        self.now = 0.0
        self.server_meters = [
            Meter(server(number), is_worker=False) for number in range(plan.servers)
        ]
        self.worker_meters = {number: Meter(worker(number)) for number in plan.workers}
        self.staleness: dict[int, int] = {}
        self.pushes = 0
        self.waiting = 0.0
        self.spans: list[list[Any]] = []
        self.buffers = BufferNames(self.model)
        # Buffers of each worker, such as the statistics of batch norm.
        self.own_buffers = {number: self._buffers() for number in plan.workers}
        self._computed: list[ComputedGradients] = []
        self._begin(first_states(self.shards, self.computing, self.terms, self.table_shards))

    def flops_per_step(self) -> float:
        return flops_per_step(
            self.model, self.computing.examples, self.computing.batches[0].batch_size
        )

    # Creation

    def _begin(self, states: Sequence[Mapping[str, Any]], clocks: Mapping[int, int] = {}) -> None:
        """Create servers with these shards, and workers with these numbers of pushes."""
        plan = self.plan
        self.virtual = VirtualServers(
            plan, self.layout, self.terms, self.conditions, states, self.now, self._sends
        )
        self.schedulers = [
            Scheduler(members, bounded=plan.staleness is not None) for members in self.layout.groups
        ]
        self.workers = {
            number: WorkerNode(
                own=self._side(number, clocks.get(number, 0)),
                next=self._next,
                compute=self._compute,
                seconds=self._seconds,
                other=_nobody,
                done=self._done,
                rows=self._rows,
            )
            for number in plan.workers
        }
        for number, working in self.workers.items():
            device = self.conditions.devices.of(number, self.seed)
            link = NodeLink(out=device.up, into=device.down)
            self.virtual.network.add(worker(number), working, link)
            self._remind(working.own)

    def _remind(self, side: WorkerProtocol) -> None:
        """Restore a worker's knowledge of the servers' row lists, for equal message lengths."""
        portions = side.portions[len(self.shards) :]
        for portion, shard in zip(portions, self.virtual.tables(), strict=True):
            portion.known = shard.lists.known_to(side.number)

    def _side(self, number: int, clock: int) -> WorkerProtocol:
        # No `again`: messages arrive in order, so a worker's own pushes are applied before its next
        # pull is answered, or the pull waits for the copy.
        return WorkerProtocol(
            number,
            self.layout,
            self.portions,
            clock=clock,
            times=CONNECTED,
            compressors=compressors_of(self.terms.coding, self.seed, number, self.shards),
        )

    # Callbacks of workers

    def _next(self, side: WorkerProtocol, asked: BatchPart | None) -> BatchPart | None:
        scheduler = self.schedulers[self.plan.group_of(side.number)]
        return scheduler.next(side.number, side.clock, asked)

    def _done(self, side: WorkerProtocol, work: BatchPart) -> None:
        self.schedulers[self.plan.group_of(side.number)].done(side.number, work)

    def _seconds(self, number: int, clock: int) -> float:
        """Return the duration of the last computation."""
        devices = self.conditions.devices
        device = devices.of(number, self.seed)
        seconds = self._computed[-1].examples / device.examples_per_second
        seconds *= devices.slowness(number, clock, self.seed)
        self._mark(worker(number), "compute", self.virtual.network.now, seconds, clock)
        return seconds

    def _sends(self, passage: Transmission) -> None:
        """Record that a server's link was busy, which shows congestion."""
        if passage.sender.startswith("server"):
            seconds = passage.gone - passage.left
            self._mark(passage.sender, "communication", passage.left, seconds)

    def _mark(
        self, name: str, category: str, began: float, seconds: float, clock: int | None = None
    ) -> None:
        if seconds > 0 and len(self.spans) < _SPANS:
            self.spans.append([name, category, began, seconds, clock])

    def _rows(self, side: WorkerProtocol, work: BatchPart) -> Sequence[Tensor]:
        """Return the table rows to pull."""
        self.buffers.load(self.model, self.own_buffers[side.number])
        return self.computing.rows_of(work, self.plan.group_of(side.number))

    def _compute(
        self, side: WorkerProtocol, work: BatchPart, values: Sequence[Tensor | SparseRows]
    ) -> tuple[Sequence[Tensor | SparseRows], float]:
        dense, rows = split_rows(values)
        self._load(dense)
        self.buffers.load(self.model, self.own_buffers[side.number])
        group = self.plan.group_of(side.number)
        found = self.computing.of(work, group, side.name, rows, self.computing.messages())
        if len(self.buffers):
            self.own_buffers[side.number] = self._buffers()
        self._computed.append(found)
        gradients = [found.gradients[keys.vector][keys.start : keys.stop] for keys in self.shards]
        return [*gradients, *found.rows], found.weight

    def _load(self, values: Sequence[Tensor]) -> None:
        """Set the weights to those of the shards."""
        for keys, value in zip(self.shards, values, strict=True):
            self.computing.flat.buffers[keys.vector][keys.start : keys.stop] = value

    def _buffers(self) -> list[Tensor]:
        return [buffer.detach().clone() for buffer in self.buffers.of(self.model)]

    # The run

    def advance(self, control_flags: int) -> StepResult:
        """Run a round: `period` batches of every group."""
        self._computed = []
        for scheduler in self.schedulers:
            scheduler.until = (self.round + 1) * self.period
        for one in self.workers.values():
            one.go_on()
        before = generators_state()
        met = self.virtual.network.run(self._all_met, math.inf)
        restore_generators(before)
        assert met, "nobody waits for anybody for ever"
        self.round += 1
        now = self.virtual.network.now
        self._count(now - self.now)
        self.now = now
        counted = sum(one.counted for one in self._computed)
        total = sum(one.loss * one.counted for one in self._computed)
        return StepResult(
            loss=mean_over(total, counted),
            samples=sum(one.examples for one in self._computed),
            control_flags=control_flags,
            numbers=self._numbers(),
        )

    def _all_met(self) -> bool:
        return all(one.finished for one in self.workers.values())

    def _count(self, seconds: float) -> None:
        """Add the traffic and the computing time of a round of `seconds` to the meters."""
        self.virtual.count([*self.server_meters, *self.worker_meters.values()])
        computed = sum(one.computed for one in self.workers.values())
        self.waiting = 1 - computed / (seconds * len(self.workers)) if seconds else 0.0
        for number, one in self.workers.items():
            counters = self.worker_meters[number].counters
            counters.compute_seconds += one.computed
            # Waiting for messages and for workers: the virtual clock does not distinguish them.
            counters.idle_seconds += seconds - one.computed
            one.computed = 0.0
            for behind, often in one.own.staleness.items():
                self.staleness[behind] = self.staleness.get(behind, 0) + often
            one.own.staleness.clear()
        self.pushes += len(self._computed)

    def _numbers(self) -> dict[str, float]:
        often = sum(self.staleness.values())
        mean = sum(behind * times for behind, times in self.staleness.items()) / max(1, often)
        return {
            "virtual_seconds": self.now,
            "staleness": mean,
            "waiting": self.waiting,
            "pushes": float(self.pushes),
        }

    def _load_all(self) -> None:
        """Load the servers' weights and the first worker's buffers into the model."""
        self._load(self.virtual.values())
        self.buffers.load(self.model, self.own_buffers[self.plan.workers[0]])

    def _table_rows(self) -> list[TableRows]:
        """Return the servers' table rows, by shard."""
        return [shard.table for shard in self.virtual.tables()]

    def evaluate(self) -> dict[str, float]:
        self._load_all()
        with reading(self.tables, self._table_rows()):
            return evaluate(self.task, self.model, self.computing.test, self.group, self.round)

    def weights(self) -> dict[str, Tensor]:
        self._load_all()
        changed = [rows.changed for rows in self._table_rows()]
        weights: dict[str, Tensor] = to_cpu(weights_of(self.model, self.tables, changed))
        return weights

    def state(self) -> dict[str, Any]:
        self._load_all()
        return {
            "version": 1,
            "round": self.round,
            "now": self.now,
            "shards": self.virtual.states(),
            "clocks": {number: one.own.clock for number, one in self.workers.items()},
            "unsent": {number: one.own.unsent for number, one in self.workers.items()},
            "staleness": dict(self.staleness),
            "pushes": self.pushes,
            "spans": self.spans,
            "own_buffers": {number: list(own) for number, own in self.own_buffers.items()},
            "buffers": to_cpu(non_persistent_buffers_of(self.model)),
        }

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        load_with_tables(self.model, self.tables, weights)
        load_non_persistent_buffers(self.model, state["buffers"])
        self.round = state["round"]
        self.now = state["now"]
        self.staleness = dict(state["staleness"])
        self.pushes = state["pushes"]
        self.spans = [list(span) for span in state["spans"]]
        self.own_buffers = {number: list(own) for number, own in state["own_buffers"].items()}
        self._begin(state["shards"], state["clocks"])
        if self.plan.remembers:
            for number, errors in state["unsent"].items():
                self.workers[number].own.take_unsent(errors)
        for scheduler in self.schedulers:
            scheduler.resume(self.round * self.period)

    def meters(self) -> Sequence[Meter]:
        return [*self.server_meters, *self.worker_meters.values()]

    def facts(self) -> dict[str, Any]:
        """Return owners of shards, and the staleness of the workers' weights in clocks."""
        return {
            "parameter_server": {
                "shards": [[keys.vector, keys.start, keys.stop] for keys in self.shards],
                "shard_bytes": [values.nbytes for values in self.virtual.values()],
                "tables": [[keys.vector, keys.start, keys.stop] for keys in self.table_shards],
                "owners": [placed.owner for placed in self.layout.shards],
                "staleness": sorted(self.staleness.items()),
                "staleness_counts": "clocks",
                "pushes": self.pushes,
                "push_bytes": push_bytes(self.terms.coding, self.shards),
                "spans": self.spans,
            }
        }


def _nobody(owed: ReassignedWork, layout: ShardLayout) -> WorkerProtocol:
    raise AssertionError("a worker cannot fail under the virtual clock of a run")
