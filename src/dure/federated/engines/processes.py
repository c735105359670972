"""Clients on several processes of this machine: any engine, in children forked from here.

A child is a copy of this process from when the first job comes: model, data and all, none of it
sent. What a job needs lies in memory that all see, allocated once: the weights go down once a
round, for what was written there last is known; a delta is written where the parent reads it, or
the factors of a cohort's (`products`). All else is a short message over a socket.

A fork copies only the thread that makes it: OpenMP's are gone in the child, which therefore
computes with one thread and never asks for them: the bits are those of one process with one thread.
With a GPU there is no forking: neither CUDA nor autograd's threads survive it.

A child ends when the parent closes it, or is gone, by whatever death: it reads a pipe that nobody
writes.
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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from dure.errors import DureError, WorkerFailedError
from dure.federated.engines.divided import Chunk, DividedEngine, Worker
from dure.federated.engines.job import Engine, Job, Trained
from dure.federated.engines.loop import failed
from dure.federated.engines.shared import Layout, Outputs, Reply, Slots

AHEAD = 256 << 20
"""Bytes of results that may wait for one that comes before them."""


def forks_here() -> bool:
    """Whether clients can be given to forked processes on this machine."""
    return hasattr(os, "fork") and not torch.cuda.is_available()


@dataclass(eq=False)
class _Child(Worker):
    """The parent's side of a child."""

    pid: int
    connection: Connection
    outputs: Outputs
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


class ProcessesEngine(DividedEngine[_Child]):
    """Gives jobs to `workers` children, each with a copy of the engine `inner`.

    model: like those that the jobs are for.
    """

    def __init__(self, inner: Engine, model: nn.Module, workers: int, chunk: int = 1) -> None:
        self.inner = inner
        self.layout = Layout.of(model)
        window = max(workers + 1, min(64, AHEAD // max(1, self.layout.nbytes * chunk)))
        super().__init__(f"{inner.name}-processes", workers, chunk, window)
        self._slots: Slots | None = None
        self._pipe: list[int] = []
        self._end = weakref.finalize(self, _end, self._members, self._pipe, os.getpid())

    def close(self) -> None:
        """Ends the children. Another `train` would start new ones."""
        _end(self._members, self._pipe, os.getpid())

    def _give(self, member: _Child, chunk: Chunk) -> None:
        assert self._slots is not None
        needed = {place for busy in self._members if busy.chunk is not None for place in busy.reads}
        notes = [_note(job, self._slots, needed) for job in chunk.jobs]
        member.reads = {place for note in notes for place in note.places if place is not None}
        member.chunk = chunk
        try:
            member.connection.send_bytes(pickle.dumps(notes, pickle.HIGHEST_PROTOCOL))
        except OSError:
            self._lost(member, chunk)

    def _receive(self) -> None:
        busy = {member.connection: member for member in self._members if member.chunk is not None}
        for ready in wait(list(busy)):
            member = busy[ready]  # type: ignore[index]
            chunk = member.chunk
            assert chunk is not None
            try:
                reply, chunk.error = pickle.loads(member.connection.recv_bytes())
            except (EOFError, OSError):
                self._lost(member, chunk)
            chunk.results += member.outputs.read(reply, chunk.jobs)
            chunk.done, member.chunk = True, None

    def _lost(self, member: _Child, chunk: Chunk) -> NoReturn:
        _, status = os.waitpid(member.pid, 0)
        self._members.remove(member)
        member.connection.close()
        self.close()
        code = os.waitstatus_to_exitcode(status)
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with status {code}"
        )
        clients = ", ".join(str(job.client) for job in chunk.jobs)
        who = f"client {clients}" if len(chunk.jobs) == 1 else f"one of the clients {clients}"
        raise WorkerFailedError(
            who, f"round {chunk.jobs[0].round + 1}", f"the process that trained for it {how}"
        )

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
                warnings.simplefilter(
                    "ignore", DeprecationWarning
                )  # of other threads here: the child asks for none
                pid = os.fork()
            if pid == 0:
                _child(
                    self.inner,
                    theirs,
                    slots.sets,
                    outputs,
                    self._pipe,
                    [ours, *(c.connection for c in self._members)],
                )
            theirs.close()
            self._members.append(_Child(pid, ours, outputs))


def _note(job: Job, slots: Slots, needed: set[int]) -> _Note:
    weights = slots.put(job.weights, needed)
    anchor, correction = (
        None if values is None else slots.put(values, needed)
        for values in (job.anchor, job.correction)
    )
    places = (weights, anchor, correction)
    buffers = list(job.buffers)
    return _Note(
        *(
            job.client,
            job.round,
            job.indices.numpy(),
            buffers,
            job.first_step,
            job.steps,
            job.mu,
            places,
            job.turn,
        ),
        lr_factor=job.lr_factor,
    )


def _end(children: list[_Child], pipe: list[int], owner: int) -> None:
    if os.getpid() != owner:
        return
    for child in children:
        child.connection.close()
        with suppress(
            ProcessLookupError, ChildProcessError
        ):  # somebody else may have waited for it
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
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
    """In the child: does jobs until the parent is gone, and leaves without the interpreter's
    teardown."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
        torch.set_num_threads(1)
        os.close(pipe[1])
        for each in not_mine:
            each.close()
        threading.Thread(target=_leave_with_parent, args=(pipe[0],), daemon=True).start()
        while True:
            notes: list[_Note] = pickle.loads(connection.recv_bytes())
            connection.send_bytes(
                pickle.dumps(_do(inner, notes, sets, outputs), pickle.HIGHEST_PROTOCOL)
            )
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
