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

from dure.collectives.shared_memory.torch_error_texts import timed_out
from dure.errors import CallTimeoutError, DureError


class CallHandle(dist.Work):
    """Call in progress or done. Every waiting thread gets the error of a failed call.

    tensors: value of the future when the call is done.
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
        """Call `then` before any waiting thread resumes; at once if the call is done."""
        with self._lock:
            if not self._done.is_set():
                self._before = then
                return
        then()

    def finish(self, error: BaseException | None = None, here: bool = False) -> None:
        """Mark the call as done or failed; the first result stays.

        Callbacks of the future may wait for other calls of the group, as some communication hooks
        of DistributedDataParallel do. So they run on a separate thread, unless `here` is set, for a
        thread that may wait.
        """
        # `get_future` takes the same lock: either `get_future` sees the end of the call, or this
        # method sees the future. So a future is settled exactly once.
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
        """Set the future's value. An error is a value too, see `_result_of`."""
        error = self._error
        if error is None:
            future.set_result(self._tensors)
        else:
            future.set_result(error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the call is done; return True.

        Raises the call's error, or CallTimeoutError after `timeout`; the call then continues.
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
        """Return a future of the call's tensors, which fails if the call fails."""
        with self._lock:
            if self._future is None:
                self._future = Future()
                settled = self._done.is_set()
            else:
                settled = False
            future = self._future
        if settled:
            self._settle(future)
        # A new future for each caller, whose errors `_result_of` raises.
        return future.then(_result_of)

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        """Return the tensors, when the call is done. Raises its error."""
        self.wait()
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    def _source_rank(self) -> int:
        return self.source

    source_rank = _source_rank


def _result_of(future: Future[Any]) -> Any:
    """Return the value of a future, or raise it if it is an error.

    Raised here, it reaches C++ as an error and not as a value.
    """
    value = future.value()
    if isinstance(value, BaseException):
        raise value
    return value


def done(tensors: Sequence[Tensor] = ()) -> CallHandle:
    """Return a call that is already done."""
    work = CallHandle(tensors)
    work.finish()
    return work


class _Finished(dist.Work):
    """Handle of every successful synchronous call, for which torch only waits."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        return done().get_future()

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


FINISHED = _Finished()


class CallQueue:
    """Queue of calls for a thread, which starts with the first asynchronous call.

    A synchronous call runs on the caller's thread if the queue is empty. Calls run in inference
    mode, so that they may write to parameters, and to tensors that were made in inference mode, as
    calls in C++ may. failed: called with an error that only this rank has.
    """

    def __init__(self, name: str, failed: Callable[[Exception], None] | None = None) -> None:
        self._name = name
        self._failed = failed
        self.turn = threading.Lock()  # held by the thread that runs a call
        self._waiting: queue.SimpleQueue[tuple[Callable[[], None], CallHandle] | None] = (
            queue.SimpleQueue()
        )
        self.ahead = 0  # calls queued or running on the thread
        self._count = threading.Lock()
        self._door = threading.Lock()  # between the threads: take a call and the turn together
        self._threads: list[threading.Thread] = []
        self._free = 0  # threads that do not settle a future
        self._closed = False

    def abandon(self) -> None:
        """Detach from the queue in a forked child: the queue and its thread are the parent's."""
        # Acquired permanently: no call begins in this process.
        self._closed = True
        self.turn.acquire(blocking=False)

    def begin(self) -> bool:
        """Return whether the caller may run a call at once; `end` has to follow."""
        return self.ahead == 0 and self.turn.acquire(blocking=False)

    def end(self) -> None:
        """Let the next call run."""
        self.turn.release()

    def now(self, call: Callable[[], None]) -> None:
        """Run a call and return when it is done."""
        # Behind earlier calls it joins the queue, so that calls run in the order of issue.
        if not self.begin():
            self.later(call, ()).wait()
            return
        try:
            with torch.inference_mode():
                self._tried(call)
        finally:
            self.end()

    def promptly(self, call: Callable[[], None]) -> None:
        """Do `now` for a call of microseconds in the C core, which needs no inference mode."""
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
        except DureError:  # the core raises it on the other ranks too
            raise
        except Exception as error:
            if self._failed is not None:
                self._failed(error)
            raise

    def later(self, call: Callable[[], None], tensors: Sequence[Any]) -> CallHandle:
        """Append a call to the queue."""
        work = CallHandle(tensors)
        with self._count:
            if self._closed:
                raise RuntimeError("this process group was destroyed: make a new one")
            self.ahead += 1
            if not self._threads:
                self._start_thread()
            self._waiting.put((call, work))
        return work

    def _start_thread(self) -> None:
        """Start a further thread that takes calls.

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
            # Only now may a caller run its call itself: the turn is free, and this call is done.
            with self._count:
                self.ahead -= 1
                self._free -= 1
                if self._free == 0 and not self._closed:
                    # Callbacks of this call's future may wait for the next call.
                    self._start_thread()
            work.finish(error, here=True)
            with self._count:
                self._free += 1
            # Otherwise the tensors would stay alive until the next call.
            del item, call, work, error

    def close(self, seconds: float) -> bool:
        """Wait for the queued calls; return whether they ended in time."""
        with self._count:
            self._closed = True
            threads = list(self._threads)
        self._waiting.put(None)
        until = time.monotonic() + seconds
        for thread in threads:
            # A callback of a future may destroy the group on a thread of the queue.
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)
