"""Learner of Downpour SGD under a virtual clock.

Servers and replicas are the state machines of real processes, and the gradients are computed; only
the time is simulated. The duration of a replica's batch follows from its device. A replica of p
partitions is p such devices with p links, and takes a pipeline's time for M micro-batches,

    examples / (p · speed) · (M + p - 1) / M

(`dure.parallel.pipeline.builders` for the bubble). The results are the same. The servers' weights
and all messages are in the CPU's memory, and gradients are computed on the device of the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dure.contracts.learner import Learner, StepResult
from dure.contracts.task import Task
from dure.contracts.world import RankContext
from dure.fleet.virtual_network import NodeLink
from dure.machine.devices import device_of_model, to_cpu
from dure.parameter_server.compressed import compressors_of, push_bytes
from dure.parameter_server.downpour_plan import DownpourPlan
from dure.parameter_server.gradients import ComputedGradients
from dure.parameter_server.messages import server, worker
from dure.parameter_server.plan import first_states
from dure.parameter_server.replica import DownpourReplica
from dure.parameter_server.virtual_servers import VirtualServers
from dure.parameter_server.worker import CONNECTED, WorkerProtocol
from dure.protocol.server_context import conditions_in
from dure.randomness.seeds import generators_state, restore_generators
from dure.record.meter import Meter
from dure.tasks.evaluation import evaluate
from dure.tasks.flops import flops_per_step
from dure.tasks.loss_shares import mean_over
from dure.tensors.buffers import (
    BufferNames,
    load_non_persistent_buffers,
    load_weights,
    non_persistent_buffers_of,
)

_COMPUTATIONS = 4_000
"""Largest number of recorded gradients."""


@dataclass(frozen=True)
class VirtualJob:
    """Gradient that is computed already, and counts as finished from `ends` on."""

    ends: float
    gradients: Sequence[Tensor]
    is_empty: bool

    def result(self) -> Sequence[Tensor]:
        """Return the gradient, by portion."""
        return self.gradients


class SimulatedReplicas(Learner):
    """All servers and replicas of a run, in a single process."""

    where = "server"

    def __init__(self, task: Task, context: RankContext, seed: int, plan: DownpourPlan) -> None:
        self.plan = plan
        self.seed = seed
        self.group = context.group
        self.conditions = conditions_in(context)
        self.model = context.model(task, seed).train()
        self.task = task = task.on(device_of_model(self.model))
        self.terms = plan.terms(task, self.model)
        self.shards = plan.shards(self.model)
        self.layout = plan.layout(self.model)
        self.move = plan.local_step(task, self.model, self.shards)
        self.computing = plan.gradients(task, self.model, seed)
        self.parts = plan.parts(self.model, self.computing.examples, seed)
        steps = plan.steps_per_epoch(self.computing)
        self.period = plan.period or steps
        self.units_per_epoch = max(1, steps // self.period)
        self.round = 0
        self.now = 0.0
        self.server_meters = [
            Meter(server(number), is_worker=False) for number in range(plan.servers)
        ]
        self.replica_meters = {number: Meter(worker(number)) for number in plan.workers}
        self.staleness: dict[int, int] = {}
        self.pushes = 0
        self.buffers = BufferNames(self.model)
        # Buffers of each replica, such as the statistics of batch norm.
        self.own_buffers = {number: self._buffers() for number in plan.workers}
        self._computed: list[ComputedGradients] = []
        self._spent: dict[int, float] = {}
        """Computing seconds of each replica since the last round."""
        self.computations: list[tuple[str, float, float, int]] = []
        """Name, start, seconds and step of the first gradients, since the run began or resumed."""
        self._begin(first_states(self.shards, self.computing, self.terms), {})

    def flops_per_step(self) -> float:
        return flops_per_step(
            self.model, self.computing.examples, self.computing.batches[0].batch_size
        )

    def _begin(self, states: Sequence[Mapping[str, Any]], clocks: Mapping[int, int]) -> None:
        """Create servers with these shards, and replicas with these numbers of pushes."""
        self.virtual = VirtualServers(
            self.plan, self.layout, self.terms, self.conditions, states, self.now
        )
        self.replicas = {
            number: self._replica(number, clocks.get(number, 0)) for number in self.plan.workers
        }
        machines = self.plan.stages
        for number, replica in self.replicas.items():
            device = self.conditions.devices.of(number, self.seed)
            link = NodeLink(out=machines * device.up, into=machines * device.down)
            self.virtual.network.add(worker(number), replica, link)

    def _replica(self, number: int, clock: int) -> DownpourReplica:
        portions = self.plan.portions(number, self.shards)
        side = WorkerProtocol(
            number,
            self.layout,
            portions,
            clock=clock,
            times=CONNECTED,
            compressors=compressors_of(self.terms.coding, self.seed, number, self.shards),
        )

        def compute(step: int, weights: Sequence[Tensor], now: float) -> VirtualJob:
            return self._compute(number, step, weights, now)

        done = self.plan.worker_batches(number, self.round * self.period) if self.round else 0
        return DownpourReplica(
            side, self.plan.pace, self.virtual.values(), compute, self.move, done
        )

    def _compute(self, number: int, step: int, weights: Sequence[Tensor], now: float) -> VirtualJob:
        self._load(weights)
        self.buffers.load(self.model, self.own_buffers[number])
        found = self.computing.mean(
            self.parts[number].at(step), (step, number), worker(number), self.computing.messages()
        )
        if len(self.buffers):
            self.own_buffers[number] = self._buffers()
        self._computed.append(found)
        seconds = self._seconds(number, found.examples)
        self._spent[number] = self._spent.get(number, 0.0) + seconds
        if len(self.computations) < _COMPUTATIONS:
            self.computations.append((worker(number), now, seconds, step))
        gradients = [found.gradients[keys.vector][keys.start : keys.stop] for keys in self.shards]
        return VirtualJob(now + seconds, gradients, not found.examples)

    def _seconds(self, number: int, examples: int) -> float:
        """Return a replica's duration for this number of examples."""
        machines = self.plan.stages
        pieces = max(1, min(self.plan.microbatches, examples))
        speed = machines * self.conditions.devices.of(number, self.seed).examples_per_second
        return examples / speed * (pieces + machines - 1) / pieces

    def _load(self, values: Sequence[Tensor]) -> None:
        """Set the weights to those of the shards."""
        for keys, value in zip(self.shards, values, strict=True):
            self.computing.flat.buffers[keys.vector][keys.start : keys.stop] = value

    def _buffers(self) -> list[Tensor]:
        return [buffer.detach().clone() for buffer in self.buffers.of(self.model)]

    # The run

    def advance(self, control_flags: int) -> StepResult:
        """Run a round: `period` steps of every replica."""
        self._computed = []
        if self.round == 0:
            self._meet(0)  # the warm start, if there is one
        self._meet(self.round * self.period + self.period)
        self.round += 1
        self._count(self.virtual.network.now - self.now)
        self.now = self.virtual.network.now
        counted = sum(one.counted for one in self._computed)
        total = sum(one.loss * one.counted for one in self._computed)
        return StepResult(
            loss=mean_over(total, counted),
            samples=sum(one.examples for one in self._computed),
            control_flags=control_flags,
            numbers=self._numbers(),
        )

    def _meet(self, steps: int) -> None:
        """Run every replica until the end of a round after so many steps."""
        for number, replica in self.replicas.items():
            replica.grant(self.plan.worker_batches(number, steps))
        before = generators_state()
        met = self.virtual.network.run(self._all_met, math.inf)
        restore_generators(before)
        assert met, "nobody waits for anybody for ever"

    def _all_met(self) -> bool:
        return all(one.finished for one in self.replicas.values())

    def _count(self, elapsed: float) -> None:
        """Add the traffic and the computing time of a round of `elapsed` seconds to the meters."""
        self.virtual.count([*self.server_meters, *self.replica_meters.values()])
        for number, meter in self.replica_meters.items():
            computed = self._spent.pop(number, 0.0)
            meter.counters.compute_seconds += computed
            meter.counters.idle_seconds += max(0.0, elapsed - computed)
        for one in self.replicas.values():
            for behind, often in one.side.staleness.items():
                self.staleness[behind] = self.staleness.get(behind, 0) + often
            one.side.staleness.clear()
        self.pushes = sum(one.side.clock for one in self.replicas.values())

    def _numbers(self) -> dict[str, float]:
        often = sum(self.staleness.values())
        mean = sum(behind * times for behind, times in self.staleness.items()) / max(1, often)
        return {"virtual_seconds": self.now, "staleness": mean, "pushes": float(self.pushes)}

    def _load_all(self) -> None:
        """Load the servers' weights and the first replica's buffers into the model."""
        self._load(self.virtual.values())
        self.buffers.load(self.model, self.own_buffers[self.plan.workers[0]])

    def evaluate(self) -> dict[str, float]:
        self._load_all()
        return evaluate(self.task, self.model, self.computing.test, self.group, self.round)

    def weights(self) -> dict[str, Tensor]:
        self._load_all()
        weights: dict[str, Tensor] = to_cpu(dict(self.model.state_dict()))
        return weights

    def state(self) -> dict[str, Any]:
        self._load_all()
        return {
            "version": 1,
            "round": self.round,
            "now": self.now,
            "shards": self.virtual.states(),
            "clocks": {number: one.side.clock for number, one in self.replicas.items()},
            "unsent": {number: one.side.unsent for number, one in self.replicas.items()},
            "staleness": dict(self.staleness),
            "own_buffers": {number: list(own) for number, own in self.own_buffers.items()},
            "buffers": to_cpu(non_persistent_buffers_of(self.model)),
        }

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        load_weights(self.model, weights)
        load_non_persistent_buffers(self.model, state["buffers"])
        self.round = state["round"]
        self.now = state["now"]
        self.staleness = dict(state["staleness"])
        self.own_buffers = {number: list(own) for number, own in state["own_buffers"].items()}
        self._begin(state["shards"], state["clocks"])
        if self.plan.remembers:
            for number, errors in state["unsent"].items():
                self.replicas[number].side.take_unsent(errors)

    def meters(self) -> Sequence[Meter]:
        return [*self.server_meters, *self.replica_meters.values()]

    def facts(self) -> dict[str, Any]:
        """Return owners of shards, and the replicas' lead over the slowest in pushes."""
        return {
            "parameter_server": {
                "shards": [[keys.vector, keys.start, keys.stop] for keys in self.shards],
                "shard_bytes": [values.nbytes for values in self.virtual.values()],
                "owners": [placed.owner for placed in self.layout.shards],
                "staleness": sorted(self.staleness.items()),
                "staleness_counts": "clocks",
                "pushes": self.pushes,
                "push_bytes": push_bytes(self.terms.coding, self.shards),
            }
        }
