"""Engine on several processes of this machine: any engine, in forked children.

Jobs are handed out in chunks, the largest first, to whichever child is idle, from a window of
chunks; results return in the jobs' order. The results depend on the chunks alone and not on the
children's speed.

A child is a copy of this process from the time of the first job: model, data and all, without any
message. The tensors of jobs are in shared memory, allocated once: the weights are copied once per
round, because the last copy is known; a child writes a delta into memory that the parent reads, or
the factors of a cohort's deltas (`products`). All else is a short message over a socket.

A fork copies only the calling thread: OpenMP's threads are gone in the child. So the child computes
with a single thread and never asks for more: the bits equal the bits of a single process with a
single thread. A process that has initialised an accelerator, or has computed gradients on a machine
with one, cannot be forked: neither the accelerator nor autograd's threads survive
(`dure.machine.devices.fork_objection`).
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection, Pipe, wait
from typing import NoReturn

from torch import nn

from dure.errors import DureError, WorkerFailedError
from dure.federated.engines.child import job_message, run_child
from dure.federated.engines.job import ClientEngine, ClientJob, JobResult
from dure.federated.engines.progress import DEADLINE, ProcessProgress, hang_reason, work_of
from dure.federated.engines.shared_memory import SharedResults, SharedWeights, WeightLayout
from dure.machine.devices import has_accelerator
from dure.machine.exit_status import exit_description
from dure.machine.stall_timeout import StallTimeout

AHEAD = 256 << 20
"""Bytes of results that may wait for an earlier result."""


_LAST_SECONDS = 1.0
"""Seconds for a child to end after it has closed its socket."""


def forks_here() -> bool:
    """Return whether clients can surely run in forked processes on this machine.

    On a machine with an accelerator that depends on what the process has done before
    (`fork_objection`), and no choice of an engine may depend on it.
    """
    return hasattr(os, "fork") and not has_accelerator()


@dataclass(eq=False)
class Chunk:
    """Jobs that a child does together.

    results: received results, up to an error.
    """

    jobs: list[ClientJob]
    started: bool = False
    done: bool = False
    results: list[JobResult] = field(default_factory=list)
    error: DureError | None = None

    @property
    def examples(self) -> int:
        """Amount of work of the chunk, for a common batch size.

        Larger clients make more steps, or larger steps.
        """
        return sum(job.steps * len(job.indices) for job in self.jobs)


@dataclass(eq=False)
class _Child:
    """The parent's side of a child. chunk: its present work, None for an idle child."""

    pid: int
    connection: Connection
    outputs: SharedResults
    progress: ProcessProgress
    patience: StallTimeout
    chunk: Chunk | None = None
    reads: set[int] = field(default_factory=set)
    """Slots that the child's chunk reads."""


