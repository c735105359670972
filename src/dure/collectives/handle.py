"""Operations in the background: a handle for each, and a thread that runs them in order.

The operations of a process group run sequentially, in the order of issue, on a single thread,
because their messages are distinguished only by their order. The thread starts with the first
operation and ends after `IDLE` seconds without work, so no thread outlives its group for long.

When an operation fails, later operations are not attempted: each would wait a whole timeout for the
same lost peer. Their handles raise the same error.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Literal, ParamSpec, Protocol, TypeVar, overload

from torch import Tensor

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")

IDLE = 1.0
"""Seconds without work after which the thread ends."""


class Handle(Generic[Value]):
    """Issued operation, which may be in progress."""

    def __init__(self, work: Callable[[], Value]) -> None:
        self._work: Callable[[], Value] | None = work
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._value: list[Value] = []

    @classmethod
    def of(cls, value: Value) -> Handle[Value]:
        """Return the handle of an operation without work."""
        handle = cls(lambda: value)
        handle.run()
        return handle

    def run(self) -> BaseException | None:
        """Run the operation in this thread; return its error."""
        assert self._work is not None
        error: BaseException | None = None
        try:
            self._value.append(self._work())
        except BaseException as raised:  # any error is raised in the waiting thread
            error = raised
        self.end(error)
        return error

    def end(self, error: BaseException | None) -> None:
        """Wake the waiting threads; with `error`, the operation has failed."""
        self._work = None  # releases the tensors and groups of the operation
        self._error = error
        self._done.set()

    def is_completed(self) -> bool:
        """Return whether the operation has ended, successfully or not."""
        return self._done.is_set()

    def wait(self) -> Value:
        """Wait for the end; return the operation's result.

        The first wait raises the operation's error. Later waits raise RuntimeError after a failure.
        """
        self._done.wait()
        if self._value:
            return self._value[0]
        # The error is released, because its traceback refers to the operation's tensors.
        error = self._error
        self._error = None
        if error is None:
            raise RuntimeError("this operation failed, and the first waiter received the error")
        raise error


class Collective(Protocol[Arguments, Value]):
    """Type of a collective: its result, or with `async_op=True` a handle for the result."""

    @overload
    def __call__(
        self, tensor: Tensor, *arguments: object, async_op: Literal[True], **named: object
    ) -> Handle[Value]: ...
    @overload
    def __call__(self, *arguments: Arguments.args, **named: Arguments.kwargs) -> Value: ...


def collective(
    function: Callable[Arguments, Value | Handle[Value]],
) -> Collective[Arguments, Value]:
    """Declare a collective by its only signature; returns the function itself.

    The type of its result then depends on `async_op`.
    """
    # A type cannot add a parameter to `Arguments`, so arguments beside `async_op=True` are not
    # checked by type.
    return function  # type: ignore[return-value]


class OperationQueue:
    """Operations of a process group, in order of issue, on a separate thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Handle[object]] = deque()
        self._busy = False
        self.thread: threading.Thread | None = None
        """Thread, or None after an idle time without operations."""

    def put(self, work: Callable[[], Value]) -> Handle[Value]:
        """Issue an operation and return its handle."""
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
        """Wait until all issued operations have ended; raises nothing."""
        thread = self.thread
        if thread is None or threading.current_thread() is thread:
            # No operation is in progress, or this thread runs a composed operation itself.
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._busy)

    def _serve(self) -> None:
        while True:
            with self._changed:
                # The lock makes this atomic: `put` either finds the thread or starts another.
                if not self._changed.wait_for(lambda: bool(self._waiting), IDLE):
                    self.thread = None
                    return
                handle = self._waiting.popleft()
                self._busy = True
            error = handle.run()  # without the lock, so that others can issue meanwhile
            del handle  # releases its value as soon as the waiting threads do
            with self._changed:
                while error is not None and self._waiting:
                    self._waiting.popleft().end(error)
                self._busy = False
                self._changed.notify_all()
            del error  # its traceback holds the frames, and so the tensors, of the operation
