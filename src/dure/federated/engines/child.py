"""A child of the engine on processes (`processes`), and the messages that it gets.

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
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
from torch import Tensor

from dure.errors import DureError, WorkerFailedError
from dure.federated.engines.job import Engine, Job, Trained
from dure.federated.engines.loop import failed
from dure.federated.engines.progress import Progress
from dure.federated.engines.shared import Outputs, Reply, Slots


@dataclass(frozen=True)
class Note:
    """A job as a message: `Job` with the places of its tensors: weights, anchor, correction."""

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
    joins: bool
    name: str | None

    @property
    def reads(self) -> set[int]:
        """The places that it needs."""
        return {place for place in self.places if place is not None}


def note_of(job: Job, slots: Slots, needed: set[int]) -> Note:
    """The message for a job, whose tensors are put into slots that are not needed."""
    weights = slots.put(job.weights, needed)
    anchor, correction = (
        None if values is None else slots.put(values, needed)
        for values in (job.anchor, job.correction)
    )
    return Note(
        client=job.client,
        round=job.round,
        indices=job.indices.numpy(),
        buffers=list(job.buffers),
        first_step=job.first_step,
        steps=job.steps,
        mu=job.mu,
        places=(weights, anchor, correction),
        turn=job.turn,
        lr_factor=job.lr_factor,
        joins=job.joins,
        name=job.name,
    )


def live(
    inner: Engine,
    connection: Connection,
    sets: list[list[Tensor]],
    outputs: Outputs,
    progress: Progress,
    pipe: Sequence[int],
    not_mine: Sequence[Connection],
) -> NoReturn:
    """Does jobs until the parent is gone, and leaves without the interpreter's teardown."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
        torch.set_num_threads(1)
        # The writing end has to be the parent's alone, or its death would end nothing.
        os.close(pipe[1])
        for each in not_mine:
            each.close()
        threading.Thread(target=_leave_with_parent, args=(pipe[0],), daemon=True).start()
        inner.look = progress.step
        while True:
            notes: list[Note] = pickle.loads(connection.recv_bytes())
            done = _do(inner, notes, sets, outputs, progress)
            connection.send_bytes(pickle.dumps(done, pickle.HIGHEST_PROTOCOL))
            # What user code printed: `os._exit` would lose it.
            sys.stdout.flush()
            sys.stderr.flush()
    except (EOFError, OSError):
        # The parent has closed the connection: the usual end.
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        # Never back into the parent's code, of which this process has a copy, nor into its exit
        # handlers.
        os._exit(1)


def _leave_with_parent(pipe: int) -> None:
    # Returns at the end of the pipe, even while the main thread computes.
    os.read(pipe, 1)
    os._exit(0)


def _do(
    inner: Engine,
    notes: Sequence[Note],
    sets: Sequence[list[Tensor]],
    outputs: Outputs,
    progress: Progress,
) -> tuple[Reply, DureError | None]:
    """What came of the jobs up to the first that raised, and what it raised."""
    jobs = [_job(note, sets) for note in notes]
    results: list[Trained] = []
    error: DureError | None = None
    try:
        for trained in inner.train(jobs):
            results.append(trained)
            progress.done(len(results))
    # Ctrl-C is ignored here (`live`): a KeyboardInterrupt is the user's own code's.
    except BaseException as raised:
        # Results come in the jobs' order, so the one that failed is the next.
        error = _portable(raised, jobs[len(results)])
    return outputs.write(results), error


def _job(note: Note, sets: Sequence[list[Tensor]]) -> Job:
    weights, anchor, correction = (None if place is None else sets[place] for place in note.places)
    assert weights is not None
    return Job(
        client=note.client,
        round=note.round,
        indices=torch.from_numpy(note.indices),
        weights=weights,
        buffers=note.buffers,
        first_step=note.first_step,
        steps=note.steps,
        mu=note.mu,
        anchor=anchor,
        correction=correction,
        turn=note.turn,
        lr_factor=note.lr_factor,
        joins=note.joins,
        name=note.name,
    )


def _portable(error: BaseException, job: Job) -> DureError:
    """An error that can be pickled, with its traceback as text where the parent cannot have it."""
    if isinstance(error, WorkerFailedError):
        text = "".join(traceback.format_exception(error.__cause__ or error))
        return WorkerFailedError(error.who, error.step, error.reason, error.traceback or text)
    if isinstance(error, DureError):
        return error
    return _portable(failed(job, error), job)