class ProcessesEngine(ClientEngine):
    """Engine that passes jobs to `workers` children, each with a copy of the engine `inner`.

    Args:
        inner: the engine that each child runs.
        model: like the jobs' model.
        workers: number of children, which start with the first job.
        chunk: number of jobs per child and message.
        deadline: seconds without a step after which a child counts as hung (`progress`).
    """

    def __init__(
        self,
        inner: ClientEngine,
        model: nn.Module,
        workers: int,
        chunk: int = 1,
        deadline: float = DEADLINE,
    ) -> None:
        self.inner = inner
        self.name = f"{inner.name}-processes"
        self.batch_size = inner.batch_size
        self.workers = workers
        self.chunk = chunk
        self.deadline = deadline
        self.cohort = workers * chunk
        self.layout = WeightLayout.of(model)
        # At least one chunk more than there are children, so that no child is idle; beyond that as
        # many as the memory for results allows.
        self.window = max(workers + 1, min(64, AHEAD // max(1, self.layout.nbytes * chunk)))
        """Largest number of chunks that are computed ahead of the caller."""
        self._children: list[_Child] = []
        self._slots: SharedWeights | None = None
        self._pipe: list[int] = []
        self._every = StallTimeout(deadline).every
        # In case nobody calls `close`: the children would otherwise wait as long as this process
        # lives.
        self._end = weakref.finalize(self, _end, self._children, self._pipe, os.getpid())

    def train(self, jobs: Iterable[ClientJob]) -> Iterator[JobResult]:
        """Yield the results in the jobs' order; a bounded number is computed ahead of the caller.

        Raises the exceptions of the children's engines, after the results before them, and
        WorkerFailedError for a child that is lost, or makes no step for the deadline.
        """
        source = iter(jobs)
        pool: deque[Chunk] = deque()
        while True:
            # The window bounds the results that wait here; beyond it no job is even taken from the
            # source.
            while len(pool) < self.window and (some := list(islice(source, self.chunk))):
                pool.append(Chunk(some))
            if not pool:
                return
            self._hand_out(pool)
            # Results leave in order: while the first chunk is at work, results of others are only
            # collected.
            if not pool[0].done:
                self._receive()
                continue
            chunk = pool.popleft()
            yield from chunk.results
            if chunk.error is not None:
                raise chunk.error

    def _hand_out(self, pool: Iterable[Chunk]) -> None:
        """Give the largest chunks to the idle children."""
        waiting = [chunk for chunk in pool if not chunk.started]
        # Largest first, so that the last child does not end with a large chunk.
        waiting.sort(key=lambda chunk: -chunk.examples)
        # As late as possible: a fork copies the state of this moment, and engines that are never
        # used need no processes.
        if waiting and not self._children:
            self._start()
        idle = [child for child in self._children if child.chunk is None]
        for child, chunk in zip(idle, waiting, strict=False):
            chunk.started = True
            self._give(child, chunk)

    def close(self) -> None:
        """End the children; a further `train` would start new children."""
        _end(self._children, self._pipe, os.getpid())

    def _give(self, child: _Child, chunk: Chunk) -> None:
        assert self._slots is not None
        # A slot that a busy child may still read is not overwritten. There are enough slots for all
        # children at once (`_start`).
        needed: set[int] = set()
        for busy in self._children:
            if busy.chunk is not None:
                needed |= busy.reads
        notes = [job_message(job, self._slots, needed) for job in chunk.jobs]
        child.reads = set().union(*(note.reads for note in notes))
        child.chunk = chunk
        child.progress.done(0)
        child.patience.again()
        try:
            child.connection.send_bytes(pickle.dumps(notes, pickle.HIGHEST_PROTOCOL))
        except OSError:
            self._lost(child, chunk)

    def _receive(self) -> None:
        busy = {child.connection: child for child in self._children if child.chunk is not None}
        answered = wait(list(busy), self._every)
        # Also while other children answer all the time.
        self._look([child for at, child in busy.items() if at not in answered])
        for ready in answered:
            child = busy[ready]  # type: ignore[index]
            chunk = child.chunk
            assert chunk is not None
            try:
                reply, chunk.error = pickle.loads(child.connection.recv_bytes())
            except (EOFError, OSError):
                # The socket closes only with the end of the child: a child answers even if its jobs
                # fail.
                self._lost(child, chunk)
            # Copied at once, because the child is about to get its next chunk.
            chunk.results += child.outputs.read(reply, chunk.jobs)
            chunk.done = True
            child.chunk = None

    def _look(self, busy: Sequence[_Child]) -> None:
        """Raise WorkerFailedError for a dead child or a child without progress."""
        for child in busy:
            # A dead child's socket may still be open in a process that user code has forked.
            if child.chunk is not None and _is_dead(child.pid):
                self._lost(child, child.chunk)
            if child.patience.is_over(child.progress.now()):
                assert child.chunk is not None
                who, when = self._named(child, child.chunk)
                reason = hang_reason(self.deadline, _is_stopped(child.pid))
                self.close()
                raise WorkerFailedError(who, when, reason)

    def _named(self, child: _Child, chunk: Chunk) -> tuple[str, str]:
        one_by_one = self.inner.at_once(chunk.jobs[0]) == 1
        return work_of(chunk.jobs, child.progress.jobs, one_by_one)

    def _lost(self, child: _Child, chunk: Chunk) -> NoReturn:
        # A dead child leaves the list before `close`, which kills and awaits the children in the
        # list.
        how = _ended(child.pid)
        self._children.remove(child)
        child.connection.close()
        self.close()
        who, when = self._named(child, chunk)
        raise WorkerFailedError(who, when, f"the process that trained for it {how}")

    def _start(self) -> None:
        # A pipe without data. The children wait for its end, which comes when this process, even by
        # a crash, has closed the writing end.
        self._pipe[:] = os.pipe()
        # A job has at most three sets of tensors: weights, anchor and correction.
        self._slots = slots = SharedWeights(self.layout, 3 * self.chunk * self.workers)
        for _ in range(self.workers):
            outputs = SharedResults(self.layout, self.chunk)
            progress = ProcessProgress()
            ours, theirs = Pipe()
            # Output buffered here would be in the child's copy too, and appear twice.
            sys.stdout.flush()
            sys.stderr.flush()
            with warnings.catch_warnings():
                # Python warns of other threads, which a child does not have: it asks for none.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                run_child(
                    inner=self.inner,
                    connection=theirs,
                    sets=slots.sets,
                    outputs=outputs,
                    progress=progress,
                    pipe=self._pipe,
                    # Copies of the parent's ends: if a sibling had one, a child would not see that
                    # its parent has closed it.
                    not_mine=[ours, *(child.connection for child in self._children)],
                )
            theirs.close()
            patience = StallTimeout(self.deadline)
            self._children.append(_Child(pid, ours, outputs, progress, patience))


def _is_dead(pid: int) -> bool:
    """Return whether a child has ended, without reaping it."""
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return True


def _ended(pid: int) -> str:
    """Return how a child that has closed its socket ended, in words; reap the child."""
    until = time.monotonic() + _LAST_SECONDS
    while time.monotonic() < until:
        try:
            found, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # other code has reaped it
            return "ended"
        if found:
            return exit_description(os.waitstatus_to_exitcode(status))
        time.sleep(0.005)
    # The child lives: user code has closed a connection of dure.
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "closed its connection"


def _is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, as by SIGSTOP; False without /proc."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as told:
            # After the name, which is in brackets and may contain any character.
            return told.read().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def _end(children: list[_Child], pipe: list[int], owner: int) -> None:
    # A child has a copy of this finalizer: it must not end its siblings.
    if os.getpid() != owner:
        return
    for child in children:
        child.connection.close()
        # SIGKILL: a child has nothing to save, and may be deep in an operator. Other code may have
        # reaped it.
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
    children.clear()
    for descriptor in pipe:
        os.close(descriptor)
    pipe.clear()
