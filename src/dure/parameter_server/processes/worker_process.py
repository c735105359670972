"""Process of a worker: pull, compute and push until the run ends.

State machines (`worker`, `worker_node`) determine the messages. A thread sends heartbeats, since a
step may take any time.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from dure.contracts.task import Task
from dure.contracts.world import RankContext
from dure.machine.devices import to_cpu
from dure.parameter_server.compressed import compressors_of
from dure.parameter_server.embeddings import tables_of
from dure.parameter_server.gradients import ComputedGradients
from dure.parameter_server.layout import ReassignedWork, ShardLayout
from dure.parameter_server.messages import MANAGER, Envelope, ServerBeat, worker
from dure.parameter_server.plan import ParameterServerPlan
from dure.parameter_server.processes.buffers import GradientBuffers, WeightBuffers
from dure.parameter_server.processes.endpoint import HEARTBEAT_SUFFIX, Disconnected, Endpoint
from dure.parameter_server.processes.messages import (
    AssignWork,
    Drain,
    Drained,
    Heartbeat,
    ProcessCounters,
    RankLost,
    Report,
    RequestCounters,
    RequestWork,
    Residuals,
    RunEnded,
    SaveResiduals,
    WorkLease,
)
from dure.parameter_server.processes.serving import LeaderWatch, check_leader
from dure.parameter_server.scheduler import BatchPart, Scheduler
from dure.parameter_server.tables import SparseRows, split_rows
from dure.parameter_server.worker import CONNECTED, WorkerProtocol
from dure.parameter_server.worker_node import WorkerNode
from dure.tensors.buffers import BufferNames


class WorkerProcess:
    """Process of worker `number` of a plan."""

    def __init__(
        self,
        number: int,
        task: Task,
        context: RankContext,
        seed: int,
        plan: ParameterServerPlan,
        endpoint: Endpoint,
    ) -> None:
        self.number = number
        self.plan = plan
        self.seed = seed
        self.endpoint = endpoint
        self.context = context
        self.watch = LeaderWatch(context.deadline)
        self.meter = context.group.meter
        self.meter.name = worker(number)
        self.trace = context.trace
        self.clock_offset = context.clock_offset
        self.model = context.model(task, seed).train()
        self.shards = plan.shards(self.model)
        self.portions = plan.all_portions(self.model)
        self.coding = plan.coding(self.model)
        tables = plan.tables(self.model, tables_of(task, self.model, seed))
        self.computing = plan.gradients(task, self.model, seed)
        self.computing.tables = tables
        self.slots = WeightBuffers(self.computing.flat, self.shards)
        self.outbox = GradientBuffers(self.computing.flat.buffers)
        self.buffers = BufferNames(self.model)
        self.group = plan.group_of(number)
        layout = plan.layout(self.model)
        self.scheduler = Scheduler(layout.groups[self.group], bounded=plan.staleness is not None)
        self.worker = WorkerNode(
            own=self._side(number, layout, 0),
            next=self._next,
            compute=self._compute,
            seconds=lambda who, clock: 0.0,
            other=self._other,
            done=lambda side, work: self._done.append(work),
            rows=lambda side, work: self.computing.rows_of(work, self.group),
        )
        self._computed: list[ComputedGradients] = []
        self._done: list[BatchPart] = []
        self._dealt: deque[BatchPart] = deque()
        self._asked = False
        self._left = False
        """Whether there may be parts to ask for."""
        self._reported = (-1, -1)

    def _side(self, number: int, layout: ShardLayout, clock: int) -> WorkerProtocol:
        into = partial(self.slots.ask, number)
        return WorkerProtocol(
            number,
            layout,
            self.portions,
            clock=clock,
            times=CONNECTED,
            into=into,
            compressors=compressors_of(self.coding, self.seed, number, self.shards),
        )

    def _other(self, owed: ReassignedWork, layout: ShardLayout) -> WorkerProtocol:
        return self._side(owed.worker, layout, owed.first)

    # Work

    def _next(self, side: WorkerProtocol, asked: BatchPart | None) -> BatchPart | None:
        self.scheduler.members = side.layout.groups[self.group]
        if self.scheduler.bounded:
            return self.scheduler.next(side.number, side.clock)
        if asked is not None:
            return asked
        work = self._dealt.popleft() if self._dealt else None
        if not self._dealt and self._left and not self._asked:
            # Ask before the last part is computed, so that the next parts arrive in time.
            self._asked = True
            self.endpoint.say(MANAGER, RequestWork(self.number, tuple(self._done)))
            self._done.clear()
        return work

    def _compute(
        self, side: WorkerProtocol, work: BatchPart, values: Sequence[Tensor | SparseRows]
    ) -> tuple[Sequence[Tensor | SparseRows], float]:
        self.endpoint.flush()
        self.context.group.step = f"step {work.batch + 1}"
        started = time.perf_counter()
        dense, rows = split_rows(values)
        self.slots.take(side.number, dense)
        found = self.computing.of(work, self.group, side.name, rows, self.outbox.room(side))
        self._computed.append(found)
        self.meter.compute("gradient", started, time.perf_counter(), work.batch + 1)
        gradients = [found.gradients[keys.vector][keys.start : keys.stop] for keys in self.shards]
        return [*gradients, *found.rows], found.weight

    # Main loop

    def live(self) -> str:
        """Run until the leader ends the run; returns the limit by which it has ended.

        Raises PeerLostError if the leader is lost.
        """
        heart = HeartbeatThread(self.worker.own, self.endpoint)
        heart.start()
        try:
            while (ended := self._turn()) is None:
                self._report()
            return ended
        finally:
            heart.stop()

    def _turn(self) -> str | None:
        """Process received messages and due events; returns the run's limit after its end."""
        waited = time.perf_counter()
        seconds = self.worker.wake - time.monotonic()
        if not self.endpoint.reach(MANAGER):  # the leader may start late: call it again soon
            seconds = min(seconds, 0.1)
        for sender, said in self.endpoint.hear(self.watch.within(seconds)):
            if isinstance(said, RunEnded):
                return said.ended
            if isinstance(said, Heartbeat | RankLost):
                self.watch.hear(said)
            elif isinstance(said, Disconnected):
                check_leader(sender, said, "training", self.context.group.step)
                self._cut(sender)
            elif isinstance(said, WorkLease):
                self._granted(said)
            elif isinstance(said, SaveResiduals):
                errors = {side.number: side.unsent for side in self.worker.sides}
                self.endpoint.say(sender, Residuals(self.number, errors))
            elif isinstance(said, Residuals):
                self.worker.own.take_unsent(said.errors[self.number])
            elif isinstance(said, Drain):
                self._hold()
            elif isinstance(said, RequestCounters):
                self._tell()
            elif isinstance(said, AssignWork):
                self._asked = False
                self._left = bool(said.works)
                self._dealt.extend(said.works)
                self.worker.go_on()
            else:
                self.slots.heard(sender, said)  # type: ignore[arg-type]
                self._say(self.worker.receive(sender, said, time.monotonic()))  # type: ignore[arg-type]
        self._waited(waited)
        self.watch.look("training", self.context.group.step)
        if time.monotonic() >= self.worker.wake:
            self._say(self.worker.tick(time.monotonic()))
        return None

    def _granted(self, grant: WorkLease) -> None:
        self.worker.own.begin_at(grant.clock)
        if grant.buffers:
            self.buffers.load(self.model, grant.buffers)
        self.scheduler.until = grant.until
        self._left = True
        self.worker.go_on()

    def _hold(self) -> None:
        """Begin nothing more, and return assigned parts that are not begun."""
        until = self.worker.hold()
        back: list[BatchPart] = []
        if not self.scheduler.bounded:
            back = [*self.worker.drop(), *self._dealt]
            self._dealt.clear()
            self._left = False
            self.worker.go_on()
        self.endpoint.say(MANAGER, Drained(self.number, until, tuple(back)))

    def _tell(self) -> None:
        """Send the counters and the new part of the timeline."""
        trace = self.trace.packed(self.clock_offset)
        self.trace.lanes.clear()
        self.endpoint.say(MANAGER, ProcessCounters(worker(self.number), self._counters(), trace))

    def _counters(self) -> list[float]:
        counters = self.meter.counters
        counters.bytes_sent = self.endpoint.sent
        counters.bytes_received = self.endpoint.received
        return counters.as_list()

    def _say(self, said: Sequence[Envelope]) -> None:
        for to, message in said:
            self.slots.said(to, message)  # type: ignore[arg-type]
            if not self.endpoint.say(to, message):
                self._cut(to)

    def _cut(self, node: str) -> None:
        for side in self.worker.sides:
            side.cut(node)

    def _waited(self, since: float) -> None:
        self.meter.communication("wait", since, time.perf_counter(), self.worker.own.clock + 1)

    def _report(self) -> None:
        """Send a report when all granted work is done."""
        asks = not self.scheduler.bounded and (self._left or self._dealt)
        stands = (self.scheduler.until, self.worker.own.layout.version)
        # Since the last report the worker may have done another worker's part.
        new = stands != self._reported or self._computed or self._done
        if not self.worker.finished or asks or not new:
            return
        self._reported = stands
        staleness: dict[int, int] = {}
        for side in self.worker.sides:
            for behind, often in side.staleness.items():
                staleness[behind] = staleness.get(behind, 0) + often
            side.staleness.clear()
        report = Report(
            worker=self.number,
            until=stands[0],
            layout=stands[1],
            loss=sum(one.loss * one.counted for one in self._computed),
            counted=sum(one.counted for one in self._computed),
            examples=sum(one.examples for one in self._computed),
            pushes=len(self._computed),
            staleness=staleness,
            counters=self._counters(),
            done=tuple(self._done),
            buffers=to_cpu([buffer.detach() for buffer in self.buffers.of(self.model)]),
            trace=self.trace.packed(self.clock_offset),
        )
        self.trace.lanes.clear()
        self._computed.clear()
        self._done.clear()
        self.endpoint.say(MANAGER, report)


class HeartbeatThread(threading.Thread):
    """Thread that sends a worker's heartbeats to the manager during computations."""

    def __init__(self, side: WorkerProtocol, endpoint: Endpoint, beat: float = 0.5) -> None:
        super().__init__(name="dure heart", daemon=True)
        self._side = side
        self._port = endpoint.beside(f"{side.name}{HEARTBEAT_SUFFIX}")
        self._beat = beat
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(self._beat):
            side = self._side
            beat = ServerBeat(side.name, side.layout.version, math.nan, clock=side.clock)
            self._port.say(MANAGER, beat)
            self._port.flush()
        self._port.close()

    def stop(self) -> None:
        """Stop the thread and wait for its end."""
        self._ended.set()
        self.join()
