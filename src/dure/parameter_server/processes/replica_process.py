"""Process of a replica: fetch, compute and push until the run ends.

State machines (`replica`, `worker`) determine the messages. A thread computes, so that messages
travel meanwhile; another thread sends heartbeats.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from dure.collectives.group import Group
from dure.contracts.task import Task
from dure.contracts.world import RankContext
from dure.errors import PeerLostError
from dure.machine.global_settings import with_current_settings
from dure.parameter_server.compressed import compressors_of
from dure.parameter_server.downpour_plan import DownpourPlan
from dure.parameter_server.gradients import ComputedGradients
from dure.parameter_server.messages import MANAGER, Envelope, worker
from dure.parameter_server.processes.endpoint import Disconnected, Endpoint
from dure.parameter_server.processes.messages import (
    Drain,
    Drained,
    Heartbeat,
    ProcessCounters,
    RankLost,
    Report,
    RequestCounters,
    Residuals,
    RunEnded,
    SaveResiduals,
    WorkLease,
)
from dure.parameter_server.processes.replica_models import StageModel, WholeModel
from dure.parameter_server.processes.serving import LeaderWatch, check_leader
from dure.parameter_server.processes.worker_process import HeartbeatThread
from dure.parameter_server.replica import DownpourReplica
from dure.parameter_server.worker import CONNECTED, WorkerProtocol
from dure.record.meter import sum_of_counters
from dure.record.trace import Trace


class ThreadJob:
    """Gradient computation in a thread. The thread calls `told` at its end."""

    def __init__(self, compute: Callable[[], ComputedGradients], told: Callable[[], None]) -> None:
        self._compute = compute
        self._told = told
        self._found: ComputedGradients | None = None
        self._error: BaseException | None = None
        self._over = threading.Event()
        # A daemon, since the run may end while the thread waits for another stage.
        threading.Thread(
            target=with_current_settings(self._run), name="dure replica", daemon=True
        ).start()

    def _run(self) -> None:
        try:
            self._found = self._compute()
        except BaseException as error:
            self._error = error
        self._over.set()
        with contextlib.suppress(OSError):  # the port is closed if the run has ended
            self._told()

    @property
    def ends(self) -> float:
        """-inf after the end of the computation, inf before."""
        return -math.inf if self._over.is_set() else math.inf

    def result(self) -> Sequence[Tensor]:
        """Return the gradient, by portion. Raises the error of the computation."""
        if self._error is not None:
            raise self._error
        assert self._found is not None
        return self._found.gradients

    @property
    def is_empty(self) -> bool:
        """Whether the gradient has no examples."""
        assert self._found is not None
        return not self._found.weight


class ReplicaProcess:
    """Process of worker `number` of a plan, which is a replica or a stage of a replica.

    Args:
        number: number of the worker.
        task: the task.
        place: context of the rank.
        model: the run's model.
        seed: seed of the run.
        plan: plan of the run.
        group: ranks of the replica, by stage.
        port: port of the process.
    """

    def __init__(
        self,
        number: int,
        task: Task,
        context: RankContext,
        model: nn.Module,
        seed: int,
        *,
        plan: DownpourPlan,
        group: Group,
        endpoint: Endpoint,
    ) -> None:
        self.number = number
        self.endpoint = endpoint
        self.context = context
        self.watch = LeaderWatch(context.deadline)
        self.meter = context.group.meter
        self.meter.name = worker(number)
        self.trace = context.trace
        self.clock_offset = context.clock_offset
        layout = plan.layout(model)
        shards = plan.shards(model)
        portions = plan.portions(number, shards)
        keys = [shards[shard] for shard, _, _ in portions]
        move = plan.local_step(task, model, keys)
        compressors = compressors_of(plan.coding(model), seed, number, keys)
        self.model: WholeModel | StageModel
        if plan.stage_keys:
            self.model = StageModel(number, task, context, model, seed, plan=plan, group=group)
        else:
            self.model = WholeModel(number, task, model, seed, plan, self.meter)
        self.replica = DownpourReplica(
            WorkerProtocol(number, layout, portions, times=CONNECTED, compressors=compressors),
            plan.pace,
            self.model.weights(),
            self._compute,
            move,
        )
        self._computed: list[ComputedGradients] = []
        self.is_leader = plan.workers_of_replica(plan.replica_of(number))[0] == number
        self._begun = False
        self._told = 0
        """Number of reported pushes."""
        self._reported = (-1, -1)

    def _compute(self, step: int, weights: Sequence[Tensor], now: float) -> ThreadJob:
        def compute() -> ComputedGradients:
            self.context.group.step = f"step {step + 1}"
            found = self.model.compute(step, weights)
            self._computed.append(found)
            return found

        return ThreadJob(compute, self.endpoint.wake)

    # Main loop

    def live(self) -> str:
        """Run until the leader ends the run, or the others continue without this replica.

        Returns the limit by which the run has ended, or "". Raises PeerLostError if the leader is
        lost, and errors of the task.
        """
        heart = HeartbeatThread(self.replica.side, self.endpoint)
        heart.start()
        try:
            while (ended := self._turn()) is None:
                if self.replica.side.given_up:
                    return ""
                self._report()
            return ended
        finally:
            heart.stop()

    def _turn(self) -> str | None:
        """Process received messages and due events; returns the run's limit after its end."""
        waited = time.perf_counter()
        idle = not self.replica.computing
        seconds = self.replica.wake - time.monotonic()
        if not self.endpoint.reach(MANAGER):  # the leader may start late: call it again soon
            seconds = min(seconds, 0.1)
        for sender, said in self.endpoint.hear(self.watch.within(seconds)):
            if isinstance(said, RunEnded):
                return said.ended
            if isinstance(said, Heartbeat | RankLost):
                self.watch.hear(said)
            elif isinstance(said, Disconnected):
                check_leader(sender, said, "training", self.context.group.step)
                self.replica.side.cut(sender)
            elif isinstance(said, WorkLease):
                self._granted(said)
            elif isinstance(said, SaveResiduals):
                errors = {self.number: self.replica.side.unsent}
                self.endpoint.say(sender, Residuals(self.number, errors))
            elif isinstance(said, Residuals):
                self.replica.side.take_unsent(said.errors[self.number])
            elif isinstance(said, Drain):
                self.endpoint.say(MANAGER, Drained(self.number, self.replica.hold()))
            elif isinstance(said, RequestCounters):
                self._tell()
            else:
                self._say(self.replica.receive(sender, said, time.monotonic()))  # type: ignore[arg-type]
        if idle:
            self.meter.communication("wait", waited, time.perf_counter(), self.replica.step + 1)
        self.watch.look("training", self.context.group.step)
        if time.monotonic() >= self.replica.wake:
            try:
                self._say(self.replica.tick(time.monotonic()))
            except PeerLostError:
                return ""  # another stage of this replica was lost; other replicas continue
        return None

    def _granted(self, grant: WorkLease) -> None:
        if not self._begun:
            self._begun = True
            self.replica.side.begin_at(grant.clock)
            self.replica.begin_at(grant.done)
            if grant.buffers:
                self.model.load_buffers(grant.buffers)
            self._told = self.replica.side.clock
        if self.replica.held:
            self.replica.stop_at(grant.until)
        else:
            self.replica.grant(grant.until)

    def _tell(self) -> None:
        """Send the counters."""
        # Without the timeline, to which a concurrent computation may be writing.
        nothing = Trace().packed(self.clock_offset)
        self.endpoint.say(MANAGER, ProcessCounters(worker(self.number), self._counters(), nothing))

    def _counters(self) -> list[float]:
        # A copy, since a pipeline updates the counters concurrently.
        counters = sum_of_counters([self.meter.counters])
        counters.bytes_sent += self.endpoint.sent
        counters.bytes_received += self.endpoint.received
        return counters.as_list()

    def _say(self, said: Sequence[Envelope]) -> None:
        for to, message in said:
            if not self.endpoint.say(to, message):
                self.replica.side.cut(to)

    def _report(self) -> None:
        """Send a report when all granted work is done."""
        side = self.replica.side
        stands = (self.replica.until, side.layout.version)
        if not self.replica.finished or stands == self._reported:
            return
        self._reported = stands
        report = Report(
            worker=self.number,
            until=stands[0],
            layout=stands[1],
            loss=sum(one.loss * one.counted for one in self._computed),
            counted=sum(one.counted for one in self._computed),
            examples=sum(one.examples for one in self._computed),
            pushes=self._pushes(),
            staleness=dict(side.staleness),
            counters=self._counters(),
            done=(),
            buffers=self.model.buffers(),
            trace=self.trace.packed(self.clock_offset),
        )
        self.trace.lanes.clear()
        side.staleness.clear()
        self._computed.clear()
        self.endpoint.say(MANAGER, report)

    def _pushes(self) -> int:
        """Return the replica's pushes since the last report; the first stage reports for all."""
        clock = self.replica.side.clock
        made = clock - self._told
        self._told = clock
        return made if self.is_leader else 0
