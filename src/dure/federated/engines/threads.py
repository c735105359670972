"""Clients on several threads of this process: for engines whose operators are long, for these let
go of Python's lock.

That is the engine `batched` where a step takes milliseconds, as of convolutional networks. Beside
processes (`processes`) nothing is copied, weights and data and what libraries keep are in memory
once, and a GPU that is there and not used does no harm. A thread's operators use one thread, so the
bits are those of one process with one thread.

Threads end with the engine: they leave what they are at before its next step. None may be in an
operator when the interpreter ends, which would end the process with it.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from dure.errors import DureError, WorkerFailedError
from dure.federated.engines.batched import BatchedEngine
from dure.federated.engines.divided import Chunk, DividedEngine, Worker
from dure.federated.engines.loop import failed
from dure.machine.threads import set_own_threads

LOOK_UP_SECONDS = 0.2
"""How long one waits at a time: a main thread sees a signal that another thread got only when it
looks up."""

AHEAD = 2
"""Chunks for each thread that are computed ahead of what is asked for."""

Outcome = tuple["_Member", Chunk, DureError | None]


@dataclass(eq=False)
class _Member(Worker):
    inbox: queue.SimpleQueue[Chunk | None]
    thread: threading.Thread


class ThreadsEngine(DividedEngine[_Member]):
    """Gives jobs to a thread for each of the engines `inners`, which share no state."""

    def __init__(self, inners: Sequence[BatchedEngine], chunk: int = 1) -> None:
        super().__init__(f"{inners[0].name}-threads", len(inners), chunk, AHEAD * len(inners))
        self.inners = inners
        self._outbox: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._end = weakref.finalize(self, _end, self._members, inners)

    def close(self) -> None:
        """Ends the threads, and waits for them: a step at most."""
        _end(self._members, self.inners)

    def _start(self) -> None:
        mine = torch.get_num_threads()
        ready = threading.Barrier(self.workers + 1)
        try:
            for number, inner in enumerate(self.inners):
                inbox: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
                member = _Member(
                    inbox, threading.Thread(name=f"dure clients {number}", daemon=True)
                )
                member.thread.run = partial(_live, inner, member, self._outbox, ready)  # type: ignore[method-assign]
                member.thread.start()
                self._members.append(member)
            ready.wait()
        except RuntimeError as error:
            ready.abort()
            self.close()
            raise WorkerFailedError(
                "a thread", "the start", f"{self.workers} are too many ({error})"
            ) from error
        finally:
            torch.set_num_threads(mine)  # and for threads that are yet to come

    def _give(self, member: _Member, chunk: Chunk) -> None:
        member.chunk = chunk
        member.inbox.put(chunk)

    def _receive(self) -> None:
        while True:
            try:
                member, chunk, error = self._outbox.get(timeout=LOOK_UP_SECONDS)
            except queue.Empty:
                continue
            chunk.error, chunk.done, member.chunk = error, True, None
            return


def _live(
    inner: BatchedEngine,
    member: _Member,
    outbox: queue.SimpleQueue[Outcome],
    ready: threading.Barrier,
) -> None:
    set_own_threads(1)
    with suppress(threading.BrokenBarrierError):  # another could not be started
        ready.wait()
    while (chunk := member.inbox.get()) is not None:
        outbox.put((member, chunk, _do(inner, chunk)))
        del chunk  # what the run has given up shall not live on here


def _do(inner: BatchedEngine, chunk: Chunk) -> DureError | None:
    """Fills the results, up to the first job that raises, and returns what it raised."""
    try:
        for trained in inner.train(chunk.jobs):
            chunk.results.append(trained)
    except DureError as error:
        return error
    except BaseException as error:  # whatever it is, somebody waits for this chunk
        told = failed(chunk.jobs[min(len(chunk.results), len(chunk.jobs) - 1)], error)
        told.__cause__ = error
        return told
    return None


def _end(members: list[_Member], inners: Sequence[BatchedEngine]) -> None:
    for inner in inners:
        inner.abandoned = True
    for member in members:
        member.inbox.put(None)
    for member in members:
        if (
            member.thread is not threading.current_thread()
        ):  # which may be the one that collects the garbage
            member.thread.join()
    members.clear()
    for inner in inners:
        inner.abandoned = False
