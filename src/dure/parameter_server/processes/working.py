"""The life of a worker's process: pull, compute, push, until the run is over.

What is to be pulled and pushed the state machines say (`worker`, `at_work`). A thread of its own
says that the worker is alive, since a step may take as long as it likes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence

from torch import Tensor

from dure.contracts.strategy import Place
from dure.contracts.task import Task
from dure.parameter_server.at_work import Worker
from dure.parameter_server.embeddings import tables_of
from dure.parameter_server.gradients import Computed
from dure.parameter_server.layout import Layout, Owed
from dure.parameter_server.messages import MANAGER, Beat, Envelope
from dure.parameter_server.plan import Plan
from dure.parameter_server.processes.port import Gone, Port
from dure.parameter_server.processes.said import Ask, Deal, Grant, Over, Report
from dure.parameter_server.processes.serving import check_leader
from dure.parameter_server.scheduler import Scheduler, Work
from dure.parameter_server.tables import Rows, apart
from dure.parameter_server.worker import WorkerSide
from dure.tensors.buffers import Buffers


class Working:
    """Worker `number` of a plan."""

    def __init__(
        self, number: int, task: Task, place: Place, seed: int, plan: Plan, port: Port
    ) -> None:
        self.number = number
        self.plan = plan
        self.port = port
        self.meter = place.group.meter
        self.model = place.model(task, seed).train()
        self.shards = plan.shards(self.model)
        self.portions = plan.all_portions(self.model)
        tables = plan.tables(self.model, tables_of(task, self.model, seed))
        self.computing = plan.gradients(task, self.model, seed)
        self.computing.tables = tables
        self.buffers = Buffers(self.model)
        self.group = plan.group_of(number)
        layout = plan.layout(self.model)
        self.scheduler = Scheduler(layout.groups[self.group], bounded=plan.staleness is not None)
        self.worker = Worker(
            own=self._side(number, layout, 0),
            next=self._next,
            compute=self._compute,
            seconds=lambda who, clock: 0.0,
            other=self._other,
            done=lambda side, work: self._done.append(work),
            rows=lambda side, work: self.computing.rows_of(work, self.group),
        )
        self._computed: list[Computed] = []
        self._done: list[Work] = []
        self._dealt: list[Work] = []
        self._asked = False
        self._left = False
        """Whether there may be parts to ask for."""
        self._reported = (-1, -1)

    def _side(self, number: int, layout: Layout, clock: int) -> WorkerSide:
        # Streams lose nothing: what is not answered waits, or its server is gone, which the
        # manager says. What got lost with a connection is said again.
        return WorkerSide(number, layout, self.portions, clock=clock, patience=1.0, beat=None)

    def _other(self, owed: Owed, layout: Layout) -> WorkerSide:
        return self._side(owed.worker, layout, owed.first)

    # Work

    def _next(self, side: WorkerSide, asked: Work | None) -> Work | None:
        self.scheduler.members = side.layout.groups[self.group]
        if self.scheduler.bounded:
            return self.scheduler.next(side.number, side.clock)
        if asked is not None:
            return asked
        if self._dealt:
            return self._dealt.pop(0)
        if self._left and not self._asked:
            self._asked = True
            self.port.say(MANAGER, Ask(self.number, tuple(self._done)))
            self._done.clear()
        return None

    def _compute(
        self, side: WorkerSide, work: Work, values: Sequence[Tensor | Rows]
    ) -> tuple[Sequence[Tensor | Rows], float]:
        started = time.perf_counter()
        dense, rows = apart(values)
        for keys, value in zip(self.shards, dense, strict=True):
            self.computing.flat.buffers[keys.vector][keys.start : keys.stop] = value
        found = self.computing.of(work, self.group, side.name, rows)
        self._computed.append(found)
        self.meter.compute("gradient", started, time.perf_counter(), work.batch + 1)
        gradients = [found.gradients[keys.vector][keys.start : keys.stop] for keys in self.shards]
        return [*gradients, *found.rows], found.weight

    # The life

    def live(self) -> None:
        """Until the leader says that it is over. Raises PeerLostError if that is gone."""
        heart = Heart(self.worker.own, self.port)
        heart.start()
        try:
            while self._turn():
                self._report()
        finally:
            heart.stop()

    def _turn(self) -> bool:
        """What has come, and what is due; False at the end."""
        waited = time.perf_counter()
        for sender, said in self.port.hear(self.worker.wake - time.monotonic()):
            if isinstance(said, Over):
                return False
            if isinstance(said, Gone):
                check_leader(sender, said, "training")
            elif isinstance(said, Grant):
                self._granted(said)
            elif isinstance(said, Deal):
                self._asked = False
                self._left = said.work is not None
                if said.work is not None:
                    self._dealt.append(said.work)
                self.worker.go_on()
            else:
                self._say(self.worker.receive(sender, said, time.monotonic()))  # type: ignore[arg-type]
        self._waited(waited)
        if time.monotonic() >= self.worker.wake:
            self._say(self.worker.tick(time.monotonic()))
        return True

    def _granted(self, grant: Grant) -> None:
        self.worker.own.begin_at(grant.clock)
        self.scheduler.until = grant.until
        self._left = True
        self.worker.go_on()

    def _say(self, said: Sequence[Envelope]) -> None:
        for to, message in said:
            self.port.say(to, message)

    def _waited(self, since: float) -> None:
        self.meter.communication("wait", since, time.perf_counter(), self.worker.own.clock + 1)

    def _report(self) -> None:
        """Says what it has done, once it has nothing to do."""
        asks = not self.scheduler.bounded and (self._left or self._dealt)
        stands = (self.scheduler.until, self.worker.own.layout.version)
        if not self.worker.finished or asks or stands == self._reported:
            return
        self._reported = stands
        counters = self.meter.counters
        counters.bytes_sent = self.port.sent
        counters.bytes_received = self.port.received
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
            counters=counters.as_list(),
            done=tuple(self._done),
            buffers=[buffer.detach() for buffer in self.buffers.of(self.model)],
        )
        self._computed.clear()
        self._done.clear()
        self.port.say(MANAGER, report)


class Heart(threading.Thread):
    """Says to the manager, again and again, that a worker is alive, whatever it computes."""

    def __init__(self, side: WorkerSide, port: Port, beat: float = 0.5) -> None:
        super().__init__(name="dure heart", daemon=True)
        self._side = side
        self._port = port.beside(f"{side.name} heart")
        self._beat = beat
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(self._beat):
            side = self._side
            beat = Beat(side.name, side.layout.version, math.nan, clock=side.clock)
            self._port.say(MANAGER, beat)
        self._port.close()

    def stop(self) -> None:
        """Ends it."""
        self._ended.set()
        self.join()
