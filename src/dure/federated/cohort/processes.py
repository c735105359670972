"""Clients on several processes of this machine: any engine, in children forked from here.

A child is a copy of this process from when the first job comes: model, data and all, none of it sent. What a job needs
lies in memory that all see, allocated once: the weights go down once a round, for what was written there last is known;
a delta is written where the parent reads it, or the factors of a cohort's (`products`). All else is a short
message over a socket.

Jobs are handed out in chunks, the largest first, to whoever is idle, from a window of them; results come back in the
jobs' order. What is computed depends on the chunks alone and not on who was faster.

A fork copies only the thread that makes it: OpenMP's are gone in the child, which therefore computes with one thread
and never asks for them: the bits are those of one process with one thread. With a GPU there is no forking: neither
CUDA nor autograd's threads survive it.

A child ends when the parent closes it, or is gone, by whatever death: it reads a pipe that nobody writes.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from dure.errors import DureError, WorkerFailedError
from dure.federated.cohort.job import Engine, Job, Trained
from dure.federated.cohort.loop import failed
from dure.federated.cohort.shared import Layout, Outputs, Reply, Slots

AHEAD = 256 << 20
"""Bytes of results that may wait for one that comes before them."""


def forks_here() -> bool:
    """Whether clients can be given to forked processes on this machine."""
    return hasattr(os, "fork") and not torch.cuda.is_available()


@dataclass(eq=False)
class _Chunk:
    """Jobs that one child does together. results: those that have come, and then perhaps an error."""

    jobs: list[Job]
    started: bool = False
    done: bool = False
    results: list[Trained] = field(default_factory=list)
    error: DureError | None = None

    @property
    def examples(self) -> int:
        """How much work it is, for a batch size that all have: the larger clients make more steps, or larger ones."""
        return sum(job.steps * len(job.indices) for job in self.jobs)


@dataclass(eq=False)
class _Worker:
    """The parent's side of a child."""

    pid: int
    connection: Connection
    outputs: Outputs
    chunk: _Chunk | None = None
    reads: set[int] = field(default_factory=set)
    """Where what its chunk needs lies."""


@dataclass(frozen=True)
class _Note:
    """A job as a message: `Job` with the places of its tensors."""

    client: int
    round: int
    indices: Any
    buffers: list[Tensor]
    first_step: int
    steps: int
    mu: float
    places: tuple[int, int | None, int | None]
    turn: int
    lr_factor: float


