"""Leader: the manager, the schedulers, and the run's requests to servers and workers.

The leader is a thread of rank 0, since servers must be heard during evaluation and checkpoints.
Only this thread uses the leader's port; other threads queue requests and wait for futures.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from dure.errors import DureError, LossNotFiniteError, PeerLostError, WorkerFailedError
from dure.machine.stall_timeout import StallTimeout
from dure.parameter_server.graceful_stop import GracefulStop, ResumePoint, owed_until
from dure.parameter_server.manager import Manager
from dure.parameter_server.messages import (
    MANAGER,
    Envelope,
    Replicated,
    ServerBeat,
    Snapshot,
    Values,
    server,
    worker,
)
from dure.parameter_server.plan import ParameterServerPlan
from dure.parameter_server.processes.endpoint import Disconnected, Endpoint
from dure.parameter_server.processes.meeting import rank_of
from dure.parameter_server.processes.messages import (
    AssignWork,
    Drain,
    Drained,
    Heartbeat,
    ProcessCounters,
    RankFailed,
    RankLost,
    Report,
    RequestCounters,
    RequestWork,
    Residuals,
    RunEnded,
    Save,
    SaveResiduals,
    WorkLease,
)
from dure.parameter_server.scheduler import Scheduler
from dure.parameter_server.tables import SparseRows, copied
from dure.parameter_server.worker import CONNECTED, WorkerProtocol

READER = -1
"""Worker number of the leader as a reader of weights."""

_RETURN_SECONDS = 0.3
"""Seconds that a live process has for a new connection after its connection broke."""

Shards = list[Mapping[str, Any]]
Errors = dict[int, list[Tensor]]
"""Residuals of each worker's compressed pushes, by portion."""


