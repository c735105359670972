"""Child process of the engine on processes (`processes`), and its messages.

A child ends when the parent closes its connection or dies in any way: the child reads a pipe
without data, whose end shows the parent's death.
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

from dure.errors import DureError, WorkerFailedError, can_be_pickled, traceback_of
from dure.federated.engines.job import ClientEngine, ClientJob, JobResult, Measures, Reference
from dure.federated.engines.loop import client_error
from dure.federated.engines.progress import ProcessProgress
from dure.federated.engines.shared_memory import Reply, SharedResults, SharedWeights


@dataclass(frozen=True)
class JobMessage:
    """A `ClientJob` as a message: slot numbers instead of its weights, anchor and correction.

    places: slots of weights, anchor, correction; None without such a tensor. references: (weights,
    buffers) of each reference; weights None are the job's own.
    """

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
    references: list[tuple[list[Tensor] | None, list[Tensor]]]
    measures: Measures | None

    @property
    def reads(self) -> set[int]:
        """Slots that the job reads."""
        return {place for place in self.places if place is not None}


def job_message(job: ClientJob, slots: SharedWeights, needed: set[int]) -> JobMessage:
    """Return the message for a job; its tensors go into slots that are not needed."""
    weights = slots.put(job.weights, needed)
    anchor, correction = (
        None if values is None else slots.put(values, needed)
        for values in (job.anchor, job.correction)
    )
    return JobMessage(
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
        references=[
            (None if one.weights is job.weights else list(one.weights), list(one.buffers))
            for one in job.references
        ],
        measures=job.measures,
    )


def run_child(
    inner: ClientEngine,
    connection: Connection,
    sets: list[list[Tensor]],
    outputs: SharedResults,
    progress: ProcessProgress,
    pipe: Sequence[int],
    not_mine: Sequence[Connection],
) -> NoReturn:
    """Do jobs until the parent is gone, and exit without the interpreter's teardown.

    Args:
        inner: the engine that trains.
        connection: the child's end of the connection to the parent.
        sets: slots of shared memory with weights, anchors and corrections.
        outputs: shared memory for results.
        progress: counters that the parent reads.
        pipe: (reading end, writing end) of the pipe that ends with the parent.
        not_mine: connections of the parent and of siblings, which the child closes.
    """
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
        torch.set_num_threads(1)
        # Only the parent may have the writing end: otherwise its death would not end the pipe.
        os.close(pipe[1])
        for each in not_mine:
            each.close()
        threading.Thread(target=_leave_with_parent, args=(pipe[0],), daemon=True).start()
        inner.look = progress.step
        while True:
            notes: list[JobMessage] = pickle.loads(connection.recv_bytes())
            done = _do(inner, notes, sets, outputs, progress)
            connection.send_bytes(pickle.dumps(done, pickle.HIGHEST_PROTOCOL))
            # Output of user code, which `os._exit` would lose.
            sys.stdout.flush()
            sys.stderr.flush()
    except (EOFError, OSError):
        # The parent has closed the connection: the usual end.
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        # Never return into the parent's code, of which this process has a copy, nor into its exit
        # handlers.
        os._exit(1)


def _leave_with_parent(pipe: int) -> None:
    # Returns at the end of the pipe, even while the main thread computes.
    os.read(pipe, 1)
    os._exit(0)


def _do(
    inner: ClientEngine,
    notes: Sequence[JobMessage],
    sets: Sequence[list[Tensor]],
    outputs: SharedResults,
    progress: ProcessProgress,
) -> tuple[Reply, DureError | None]:
    """Return the results of the jobs up to the first error, and that error or None."""
    jobs = [_job(note, sets) for note in notes]
    results: list[JobResult] = []
    error: DureError | None = None
    try:
        for trained in inner.train(jobs):
            results.append(trained)
            progress.done(len(results))
    # Ctrl-C is ignored here (`run_child`): a KeyboardInterrupt comes from user code.
    except BaseException as raised:
        # Results come in the jobs' order, so the failed job is the next.
        error = _portable(raised, jobs[len(results)])
    return outputs.write(results), error


def _job(note: JobMessage, sets: Sequence[list[Tensor]]) -> ClientJob:
    weights, anchor, correction = (None if place is None else sets[place] for place in note.places)
    assert weights is not None
    return ClientJob(
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
        references=[
            Reference(weights if own is None else own, buffers) for own, buffers in note.references
        ],
        measures=note.measures,
    )


def _portable(error: BaseException, job: ClientJob) -> DureError:
    """Return an error that can be pickled, with its traceback as text if the type cannot travel."""
    if isinstance(error, WorkerFailedError):
        text = traceback_of(error.__cause__ or error)
        return WorkerFailedError(error.who, error.step, error.reason, error.traceback or text)
    if isinstance(error, DureError) and can_be_pickled(error):
        return error
    return _portable(client_error(job, error), job)
