"""Handles of asynchronous calls, and the thread that runs them in the order of their issue."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from dure.collectives.shared_memory.torch_texts import timed_out
from dure.errors import CallTimeoutError, DureError


class Work(dist.Work):
    """One call, under way or done. Everybody who waits for a failed one gets its error.

    tensors: what the future holds when the call is done.
    """

    def __init__(self, tensors: Sequence[Any] = ()) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._future: Future[Any] | None = None
        self._lock = threading.Lock()
        self._before: Callable[[], None] | None = None
        self.source = -1

    def before_the_end(self, then: Callable[[], None]) -> None:
        """Calls `then` before anybody hears that the call is done; at once if it is done."""
        with self._lock:
            if not self._done.is_set():
                self._before = then
                return
        then()

    def finish(self, error: BaseException | None = None, here: bool = False) -> None:
        """The call is done, or has failed; what comes first stays.

        What hangs on its future may wait for other calls of the group, as some communication hooks
        of DistributedDataParallel do: it runs on a thread of its own, unless `here` can wait.
        """
        # `get_future` takes the same lock: either it sees that the call is done, or its future is
        # seen here. So a future is settled once.
        with self._lock:
            if self._done.is_set():
                return
            self._error = error
            if self._before is not None:
                self._before()
            self._done.set()
            future = self._future
        if future is not None and here:
            self._settle(future)
        elif future is not None:
            threading.Thread(
                target=self._settle, args=(future,), name="dure future", daemon=True
            ).start()

    def _settle(self, future: Future[Any]) -> None:
        """Tells those that wait for the future. An error is its value, see `_result_of`."""
        error = self._error
        if error is None:
            future.set_result(self._tensors)
        else:
            future.set_result(error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True when the call is done.

        Raises its error, or CallTimeoutError after `timeout`; the call then goes on.
        """
        seconds = timeout.total_seconds() if timeout else 0
        if not self._await(seconds if seconds > 0 else None):
            raise CallTimeoutError(
                f"the call is not done after {seconds:g} s, and goes on: {timed_out(seconds)}"
            )
        if self._error is not None:
            raise self._error
        return True

    def _await(self, seconds: float | None) -> bool:
        return self._done.wait(seconds)

    def get_future(self) -> Future[Any]:
        """A future of the tensors of the call; it fails as the call fails."""
        with self._lock:
            if self._future is None:
                self._future = Future()
                settled = self._done.is_set()
            else:
                settled = False
            future = self._future
        if settled:
            self._settle(future)
        # A new one for each caller: its errors are raised in `_result_of`.
        return future.then(_result_of)

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        """The tensors, when the call is done. Raises its error."""
        self.wait()
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    def _source_rank(self) -> int:
        return self.source

    source_rank = _source_rank


def _result_of(future: Future[Any]) -> Any:
    """What a future holds; an error that it holds is raised.

    Raised here, it reaches C++ as an error and not as a value.
    """
    value = future.value()
    if isinstance(value, BaseException):
        raise value
    return value


def done(tensors: Sequence[Tensor] = ()) -> Work:
    """A call that is done already."""
    work = Work(tensors)
    work.finish()
    return work


class _Finished(dist.Work):
    """Every synchronous call that has succeeded: torch only waits for it."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        return done().get_future()

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


FINISHED = _Finished()


class Line:
    """Calls wait in line for one thread, which starts with the first call that is not synchronous.

    A synchronous call runs on the caller's thread if nobody is before it. Calls run in inference
    mode, so that they may write to parameters, and to tensors that were made in inference mode, as
    calls in C++ may. failed: told of an error that is this rank's alone.
    """

    def __init__(self, name: str, failed: Callable[[Exception], None] | None = None) -> None:
        self._name = name
        self._failed = failed
        self.turn = threading.Lock()  # held by whoever runs a call
        self._waiting: queue.SimpleQueue[tuple[Callable[[], None], Work] | None] = (
            queue.SimpleQueue()
        )
        self.ahead = 0  # calls in line or running on the thread
        self._count = threading.Lock()
        self._door = threading.Lock()  # between the threads: take a call and the turn together
        self._threads: list[threading.Thread] = []
        self._free = 0  # threads that do not settle a future
        self._closed = False

    def abandon(self) -> None:
        """In a forked child: the line, and its thread, are the parent's."""
        # Taken for ever, if it is not taken already: no call begins in this process.
        self._closed = True
        self.turn.acquire(blocking=False)

    def begin(self) -> bool:
        """Whether the caller may run a call at once; `end` says that it has."""
        return self.ahead == 0 and self.turn.acquire(blocking=False)

    def end(self) -> None:
        """Lets the next call run."""
        self.turn.release()

    def now(self, call: Callable[[], None]) -> None:
        """Runs a call and returns when it is done."""
        # Somebody is before it: it gets in line, so that the order of issue is the order of calls.
        if not self.begin():
            self.later(call, ()).wait()
            return
        try:
            with torch.inference_mode():
                self._tried(call)
        finally:
            self.end()

    def promptly(self, call: Callable[[], None]) -> None:
        """`now`, for a call of microseconds of the C core, which knows nothing of torch's modes."""
        if not self.begin():
            self.now(call)
            return
        try:
            self._tried(call)
        finally:
            self.end()

    def _tried(self, call: Callable[[], None]) -> None:
        try:
            call()
        except DureError:  # the other ranks get it as well, from the core
            raise
        except Exception as error:
            if self._failed is not None:
                self._failed(error)
            raise

    def later(self, call: Callable[[], None], tensors: Sequence[Any]) -> Work:
        """Puts a call at the end of the line."""
        work = Work(tensors)
        with self._count:
            if self._closed:
                raise RuntimeError("this process group was destroyed: make a new one")
            self.ahead += 1
            if not self._threads:
                self._start_thread()
            self._waiting.put((call, work))
        return work

    def _start_thread(self) -> None:
        """One more thread that takes calls.

        Two are enough unless futures wait for calls that futures wait for.
        """
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._threads.append(thread)
        self._free += 1
        thread.start()

    def _run(self) -> None:
        while True:
            with self._door:  # the thread that takes the next call also takes the next turn
                item = self._waiting.get()
                if item is None:  # the end, which `close` has put there
                    self._waiting.put(None)  # for the other threads
                    return
                self.turn.acquire()
            call, work = item
            error: BaseException | None = None
            try:
                with torch.inference_mode():
                    self._tried(call)
            except BaseException as raised:
                error = raised
            finally:
                self.turn.release()
            # Only now may a caller run its call by itself: the turn is free, and this one is done.
            with self._count:
                self.ahead -= 1
                self._free -= 1
                if self._free == 0 and not self._closed:
                    # what hangs on this call's future may wait for the next call
                    self._start_thread()
            work.finish(error, here=True)
            with self._count:
                self._free += 1
            # Their tensors would live until the next call comes.
            del item, call, work, error

    def close(self, seconds: float) -> bool:
        """Lets the calls in line end; returns whether they did in time."""
        with self._count:
            self._closed = True
            threads = list(self._threads)
        self._waiting.put(None)
        until = time.monotonic() + seconds
        for thread in threads:
            # A callback of a future may destroy the group, on a thread of the line.
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)
