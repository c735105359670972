"""Callbacks: user objects that observe a run and may end it.

    on_begin(config)          before the first step; config.json as a mapping
    on_step(step)             after every step (`dure.record.history.Step`)
    on_round(round)           after every round, of systems that count rounds; the same type
    on_evaluation(evaluation) after every evaluation (`dure.record.history.Evaluation`)
    on_end(run)               after a successful run; the `Run` that `dure.train` returns
    on_failure(error)         after a failed run, which has no result

A callback is any object that has some of these methods. In every world they are called in the
user's process; of a torchrun job, in the process of rank 0. The coordinating rank waits until they
return, so that their decisions do not depend on their speed. A callback that takes longer than the
world's deadline makes the other ranks time out.

A callback that raises `dure.StopRun` ends the run as a limit does: the model is evaluated, written
and returned, and summary["ended"] is "callback". Several ranks receive the request with their next
message, and end after the step that follows.

Any other error ends the run in the same way, so that no result is lost; then the error is raised
as `CallbackFailedError`, which names the callback and has the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dure.arguments import shown
from dure.errors import CallbackFailedError, StopRun, described
from dure.record.history import Evaluation, History, Record
from dure.record.run import Run

METHODS = ("on_begin", "on_step", "on_round", "on_evaluation", "on_end", "on_failure")

Progress = Callable[[dict[str, Any]], None]


def check_callbacks(callbacks: Any) -> None:
    """Raise ValueError if `callbacks` is no list of objects with callback methods."""
    if isinstance(callbacks, (str, bytes)) or not isinstance(callbacks, Sequence):
        raise ValueError(f"callbacks is {shown(callbacks)}: give a list of callbacks")
    for one in callbacks:
        if isinstance(one, type):
            raise ValueError(f"{one.__name__} is a class: give an instance, {one.__name__}(...)")
        if not any(callable(getattr(one, name, None)) for name in METHODS):
            raise ValueError(
                f"{shown(one)} is not a callback: it has none of the methods {', '.join(METHODS)}"
            )


class Callbacks:
    """The callbacks of one run. on_progress: receives all other events of the run."""

    def __init__(self, callbacks: Sequence[Any], on_progress: Progress) -> None:
        self.callbacks = callbacks
        self.on_progress = on_progress
        self.error: CallbackFailedError | None = None
        self._stopped = False
        self._at = "before the first step"

    def __call__(self, event: dict[str, Any]) -> None:
        """Handle an event of the run. Raises StopRun once a callback requests the end."""
        if "record" not in event:
            self.on_progress(event)
            return
        (record,) = History.decode(event["record"]).records
        self._at = f"after {event['counts']} {event['step']}"
        self._call(_method_of(record, event["counts"]), record)
        if self._stopped:
            raise StopRun

    def begin(self, config: Mapping[str, Any]) -> None:
        self._call("on_begin", config)

    def end(self, run: Run) -> None:
        """Call on_end. Raises CallbackFailedError if a callback failed during the run."""
        self._at = "at the end"
        # Failed callbacks are called as well, because they may have files to close.
        self._call("on_end", run)
        if self.error is not None:
            self.error.run = run
            raise self.error

    def fail(self, error: BaseException) -> None:
        self._at = "after the run had failed"
        self._call("on_failure", error)

    def _call(self, name: str, content: Any) -> None:
        for one in self.callbacks:
            method = getattr(one, name, None)
            if method is None:
                continue
            try:
                method(content)
            except StopRun:
                self._stopped = True
            except Exception as error:
                self._stopped = True
                self._note(f"{type(one).__name__}.{name}", error)

    def _note(self, who: str, error: Exception) -> None:
        if self.error is None:  # the first one says why the run ends
            self.error = CallbackFailedError(who, self._at, described(error))
            self.error.__cause__ = error


def _method_of(record: Record, unit: str) -> str:
    return "on_evaluation" if isinstance(record, Evaluation) else f"on_{unit}"
