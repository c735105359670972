"""Clients on several threads of this process: for engines whose operators are long, for these let go of Python's lock.

That is the engine `batched` where a step takes milliseconds, as of convolutional networks. Beside processes
(`processes`) nothing is copied, weights and data and what libraries keep are in memory once, and a GPU that is there
and not used does no harm. A thread's operators use one thread, so the bits are those of one process with one thread.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dure.errors import DureError
from dure.federated.cohort.divided import Chunk, DividedEngine, Worker
from dure.federated.cohort.job import Engine
from dure.federated.cohort.loop import failed
from dure.threads import set_own_threads

LOOK_UP_SECONDS = 0.2
"""How long one waits at a time: a main thread sees a signal that another thread got only when it looks up."""

CLOSE_SECONDS = 5.0
"""How long `close` waits for them. They are daemons: they do not keep the process alive."""

AHEAD = 2
"""Chunks for each thread that are computed ahead of what is asked for."""

Outcome = tuple["_Member", Chunk, DureError | None]


@dataclass(eq=False)
class _Member(Worker):
    inbox: queue.SimpleQueue[Chunk | None]
    thread: threading.Thread | None = None


class ThreadsEngine(DividedEngine[_Member]):
    """Gives jobs to a thread for each of the engines `inners`, which share no state."""

    def __init__(self, inners: Sequence[Engine], chunk: int = 1) -> None:
        super().__init__(f"{inners[0].name}-threads", len(inners), chunk, AHEAD * len(inners))
        self.inners = inners
        self._leaving: list[threading.Thread] = []
        self._outbox: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._end = weakref.finalize(self, _end, self._members)

    def close(self) -> None:
        """Ends the threads, which first do what they are at."""
        self._leaving += [member.thread for member in self._members if member.thread is not None]
        _end(self._members)
        until = time.monotonic() + CLOSE_SECONDS
        for thread in self._leaving:
            thread.join(max(0.0, until - time.monotonic()))

    def _start(self) -> None:
        for thread in self._leaving:  # it has one of the engines
            thread.join()
        self._leaving.clear()
        mine = torch.get_num_threads()
        ready = threading.Barrier(self.workers + 1)
        for number, inner in enumerate(self.inners):
            member = _Member(queue.SimpleQueue())
            arguments = (inner, member, self._outbox, ready)
            member.thread = threading.Thread(target=_live, args=arguments, name=f"dure clients {number}", daemon=True)
            member.thread.start()
            self._members.append(member)
        ready.wait()
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


def _live(inner: Engine, member: _Member, outbox: queue.SimpleQueue[Outcome], ready: threading.Barrier) -> None:
    set_own_threads(1)
    ready.wait()
    while (chunk := member.inbox.get()) is not None:
        outbox.put((member, chunk, _do(inner, chunk)))
        del chunk  # what the run has given up shall not live on here


def _do(inner: Engine, chunk: Chunk) -> DureError | None:
    """Fills the results, up to the first job that raises, and returns what it raised."""
    try:
        for trained in inner.train(chunk.jobs):
            chunk.results.append(trained)
    except DureError as error:
        return error
    except Exception as error:
        told = failed(chunk.jobs[len(chunk.results)], error)
        told.__cause__ = error
        return told
    return None


def _end(members: list[_Member]) -> None:
    for member in members:
        member.inbox.put(None)
    members.clear()
