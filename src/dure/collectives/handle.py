"""Operations alongside the program: a handle for each, and a thread that does them in order.

The operations of one process group run one after another, in the order of issue, on one thread,
because their messages are told apart by nothing but their order. The thread starts with the first
operation and ends when it has had nothing to do for `IDLE` seconds, so none outlives its group for
long.

When an operation fails, those issued after it are not tried: each would wait a whole deadline for
the same lost peer. Their handles raise the same error.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")

IDLE = 1.0
"""Seconds without work after which the thread ends."""


class Handle(Generic[Value]):
    """An operation that was issued and may still be under way."""

    def __init__(self, work: Callable[[], Value]) -> None:
        self._work: Callable[[], Value] | None = work
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._value: list[Value] = []

    @classmethod
    def of(cls, value: Value) -> Handle[Value]:
        """The handle of an operation that had nothing to do."""
        handle = cls(lambda: value)
        handle.run()
        return handle

    def run(self) -> BaseException | None:
        """Carries the operation out, here; returns its error."""
        assert self._work is not None
        error: BaseException | None = None
        try:
            self._value.append(self._work())
        except BaseException as raised:  # whatever it is, whoever waits gets it
            error = raised
        self.end(error)
        return error

    def end(self, error: BaseException | None) -> None:
        """Lets those go on who wait; with `error`, the operation has failed."""
        self._work = None  # tensors and groups live no longer than they are needed
        self._error = error
        self._done.set()

    def is_completed(self) -> bool:
        """Whether the operation has ended, well or not."""
        return self._done.is_set()

    def wait(self) -> Value:
        """Waits for the end; returns what the operation returns.

        An error of the operation is raised here, the first time. Whoever waits once more is told
        that it failed.
        """
        self._done.wait()
        if self._value:
            return self._value[0]
        # Given away: an error holds, by its traceback, what the operation used.
        error = self._error
        self._error = None
        if error is None:
            raise RuntimeError("this operation failed, and has said so to who waited first")
        raise error


class Line:
    """The operations of one process group, in order of issue, on a thread of their own."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Handle[object]] = deque()
        self._busy = False
        self.thread: threading.Thread | None = None
        """None while nothing is under way, nor was a moment ago."""

    def put(self, work: Callable[[], Value]) -> Handle[Value]:
        """Issues an operation."""
        handle = Handle(work)
        with self._changed:
            self._waiting.append(handle)  # type: ignore[arg-type]
            if self.thread is None:
                self.thread = threading.Thread(
                    target=self._serve, name="dure communication", daemon=True
                )
                self.thread.start()
            self._changed.notify_all()
        return handle

    def settle(self) -> None:
        """Waits until all that was issued has ended; raises nothing."""
        thread = self.thread
        if thread is None or threading.current_thread() is thread:
            # Nothing is under way, or this is an operation that is made of others.
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._busy)

    def _serve(self) -> None:
        while True:
            with self._changed:
                # With the lock held: `put` either finds the thread, or starts another one.
                if not self._changed.wait_for(lambda: bool(self._waiting), IDLE):
                    self.thread = None
                    return
                handle = self._waiting.popleft()
                self._busy = True
            error = handle.run()  # without the lock, so that others can issue meanwhile
            del handle  # its value lives no longer than those who wait for it
            with self._changed:
                while error is not None and self._waiting:
                    self._waiting.popleft().end(error)
                self._busy = False
                self._changed.notify_all()
            del error  # its traceback holds the frames, and so the tensors, of the operation