class ProcessesEngine:
    """Gives jobs to `workers` children, each with a copy of the engine `inner`; they start with the first job.

    model: like those that the jobs are for. chunk: how many jobs a child gets at once. why: it is this engine.
    """

    def __init__(self, inner: Engine, model: nn.Module, workers: int, chunk: int = 1) -> None:
        self.inner, self.workers, self.chunk = inner, workers, chunk
        self.cohort = workers * chunk
        self.name = f"{inner.name}-processes"
        self.why = ""
        self.layout = Layout.of(model)
        self.window = max(workers + 1, min(64, AHEAD // max(1, self.layout.nbytes * chunk)))
        self._slots: Slots | None = None
        self._children: list[_Worker] = []
        self._pipe: list[int] = []
        self._end = weakref.finalize(self, _end, self._children, self._pipe, os.getpid())

    def train(self, jobs: Iterable[Job]) -> Iterator[Trained]:
        """The results in the jobs' order; a bounded number is computed ahead of what is asked for.

        Raises what the inner engine raises, when the results before it have been given, and WorkerFailedError when a
        child dies.
        """
        source = iter(jobs)
        pool: deque[_Chunk] = deque()
        while True:
            while len(pool) < self.window and (some := list(islice(source, self.chunk))):
                pool.append(_Chunk(some))
            if not pool:
                return
            self._hand_out(pool)
            if not pool[0].done:
                self._receive()
                continue
            chunk = pool.popleft()
            yield from chunk.results
            if chunk.error is not None:
                raise chunk.error

    def close(self) -> None:
        """Ends the children. Another `train` would start new ones."""
        _end(self._children, self._pipe, os.getpid())

    def _hand_out(self, pool: Iterable[_Chunk]) -> None:
        """The largest chunks to the idle children."""
        waiting = sorted((chunk for chunk in pool if not chunk.started), key=lambda chunk: -chunk.examples)
        if waiting and not self._children:
            self._start()
        idle = (worker for worker in self._children if worker.chunk is None)
        for worker, chunk in zip(idle, waiting, strict=False):
            assert self._slots is not None
            needed = {place for busy in self._children if busy.chunk is not None for place in busy.reads}
            notes = [_note(job, self._slots, needed) for job in chunk.jobs]
            worker.reads = {place for note in notes for place in note.places if place is not None}
            chunk.started, worker.chunk = True, chunk
            try:
                worker.connection.send_bytes(pickle.dumps(notes, pickle.HIGHEST_PROTOCOL))
            except OSError:
                self._lost(worker, chunk)

    def _receive(self) -> None:
        """Waits for one child at least, and takes what has come."""
        busy = {worker.connection: worker for worker in self._children if worker.chunk is not None}
        for ready in wait(list(busy)):
            worker = busy[ready]  # type: ignore[index]
            chunk = worker.chunk
            assert chunk is not None
            try:
                reply, chunk.error = pickle.loads(worker.connection.recv_bytes())
            except (EOFError, OSError):
                self._lost(worker, chunk)
            chunk.results += worker.outputs.read(reply, chunk.jobs)
            chunk.done, worker.chunk = True, None

    def _lost(self, worker: _Worker, chunk: _Chunk) -> NoReturn:
        _, status = os.waitpid(worker.pid, 0)
        self._children.remove(worker)
        worker.connection.close()
        self.close()
        code = os.waitstatus_to_exitcode(status)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        clients = ", ".join(str(job.client) for job in chunk.jobs)
        who = f"client {clients}" if len(chunk.jobs) == 1 else f"one of the clients {clients}"
        raise WorkerFailedError(who, f"round {chunk.jobs[0].round + 1}", f"the process that trained for it {how}")

    def _start(self) -> None:
        self._pipe[:] = os.pipe()
        self._slots = slots = Slots(
            self.layout, 3 * self.chunk * self.workers
        )  # a job has at most three sets of tensors
        for _ in range(self.workers):
            outputs = Outputs(self.layout, self.chunk)
            ours, theirs = Pipe()
            sys.stdout.flush()
            sys.stderr.flush()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of other threads here: the child asks for none
                pid = os.fork()
            if pid == 0:
                _child(
                    self.inner, theirs, slots.sets, outputs, self._pipe, [ours, *(c.connection for c in self._children)]
                )
            theirs.close()
            self._children.append(_Worker(pid, ours, outputs))


def _note(job: Job, slots: Slots, needed: set[int]) -> _Note:
    weights = slots.put(job.weights, needed)
    anchor, correction = (
        None if values is None else slots.put(values, needed) for values in (job.anchor, job.correction)
    )
    places = (weights, anchor, correction)
    buffers = list(job.buffers)
    return _Note(
        *(job.client, job.round, job.indices.numpy(), buffers, job.first_step, job.steps, job.mu, places, job.turn),
        lr_factor=job.lr_factor,
    )


def _end(children: list[_Worker], pipe: list[int], owner: int) -> None:
    if os.getpid() != owner:
        return
    for worker in children:
        worker.connection.close()
        with suppress(ProcessLookupError, ChildProcessError):  # somebody else may have waited for it
            os.kill(worker.pid, signal.SIGKILL)
            os.waitpid(worker.pid, 0)
    children.clear()
    for descriptor in pipe:
        os.close(descriptor)
    pipe.clear()


def _child(
    inner: Engine,
    connection: Connection,
    sets: list[list[Tensor]],
    outputs: Outputs,
    pipe: Sequence[int],
    not_mine: Sequence[Connection],
) -> NoReturn:
    """In the child: does jobs until the parent is gone, and leaves without the interpreter's teardown."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
        torch.set_num_threads(1)
        os.close(pipe[1])
        for each in not_mine:
            each.close()
        threading.Thread(target=_leave_with_parent, args=(pipe[0],), daemon=True).start()
        while True:
            notes: list[_Note] = pickle.loads(connection.recv_bytes())
            connection.send_bytes(pickle.dumps(_do(inner, notes, sets, outputs), pickle.HIGHEST_PROTOCOL))
            sys.stdout.flush()
            sys.stderr.flush()
    except (EOFError, OSError):
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _leave_with_parent(pipe: int) -> None:
    os.read(pipe, 1)
    os._exit(0)


def _do(
    inner: Engine, notes: Sequence[_Note], sets: Sequence[list[Tensor]], outputs: Outputs
) -> tuple[Reply, DureError | None]:
    """What came of the jobs up to the first that raised, and what it raised."""
    jobs = [_job(note, sets) for note in notes]
    results: list[Trained] = []
    error: DureError | None = None
    try:
        for trained in inner.train(jobs):
            results.append(trained)
    except Exception as raised:
        error = _portable(raised, jobs[len(results)])
    return outputs.write(results), error


def _job(note: _Note, sets: Sequence[list[Tensor]]) -> Job:
    weights, anchor, correction = (None if place is None else sets[place] for place in note.places)
    assert weights is not None
    return Job(
        note.client,
        note.round,
        torch.from_numpy(note.indices),
        weights,
        note.buffers,
        note.first_step,
        note.steps,
        note.mu,
        anchor,
        correction,
        note.turn,
        note.lr_factor,
    )


def _portable(error: Exception, job: Job) -> DureError:
    """An error that can be pickled, with its traceback as text where the parent cannot have it."""
    if isinstance(error, WorkerFailedError):
        text = "".join(traceback.format_exception(error.__cause__ or error))
        return WorkerFailedError(error.who, error.step, error.reason, error.traceback or text)
    if isinstance(error, DureError):
        return error
    return _portable(failed(job, error), job)
