"""Worker threads of one process, each with a number and a device, that exist during a run.

`each` runs a function in all workers at the same time and waits for the last. torch releases
Python's lock inside its operators, so the workers compute in parallel; their Python code does not.

The number of threads of an operator is a property of the calling thread
(`dure.machine.threads.set_own_threads`). Every worker therefore sets its number once, and the
caller's number does not change.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from dure.contracts.world import RankContext
from dure.errors import DureError, WorkerFailedError, described, traceback_of
from dure.machine.devices import as_current, synchronize
from dure.machine.global_settings import with_current_settings
from dure.machine.threads import set_own_threads, threads_for
from dure.record.meter import Meter

Value = TypeVar("Value")

CLOSE_SECONDS = 5.0
"""Seconds that `close` waits for a running worker.

Workers are daemons, which do not keep the process alive.
"""


LOOK_UP_SECONDS = 0.2
"""Seconds between checks for signals while the caller of `each` waits."""


class AbandonedError(Exception):
    """A worker stopped because another worker failed.

    The user gets the error of the failed worker.
    """


class WorkerResult(NamedTuple, Generic[Value]):
    """Result of a worker, with its start and end in seconds of `time.perf_counter`."""

    value: Value
    start: float
    end: float


class _Outcome(NamedTuple):
    worker: int
    done: WorkerResult[Any] | None
    error: BaseException | None


class WorkerThreads:
    """Worker threads 0 … n-1, one for each of `devices`.

    threads: threads that an operator of a worker uses. name: name of the workers in errors.
    """

    def __init__(self, devices: Sequence[torch.device], threads: int, name: str = "worker") -> None:
        self.devices = tuple(devices)
        self.name = name
        # An inbox for each worker, so that each gets its own job; a common outbox, in the order of
        # completion.
        self._inboxes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in self.devices]
        self._outbox: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        self._members = [
            threading.Thread(
                target=with_current_settings(self._live),
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
        """Set the number of threads that an operator of a worker uses from now on."""
        mine = torch.get_num_threads()
        self.each(lambda worker: set_own_threads(threads), "the start")
        # A thread that sets its number also sets the number of threads created later.
        torch.set_num_threads(mine)

    def each(
        self, work: Callable[[int], Value], step: str, workers: Iterable[int] | None = None
    ) -> list[WorkerResult[Value]]:
        """Run work(worker) in all workers at the same time; return the results in order.

        workers: run only in these workers, by number.

        step: name of the step, for errors. After all workers have ended, raises the first worker's
        error; an error that is not dure's becomes a WorkerFailedError.
        """
        asked = list(range(len(self)) if workers is None else workers)
        # the caller's present autocast dtype
        shorter = _autocast_dtype(self.devices[0].type)
        for worker in asked:
            self._inboxes[worker].put((work, shorter))
        outcomes: dict[int, _Outcome] = {}
        # Wait for all workers, also after a failure: no worker of this call is running when it
        # returns.
        for _ in asked:
            outcome = self._next()
            outcomes[outcome.worker] = outcome
        failed = [outcomes[worker] for worker in asked if outcomes[worker].error is not None]
        if failed:
            # a stable sort: a worker's own error comes before errors of workers that only stopped
            # because of it
            failed.sort(key=lambda outcome: isinstance(outcome.error, AbandonedError))
            self._fail(failed[0], step)
        return [done for worker in asked if (done := outcomes[worker].done) is not None]

    def _next(self) -> _Outcome:
        """Return the outcome of the next worker that ends."""
        # A main thread that waits without a timeout does not handle signals that the system
        # delivered to another thread.
        while True:
            try:
                return self._outbox.get(timeout=LOOK_UP_SECONDS)
            except queue.Empty:
                continue

    def _fail(self, outcome: _Outcome, step: str) -> None:
        error = outcome.error
        assert error is not None
        # dure's own errors need no context; an interrupt is not a failure of the worker
        if isinstance(error, (DureError, KeyboardInterrupt)):
            raise error
        who = f"{self.name} {outcome.worker}"
        raise WorkerFailedError(who, step, described(error), traceback_of(error)) from error

    def _live(self, worker: int) -> None:
        device = self.devices[worker]
        with as_current(device):
            while (job := self._inboxes[worker].get()) is not None:
                self._outbox.put(self._do(worker, *job))
                # Objects of the job must not stay alive here until the next job comes.
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
            # otherwise `WorkerResult.end` would be the time when the kernels were queued
            synchronize(device)
        except BaseException as error:
            return _Outcome(worker, None, error)
        return _Outcome(worker, WorkerResult(value, start, time.perf_counter()), None)

    def close(self) -> None:
        """End the threads."""
        for inbox in self._inboxes:
            # ends `_live`
            inbox.put(None)
        until = time.monotonic() + CLOSE_SECONDS
        for member in self._members:
            member.join(max(0.0, until - time.monotonic()))


class WorkerTimeline:
    """Times of a worker: when it computed, and when it was idle in a step, waiting for `others`."""

    def __init__(self, meter: Meter, others: str) -> None:
        self.meter = meter
        self.others = others
        self._free = 0.0

    def begin(self, now: float) -> None:
        """Begin a step at `now`, in seconds of `time.perf_counter`."""
        self._free = now

    def did(self, name: str, start: float, end: float, step: int) -> None:
        """Record a computation from `start` to `end`."""
        self.end(start, step)
        self.meter.compute(name, start, end, step)
        self._free = end

    def end(self, now: float, step: int) -> None:
        """Record the worker as idle since its last computation until `now`."""
        if now > self._free:
            self.meter.idle(f"wait for {self.others}", self._free, now, step)


def worker_threads_at(context: RankContext, flops: float, name: str = "worker") -> WorkerThreads:
    """Return the worker threads of a place, which end with its run.

    flops: operations of a worker's step. The workers divide the cores; their operators use one
    thread if steps are small (`dure.machine.threads`).
    """
    # Workers compute at the same time, and must not use more threads than there are cores.
    share = max(1, torch.get_num_threads() // len(context.devices))
    team = WorkerThreads(context.devices, min(threads_for(flops), share), name)
    context.ending.callback(team.close)
    return team


def _autocast_dtype(kind: str) -> torch.dtype | None:
    """Return the caller's autocast dtype, which is a property of its thread.

    None without autocast.
    """
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
