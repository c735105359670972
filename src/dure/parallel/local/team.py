"""Worker threads of one process, each with its number and its device, that live as long as a run.

`each` has all of them do their part of a work at the same time and waits for the last. torch lets
go of Python's lock inside its operators, so the workers compute in parallel; Python code of theirs
runs one at a time.

How many threads an operator uses is a property of the thread that calls it
(`dure.machine.threads.set_own_threads`), so every worker says it for itself, once, and the caller's
number stays what it was.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from dure.contracts.strategy import Place
from dure.errors import DureError, WorkerFailedError, described, traceback_of
from dure.machine.global_settings import as_here
from dure.machine.threads import set_own_threads, threads_for
from dure.record.meter import Meter

Value = TypeVar("Value")

CLOSE_SECONDS = 5.0
"""How long `close` waits for a worker that is still at work. It is a daemon: it does not keep the
process alive."""


LOOK_UP_SECONDS = 0.2
"""How long the caller of `each` waits at a time."""


class AbandonedError(Exception):
    """A worker stopped because another one had failed; that one's error is what the user gets."""


class Done(NamedTuple, Generic[Value]):
    """What a worker returned, and when it worked (seconds of `time.perf_counter`)."""

    value: Value
    start: float
    end: float


class _Outcome(NamedTuple):
    worker: int
    done: Done[Any] | None
    error: BaseException | None


class Team:
    """The worker threads 0 … n-1, one for each of `devices`.

    threads: how many threads an operator of a worker uses. name: who they are, for errors.
    """

    def __init__(self, devices: Sequence[torch.device], threads: int, name: str = "worker") -> None:
        self.devices = tuple(devices)
        self.name = name
        # One inbox a worker, so that each gets its own job; one outbox, since whoever is done first
        # is heard first.
        self._inboxes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in self.devices]
        self._outbox: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        self._members = [
            threading.Thread(
                target=as_here(self._live),
                args=(worker,),
                name=f"dure {name} {worker}",
                daemon=True,
            )
            for worker in range(len(self.devices))
        ]
        # daemons, so that a worker that hangs does not keep the process alive
        for member in self._members:
            member.start()
        self.set_threads(threads)

    def __len__(self) -> int:
        return len(self.devices)

    def set_threads(self, threads: int) -> None:
        """How many threads an operator of a worker uses from now on."""
        mine = torch.get_num_threads()
        self.each(lambda worker: set_own_threads(threads), "the start")
        # A thread that says its number says it for threads that are yet to come, too.
        torch.set_num_threads(mine)

    def each(
        self, work: Callable[[int], Value], step: str, workers: Iterable[int] | None = None
    ) -> list[Done[Value]]:
        """work(worker) of all workers, or of these, at the same time: what they returned, in order.

        step: what they work on, for errors. Raises, when all have ended, the first worker's error:
        WorkerFailedError for what is not dure's own.
        """
        asked = list(range(len(self)) if workers is None else workers)
        # as the caller has it now
        shorter = _autocast_dtype(self.devices[0].type)
        for worker in asked:
            self._inboxes[worker].put((work, shorter))
        outcomes: dict[int, _Outcome] = {}
        # All are waited for, also after a failure: no worker of this call is at work when it
        # returns.
        for _ in asked:
            outcome = self._next()
            outcomes[outcome.worker] = outcome
        failed = [outcomes[worker] for worker in asked if outcomes[worker].error is not None]
        if failed:
            # stable: the first worker's own error comes before those of workers that only gave up
            # because of it
            failed.sort(key=lambda outcome: isinstance(outcome.error, AbandonedError))
            self._fail(failed[0], step)
        return [done for worker in asked if (done := outcomes[worker].done) is not None]

    def _next(self) -> _Outcome:
        """What the next worker that is done says."""
        # A main thread that waits without a timeout does not see signals that the system has given
        # to another thread.
        while True:
            try:
                return self._outbox.get(timeout=LOOK_UP_SECONDS)
            except queue.Empty:
                continue

    def _fail(self, outcome: _Outcome, step: str) -> None:
        error = outcome.error
        assert error is not None
        # dure's own errors say enough; an interrupt is not a failure of the worker
        if isinstance(error, (DureError, KeyboardInterrupt)):
            raise error
        who = f"{self.name} {outcome.worker}"
        raise WorkerFailedError(who, step, described(error), traceback_of(error)) from error

    def _live(self, worker: int) -> None:
        device = self.devices[worker]
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            while (job := self._inboxes[worker].get()) is not None:
                self._outbox.put(self._do(worker, *job))
                # What the run gives up must not live on here until the next job comes.
                del job

    def _do(
        self,
        worker: int,
        work: Callable[[int], Any],
        shorter: torch.dtype | None,
    ) -> _Outcome:
        device = self.devices[worker]
        start = time.perf_counter()
        try:
            with nullcontext() if shorter is None else torch.autocast(device.type, shorter):
                value = work(worker)
            if device.type == "cuda":
                # else `Done.end` would tell when the work was queued
                torch.cuda.synchronize(device)
        except BaseException as error:
            return _Outcome(worker, None, error)
        return _Outcome(worker, Done(value, start, time.perf_counter()), None)

    def close(self) -> None:
        """Ends the threads."""
        for inbox in self._inboxes:
            # what ends `_live`
            inbox.put(None)
        until = time.monotonic() + CLOSE_SECONDS
        for member in self._members:
            member.join(max(0.0, until - time.monotonic()))


class TimeSheet:
    """When a worker computed; the rest of a step it was idle, waiting for `others`."""

    def __init__(self, meter: Meter, others: str) -> None:
        self.meter = meter
        self.others = others
        self._free = 0.0

    def begin(self, now: float) -> None:
        """A step begins (seconds of `time.perf_counter`)."""
        self._free = now

    def did(self, name: str, start: float, end: float, step: int) -> None:
        """It computed from `start` to `end`."""
        self.end(start, step)
        self.meter.compute(name, start, end, step)
        self._free = end

    def end(self, now: float, step: int) -> None:
        """It has had nothing to do until now."""
        if now > self._free:
            self.meter.idle(f"wait for {self.others}", self._free, now, step)


def team_at(place: Place, flops: float, name: str = "worker") -> Team:
    """The worker threads of a place, which end with its run. flops: of a worker's step.

    They divide the cores; an operator of theirs uses one thread if their steps are small
    (`dure.machine.threads`).
    """
    # Workers compute at the same time, and must not use more threads than there are cores.
    share = max(1, torch.get_num_threads() // len(place.devices))
    team = Team(place.devices, min(threads_for(flops), share), name)
    place.ending.callback(team.close)
    return team


def _autocast_dtype(kind: str) -> torch.dtype | None:
    """The caller's autocast, which is a thread's own, for the workers; None where there is none."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