class Leader:
    """Leader of a run, from `start` to `end`.

    Args:
        plan: plan of the run.
        manager: manager of the nodes.
        portions: all shards, as portions of a worker.
        holds: description of each shard.
        port: the leader's port.
        deadline: seconds that others wait for a live worker without a step, or for a measurement
            without a further batch.

    From the constructor on the thread sends heartbeats to all: a silent leader is dropped.
    """

    def __init__(
        self,
        plan: ParameterServerPlan,
        manager: Manager,
        portions: Sequence[tuple[int, int, int]],
        holds: Sequence[str],
        endpoint: Endpoint,
        deadline: float,
    ) -> None:
        self.plan = plan
        self.manager = manager
        self.holds = holds
        self.endpoint = endpoint
        self.schedulers = [
            Scheduler(members, bounded=not plan.deals) for members in manager.layout.groups
        ]
        self._reader = WorkerProtocol(READER, manager.layout, portions, times=CONNECTED)
        self._requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._over = False
        self.ended = ""
        """Limit by which the run has ended."""
        self._first: dict[int, Mapping[str, Any]] = {}
        """Initial shards that were not sent yet."""
        self._begun: set[int] = set()
        self._began: Mapping[int, int] = {}
        """Batches of each worker that were done before the start."""
        self._buffers: dict[int, list[Tensor]] = {}
        """Buffers of the workers' models that were not sent yet."""
        self._clocks: dict[int, int] = {}
        """Pushes of each worker that the servers had at the start."""
        self._begins: Future[None] | None = None
        self._meets: Future[list[Report]] | None = None
        self._reads: Future[list[Tensor | SparseRows]] | None = None
        self._saves: Future[Shards] | None = None
        self._saved: dict[int, Mapping[str, Any]] = {}
        self._keeps: Future[Errors] | None = None
        self._unsent: dict[int, Errors] = {}
        """Residuals by the worker that stores them, or at the start is to store them."""
        self._tells: Future[list[ProcessCounters]] | None = None
        self._asked: list[str] = []
        """Nodes that are to report counters."""
        self._accounts: dict[str, ProcessCounters] = {}
        self._ends = False
        """Whether the run is to end."""
        self._holding: GracefulStop | None = None
        self._held_since = 0.0
        self.standing: ResumePoint | None = None
        """Progress of the workers at a graceful stop; None after a complete round."""
        self._reports: list[Report] = []
        self._stands: dict[int, tuple[int, int]] = {}
        """Reported progress of each worker: first batch not done, and version of its layout."""
        self._deadline = deadline
        self._clock: dict[int, tuple[int, float]] = {}
        """Clock of each worker, and the time of its last change."""
        self._gone: dict[str, tuple[float, str]] = {}
        """Broken connections: time and reason."""
        self._spoke: dict[str, float] = {}
        """Time of the last heartbeat to each node."""
        self._measures: tuple[str, int] | None = None
        """Round of the current measurement, and the number of its begun batches."""
        self._patience = StallTimeout(deadline)
        self._thread = threading.Thread(target=self._lead, name="dure leader", daemon=True)
        self._thread.start()

    def start(
        self,
        states: Sequence[Mapping[str, Any]],
        standing: ResumePoint,
        buffers: Mapping[int, list[Tensor]],
        unsent: Errors | None = None,
    ) -> None:
        """Start the run; returns when the owners of all shards have these states.

        Args:
            states: initial states, by shard.
            standing: progress of the workers in these states.
            buffers: buffers of the workers' models.
            unsent: residuals of the workers; None for none.
        """
        self._began = standing.until
        self._buffers = dict(buffers)
        self._unsent = {who: {who: errors} for who, errors in (unsent or {}).items()}
        for scheduler, group, undone in zip(
            self.schedulers, self.plan.groups, standing.undone, strict=True
        ):
            if self.plan.deals:
                scheduler.resume(standing.until[group[0]], undone)
        if self.plan.staleness is not None:
            states = [_all_at(state, standing.until) for state in states]
        self._ask(lambda: self._hand_out(states)).result()

    def meet(self, until: int) -> Future[list[Report]]:
        """Let all workers do the batches before `until`; the future has their reports."""
        return self._ask(lambda: self._grant(until))

    def hold(self) -> None:
        """Begin a graceful stop: begun work is finished, and then the future of `meet` completes.

        If this is before the end of the round, `standing` has the progress. The stop has no effect
        after the round is complete, and waits for the first step since the start.
        """
        self._requests.put(self._is_to_end)
        self.endpoint.wake()

    def accounts(self, workers: bool = False) -> Future[list[ProcessCounters]]:
        """Request counters of the live servers.

        With `workers`, of the workers as well, within a round.
        """
        return self._ask(lambda: self._tell(workers))

    def values(self) -> Future[list[Tensor | SparseRows]]:
        """Request the weights, by shard; for tables the changed rows."""
        return self._ask(self._read)

    def states(self) -> Future[Shards]:
        """Request the shards with the states of their optimizers."""
        return self._ask(self._save)

    def unsent(self) -> Future[Errors]:
        """Request the residuals of each worker's compressed pushes."""
        return self._ask(self._keep)

    def measures(self, step: str) -> None:
        """Record the begin of another batch of a measurement, for which all others wait."""
        often = 0 if self._measures is None else self._measures[1]
        self._measures = (step, often + 1)

    def measured(self) -> None:
        """Record the end of a measurement."""
        self._measures = None

    def end(self) -> None:
        """End the run at all nodes, and join the thread."""
        self._requests.put(self._end)
        self.endpoint.wake()
        if self._thread.is_alive():
            self._thread.join()

    def _ask(self, begin: Callable[[], Future[Any]]) -> Future[Any]:
        """Let the thread begin an operation; returns a future of its result."""
        asked: Future[Any] = Future()

        def here() -> None:
            if self._error is not None:
                asked.set_exception(self._error)
                return
            begun = begin()
            begun.add_done_callback(lambda done: _pass_on(done, asked))

        self._requests.put(here)
        self.endpoint.wake()
        return asked

    # The thread

    def _lead(self) -> None:
        try:
            # Messages before the start are queued.
            while self._requests.empty():
                self._speak()
                self._look_at_measuring()
                self.endpoint.listen(self._patience.every)
            while not self._over:
                self._turn()
        except BaseException as error:
            self._fail(error)
            while not self._over:  # requests get the error
                self._requests.get()()
        finally:
            self.endpoint.close()

    def _turn(self) -> None:
        self._speak()
        self._look_at_measuring()
        wake = min(self.manager.wake, self._reader.wake, self._return())
        wake = min(wake, time.monotonic() + self._patience.every)
        if self._begins is not None:
            wake = min(wake, time.monotonic() + 0.01)  # calls are answered without a word
        for sender, said in self.endpoint.hear(wake - time.monotonic()):
            self._hear(sender, said, time.monotonic())
        while not self._requests.empty():
            self._requests.get()()
        now = time.monotonic()
        version = self.manager.layout.version
        self._bury(now)
        if now >= self.manager.wake:
            self._say(self.manager.tick(now))
        if now >= self._reader.wake:
            self._say(self._reader.tick(now))
        self._look_at_losses()
        self._look_at_hanging(now)
        self._look_at_beginning()
        if self.manager.layout.version != version:
            self._changed(now)
        self._look_at_holding()
        self._look_at_meeting()
        self._look_at_accounts()
        self._look_at_unsent()

    def _hear(self, sender: str, said: Any, now: float) -> None:
        version = self.manager.layout.version
        if isinstance(said, Disconnected):
            # A lost process loses its main connection too; a heartbeat connection is renewed.
            if sender.endswith(" heart"):
                return
            self._gone[sender] = (now, said.reason)
            self._reader.cut(sender)
        elif isinstance(said, RankFailed):
            raise _error_of(said)
        elif isinstance(said, Report):
            self._reports.append(said)
            self._stands[said.worker] = (said.until, said.layout)
            self._done(said.worker, said.done)
        elif isinstance(said, Drained):
            self._take_held(said)
        elif isinstance(said, RequestWork):
            self._done(said.worker, said.done)
            scheduler = self.schedulers[self.plan.group_of(said.worker)]
            self.endpoint.say(sender, AssignWork(scheduler.deal(said.worker)))
        elif isinstance(said, Values):
            self._reader.receive(sender, said, now)
            if self._reader.arrived and self._reads is not None:
                reads = self._reads
                self._reads = None
                reads.set_result([copied(value) for value in self._reader.take()])
        elif isinstance(said, Snapshot):
            self._saved[said.shard] = said.state
            self._look_at_saved()
        elif isinstance(said, ProcessCounters):
            self._accounts[said.name] = said
        elif isinstance(said, Residuals):
            self._unsent[said.worker] = said.errors
        elif isinstance(said, Replicated):
            self._begun.add(said.shard)
        else:
            self._gone.pop(sender, None)
            if isinstance(said, ServerBeat):
                self._note(said, now)
            self._say(self.manager.receive(sender, said, now))
        if self.manager.layout.version != version:
            self._changed(now)

    def _say(self, said: Sequence[Envelope]) -> None:
        for to, message in said:
            if not self.endpoint.say(to, message):
                self._reader.cut(to)

    def _speak(self) -> None:
        """Send due heartbeats to all reachable nodes; a new node gets one at once."""
        now = time.monotonic()
        for name in self._everybody():
            if now >= self._spoke.get(name, 0.0) + self._patience.every and self.endpoint.reaches(
                name
            ):
                self._spoke[name] = now
                self.endpoint.say(name, Heartbeat())

    def _everybody(self) -> list[str]:
        return [*map(server, range(self.plan.servers)), *map(worker, self.plan.workers)]

    # Losses

    def _look_at_measuring(self) -> None:
        """Check the progress of a measurement; raises PeerLostError, here and at all nodes."""
        measures = self._measures
        if measures is None or not self._patience.is_over(measures):
            return
        reason = f"has made no step for {self._deadline:g} s, and all others wait for it"
        lost = RankLost((0,), "measuring", measures[0], reason)
        for name in self._everybody():
            if self.endpoint.reaches(name):
                self.endpoint.say(name, lost)
        self.endpoint.flush()
        raise lost.error()

    def _return(self) -> float:
        """Return the time at which the next broken connection counts as a loss."""
        return min((since for since, _ in self._gone.values()), default=1e300) + _RETURN_SECONDS

    def _bury(self, now: float) -> None:
        """Drop the nodes that have not reconnected in time."""
        for name, (since, reason) in list(self._gone.items()):
            if now < since + _RETURN_SECONDS:
                continue
            del self._gone[name]
            self._say(self.manager.lost(name, reason, now))

    def _changed(self, now: float) -> None:
        """Distribute a new layout to the reader and the schedulers."""
        for who in self.plan.workers:
            if not self.manager.alive(worker(who)):
                for other in self.plan.companions(who):
                    reason = f"cannot continue without {worker(who)}"
                    self._say(self.manager.lost(worker(other), reason, now))
        layout = self.manager.layout
        self._say(self._reader.receive(MANAGER, layout, now))
        for number, scheduler in enumerate(self.schedulers):
            scheduler.members = layout.groups[number]
            for who in scheduler.members.workers:
                if not self.manager.alive(worker(who)) and who not in layout.closing:
                    scheduler.gone(who)
        # The parts of dropped workers are available again: workers may ask for them.
        if self._holding is None or self._holding.until:
            self._grant_all()
        if self._saves is not None:
            self._ask_shards()

    def _note(self, beat: ServerBeat, now: float) -> None:
        """Record a worker's clock."""
        kind, _, number = beat.node.partition(" ")
        if kind == "worker" and self._clock.get(int(number), (-1, 0.0))[0] < beat.clock:
            self._clock[int(number)] = (beat.clock, now)

    def _look_at_hanging(self, now: float) -> None:
        """Check that no worker delays others beyond the deadline; raises PeerLostError if so.

        A worker that is alone, or has the same clock as all others, may take any time.
        """
        if self._meets is None:
            return
        if self._holding is not None:
            self._look_at_end(now)
        for group in self.plan.groups:
            clocks = [
                (*self._clock[w], w) for w in group if w in self._clock and w in self._alive()
            ]
            if not clocks:
                continue
            least, since, who = min(clocks)
            # The workers ahead have waited at least since the earliest of their clock changes.
            ahead = [at for clock, at, _ in clocks if clock > least]
            if ahead and now - max(since, min(ahead)) > self._deadline:
                raise PeerLostError(
                    (rank_of(worker(who), self.plan),),
                    "the round",
                    f"step {least + 1}",
                    f"has made no step for {self._deadline:g} s, and others wait for it",
                )

    def _look_at_losses(self) -> None:
        for loss in self.manager.losses:
            if loss.shards:
                name = server(loss.server)
                held = " and ".join(self.holds[shard] for shard in loss.shards)
                advice = "" if self.plan.replicas else f" ({self.plan.copies_field}=1 keeps one)"
                raise PeerLostError(
                    (rank_of(name, self.plan),),
                    "training",
                    "the round",
                    f"{loss.reason}; {name} held {held}, of which there is no copy{advice}",
                )
        for group in self.plan.groups:
            names = [worker(who) for who in group]
            if all(name in self.manager.dead for name in names):
                reasons = ", ".join(f"{name} {self.manager.dead[name]}" for name in names)
                raise PeerLostError(
                    tuple(rank_of(name, self.plan) for name in names),
                    "training",
                    "the round",
                    f"are lost, and no worker is left in their group: {reasons}",
                )

    def _alive(self) -> list[int]:
        return [who for who in self.plan.workers if self.manager.alive(worker(who))]

    # What the run asks

    def _hand_out(self, states: Sequence[Mapping[str, Any]]) -> Future[None]:
        self._begins = Future()
        for state in states:
            for _, _, times in state["clock"]:
                self._clocks.update(times)
        self._first = dict(enumerate(states))
        return self._begins

    def _look_at_beginning(self) -> None:
        """Send initial shards to reachable owners, and complete `start` if all nodes are ready."""
        if self._begins is None:
            return
        for shard, state in list(self._first.items()):
            placed = self.manager.layout.shards[shard]
            # Servers connect to the leader at different times.
            if placed.owner is not None and self.endpoint.reaches(server(placed.owner)):
                snapshot = Snapshot(shard, placed.epoch, state["version"], state)
                self.endpoint.say(server(placed.owner), snapshot)
                del self._first[shard]
        there = all(self.endpoint.reaches(worker(who)) for who in self._alive())
        if there and len(self._begun) == len(self.manager.layout.shards):
            for who, errors in self._unsent.items():
                self.endpoint.say(worker(who), Residuals(who, errors))
            begins = self._begins
            self._begins = None
            begins.set_result(None)

    def _grant(self, until: int) -> Future[list[Report]]:
        self._meets = Future()
        for scheduler in self.schedulers:
            scheduler.until = until
        self._grant_all()
        return self._meets

    def _grant_all(self) -> None:
        for who in self._alive():
            clock = self._clocks.get(who, 0)
            buffers = self._buffers.pop(who, [])
            self.endpoint.say(
                worker(who), WorkLease(self._until(who), clock, self._began[who], buffers)
            )

    def _until(self, who: int) -> int:
        """Return the first batch that a worker is not to do."""
        if self._holding is not None and who in self._holding.until:
            return self._holding.until[who]
        return self.plan.worker_batches(who, self.schedulers[self.plan.group_of(who)].until)

    def _is_to_end(self) -> None:
        self._ends = self._meets is not None and self._error is None

    def _look_at_holding(self) -> None:
        """Let workers begin nothing more if the run is to end."""
        moved = any(clock > self._clocks.get(who, 0) for who, (clock, _) in self._clock.items())
        if not self._ends or not moved or self._holding is not None:
            return
        self._holding = GracefulStop(self.plan.teams)
        self._held_since = time.monotonic()
        for scheduler in self.schedulers:
            scheduler.held = True
        for who in self._alive():
            self.endpoint.say(worker(who), Drain())

    def _take_held(self, held: Drained) -> None:
        if self._holding is not None and self.manager.alive(worker(held.worker)):
            self._holding.held(held.worker, held.until)
            self.schedulers[self.plan.group_of(held.worker)].back(held.worker, held.back)

    def _decide(self) -> None:
        """Decide the last batches of a graceful stop once all workers have answered."""
        # A closing worker may have pushed more than the servers have reported.
        if self._holding is None or self.manager.layout.closing or self._gone:
            return
        if self._holding.decide(self._alive(), self._least) and self._holding.until:
            self._grant_all()

    def _least(self, who: int) -> int:
        """Return the first batch without a part of a dropped worker of this worker's group."""
        if self.plan.staleness is None:
            return 0
        number = self.plan.group_of(who)
        members = self.manager.layout.groups[number]
        return owed_until(members, self.schedulers[number].until)

    def _look_at_end(self, now: float) -> None:
        """Check that workers stop within the deadline; raises PeerLostError if not."""
        assert self._holding is not None
        alive = self._alive()
        since = {who: max(self._held_since, self._clock.get(who, (0, 0.0))[1]) for who in alive}
        late = [who for who in alive if now - since[who] > self._deadline and not self._there(who)]
        # A worker that waits for others has answered, and is not the furthest behind.
        silent = [who for who in self._holding.awaited(alive) if who in late]
        if self._holding.decided:
            silent = sorted(late, key=lambda who: self._clock.get(who, (0, 0.0))[0])
        if silent:
            raise PeerLostError(
                (rank_of(worker(silent[0]), self.plan),),
                "the round",
                f"step {self._clock.get(silent[0], (0, 0.0))[0] + 1}",
                f"has not finished its step for {self._deadline:g} s, but the run has to end",
            )

    def _done(self, who: int, works: Sequence[Any]) -> None:
        scheduler = self.schedulers[self.plan.group_of(who)]
        if self.manager.alive(worker(who)):
            for work in works:
                scheduler.done(who, work)

    def _look_at_meeting(self) -> None:
        """Complete the round if all workers are ready with all work done."""
        if self._meets is None:
            return
        self._decide()
        if self.manager.layout.closing or self._gone:
            return
        if self._holding is not None and not self._holding.decided:
            return
        if not all(self._there(who) for who in self._alive()):
            return
        if self.plan.deals and not all(one.idle for one in self.schedulers):
            return
        self.standing = None if self._holding is None else self._stopped()
        self._ends = False
        meets = self._meets
        self._meets = None
        reports = self._reports
        self._reports = []
        meets.set_result(reports)

    def _there(self, who: int) -> bool:
        """Return whether a worker has done all granted batches."""
        return self._stands.get(who) == (self._until(who), self.manager.layout.version)

    def _stopped(self) -> ResumePoint:
        """Return the progress of the workers after a graceful stop."""
        if self.plan.deals:
            stood = [scheduler.undone() for scheduler in self.schedulers]
            until = {w: stood[n][0] for n, group in enumerate(self.plan.groups) for w in group}
            return ResumePoint(until, [undone for _, undone in stood])
        assert self._holding is not None
        until = self._holding.until
        # A lost team takes part again in the resumed run, from the others' progress.
        batches = max(at - self.plan.worker_batches(who, 0) for who, at in until.items())
        everybody = {
            w: until.get(w, self.plan.worker_batches(w, batches)) for w in self.plan.workers
        }
        return ResumePoint(everybody, [() for _ in self.schedulers])

    def _tell(self, workers: bool) -> Future[list[ProcessCounters]]:
        self._tells = Future()
        self._accounts = {}
        names = map(server, range(self.plan.servers))
        self._asked = [*names, *(map(worker, self.plan.workers) if workers else ())]
        for name in self._asked:
            if self.manager.alive(name):
                self.endpoint.say(name, RequestCounters())
        return self._tells

    def _look_at_accounts(self) -> None:
        """Complete the request for counters if all live nodes have answered."""
        awaited = [name for name in self._asked if self.manager.alive(name)]
        if self._tells is not None and all(name in self._accounts for name in awaited):
            tells = self._tells
            self._tells = None
            tells.set_result(list(self._accounts.values()))

    def _keep(self) -> Future[Errors]:
        self._keeps = Future()
        self._unsent = {}
        for who in self._alive():
            self.endpoint.say(worker(who), SaveResiduals())
        return self._keeps

    def _look_at_unsent(self) -> None:
        """Complete the request for residuals if all live workers have answered."""
        if self._keeps is not None and all(who in self._unsent for who in self._alive()):
            keeps = self._keeps
            self._keeps = None
            told = [self._unsent[who] for who in self._alive()]
            keeps.set_result({who: one for errors in told for who, one in errors.items()})

    def _read(self) -> Future[list[Tensor | SparseRows]]:
        self._reads = Future()
        self._say(self._reader.pull(time.monotonic(), None))
        return self._reads

    def _save(self) -> Future[Shards]:
        self._saves = Future()
        self._saved = {}
        self._ask_shards()
        return self._saves

    def _ask_shards(self) -> None:
        for shard, placed in enumerate(self.manager.layout.shards):
            if shard not in self._saved and placed.owner is not None:
                self.endpoint.say(server(placed.owner), Save(shard))

    def _look_at_saved(self) -> None:
        if self._saves is not None and len(self._saved) == len(self.manager.layout.shards):
            saves = self._saves
            self._saves = None
            saves.set_result([self._saved[shard] for shard in sorted(self._saved)])

    def _end(self) -> None:
        self._over = True
        # Dropped nodes included, which may not know of their drop.
        for name in self._everybody():
            self.endpoint.say(name, RunEnded(self.ended))

    def _fail(self, error: BaseException) -> None:
        self._error = error
        for waiting in (
            self._begins,
            self._meets,
            self._reads,
            self._saves,
            self._keeps,
            self._tells,
        ):
            if waiting is not None:
                waiting.set_exception(error)


def _all_at(state: Mapping[str, Any], until: Mapping[int, int]) -> Mapping[str, Any]:
    """Return a shard's state with every worker's clock set to its batches before `until`.

    Other workers have made the pushes of a dropped worker on its behalf; it takes part again from
    now on.
    """
    clock = [[start, stop, {**times, **until}] for start, stop, times in state["clock"]]
    return {**state, "clock": clock}


def _pass_on(done: Future[Any], asked: Future[Any]) -> None:
    error = done.exception()
    if error is not None:
        asked.set_exception(error)
    else:
        asked.set_result(done.result())


def _error_of(failed: RankFailed) -> DureError:
    """Return the error that a process has reported."""
    if failed.kind == "loss":
        return LossNotFiniteError(failed.value, failed.who, failed.step, intact=False)
    return WorkerFailedError(failed.who, failed.step, failed.reason, failed.traceback)
