"""Errors by name.

Wrong arguments are `ValueError`, as everywhere in Python. Other errors are the classes below; each
message names the problem, the object, and the remedy. `exit_code` is the exit status of the command
line: 2 if the user's input has to change, 1 if a run failed.
"""

from __future__ import annotations

import difflib
import math
import pickle
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

MOST_OF_A_TEXT = 10_000
"""Maximum characters of an error's text, which may be of any length."""


def text_of(error: BaseException) -> str:
    """Return the text of an error, in characters that every file and message can contain.

    A user's class makes its own text, and may fail: the text then reports the failure, so that the
    original error is still reported and not another error.
    """
    try:
        text = str(error)
    except BaseException as another:
        text = f"(its text cannot be printed: {type(another).__name__})"
    if len(text) > MOST_OF_A_TEXT:
        text = f"{text[:MOST_OF_A_TEXT]} ({len(text) - MOST_OF_A_TEXT:,} more characters)"
    return _writable(text)


def described(error: BaseException) -> str:
    """Return the class and text of an error: "ValueError: the shapes differ"."""
    return f"{type(error).__name__}: {text_of(error)}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or "nothing" for an empty text."""
    return (text_of(error).strip() or "nothing").split("\n")[0]


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an error, in characters that every file and message can contain."""
    return _writable("".join(traceback.format_exception(error)))


def _writable(text: str) -> str:
    """Return the text without lone surrogates, which Python allows and UTF-8 does not."""
    return text.encode("utf-8", "backslashreplace").decode()


class DureError(Exception):
    """Base of all errors that dure itself raises."""

    exit_code = 1


class StopRun(Exception):  # noqa: N818 - it says what is to be done, and nothing has gone wrong
    """Raised by a callback to end the run as at a limit; the trained model is saved."""


class CallbackFailedError(DureError):
    """A user's callback raised an error. The run ended, and its results are saved.

    run: the `Run`, complete up to the error; None if there is none.
    """

    run: Any = None

    def __init__(self, who: str, when: str, reason: str) -> None:
        super().__init__(
            f"the callback {who} failed {when}: {reason}. The run ended there; its results are "
            "kept in its folder, and as .run of this error"
        )


def can_be_pickled(error: DureError) -> bool:
    """Return whether the error can be pickled and unpickled in a process of the same program.

    A user's error class may have arguments that do not match its constructor, or may not be
    importable.
    """
    try:
        again = pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return type(again) is type(error)


class DataError(DureError):
    """A data file is missing or does not have the format that its name implies."""

    exit_code = 2


class RunFolderError(DureError):
    """A run folder cannot be used as requested: not empty, not a run, or damaged."""

    exit_code = 2


class RunFolderWriteError(RunFolderError):
    """A file of a run folder cannot be written, for example because the disk is full.

    The run has failed; its last checkpoint is complete.
    """

    exit_code = 1


class DamagedUpdateError(RunFolderError):
    """The file of an update is missing, or differs from the file that its client sent.

    The message names the file; if a server, a replay or a backup ends because of it, also the
    client and, if known, the round.
    """

    exit_code = 1


class StateError(DureError):
    """The folder of a client is in use by another process, is another client's, or is damaged.

    The message names the folder or the file.
    """

    exit_code = 2


class PolicyError(DureError, ValueError):
    """A client's `policy.toml` is unreadable or invalid, or refuses a request of the server."""

    exit_code = 2


class AuditError(DureError):
    """A log of data that left a client's machine was altered, or belongs to another process."""

    exit_code = 2


class AgreementError(DureError):
    """Two clients cannot agree on a key, or a message sealed by the other cannot be opened."""

    exit_code = 1


class ServeError(DureError):
    """A server cannot start, for example because its address or a file is unusable."""

    exit_code = 2


class LineageError(DureError):
    """A model is not the signed model, or was changed since."""

    exit_code = 1


class LossNotFiniteError(DureError):
    """The loss became NaN or infinite. The last good checkpoint is kept.

    `loss`: its value; `where`: the worker, such as "rank 1" or "client 17"; `when`: such as "step
    12" or "round 3". `intact`: whether the trained state is unchanged since before the step; it is
    then saved as a further checkpoint. `bad_values`: description of NaN or infinity in the training
    data; empty if the data were not searched, or contain none.
    """

    exit_code = 2
    bad_values: str = ""

    def __init__(self, loss: float, where: str, when: str, intact: bool = True) -> None:
        # All arguments: an exception is pickled by them, when a rank sends it to another process.
        super().__init__(loss, where, when, intact)
        self.loss = loss
        self.where = where
        self.when = when
        self.intact = intact

    def __str__(self) -> str:
        return f"the loss is {self.loss} at {self.when} on {self.where}: {self.advice}"

    @property
    def advice(self) -> str:
        """Remedies, as a sentence."""
        if self.bad_values:
            return f"the training data contain invalid values ({self.bad_values})"
        return "lower the learning rate, or look for invalid values in the data"


class CutNotANumberError(LossNotFiniteError):
    """A message across a cut of the model contains NaN. The last good checkpoint is kept.

    `what`: "activations" or "gradients"; `where`: the sender. Other attributes as in
    `LossNotFiniteError`.
    """

    def __init__(self, what: str, where: str, when: str, intact: bool = True) -> None:
        super().__init__(math.nan, where, when, intact)
        # The arguments from which another process unpickles the error.
        self.args = (what, where, when, intact)
        self.what = what

    def __str__(self) -> str:
        return f"{self.where} sends {self.what} with NaN at {self.when}: {self.advice}"


class GradientNotFiniteError(DureError):
    """Gradients in float16 are NaN or infinite however small the scale of the loss is.

    `where`: the worker.
    """

    exit_code = 2

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.where = where

    def __str__(self) -> str:
        return (
            f"the gradients on {self.where} are not finite in float16, with any scale of the loss: "
            "lower the learning rate, use precision bf16, or look for operations whose gradient is "
            "infinite"
        )


class WorkerFailedError(DureError):
    """The user's own code raised an error on a worker.

    `__cause__` is that error, if it could be transferred. `who`: "rank 1" or "client 17"; `step`:
    the step of the failure; `reason`: the error as text; `traceback`: its traceback, as text.
    """

    def __init__(self, who: str, step: str, reason: str, traceback: str = "") -> None:
        super().__init__(who, step, reason, traceback)
        self.who = who
        self.step = step
        self.reason = reason
        self.traceback = traceback

    def __str__(self) -> str:
        return f"{self.who} failed in {self.step}: {self.reason}"


class ExampleError(Exception):
    """The user's dataset raised an error for an example; `__cause__` is the error.

    Not a DureError: the code that runs the user's code turns it into a WorkerFailedError with the
    worker and the step, like any other error there.
    """


@contextmanager
def exit_is_a_failure(who: str, step: str) -> Iterator[None]:
    """Context manager: treat `sys.exit` in the user's own code, with any status, as a failure.

    Raises WorkerFailedError for `SystemExit` and for any other BaseException that is neither an
    Exception nor KeyboardInterrupt: the process must end neither silently nor with status 0. An
    error of the user's dataset (`ExampleError`) also becomes a WorkerFailedError.
    """
    try:
        yield
    except ExampleError as error:
        raise WorkerFailedError(who, step, described(error), traceback_of(error)) from error
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise WorkerFailedError(who, step, described(error), traceback_of(error)) from error


class MismatchError(DureError, RuntimeError):
    """Ranks made different collective calls where they should have made the same call.

    Every rank raises the same text. Also a RuntimeError, like the errors of torch.distributed.
    `operation`: the call, such as "call 17"; `calls`: (ranks, their call) for each different call.
    """

    def __init__(self, operation: str, calls: tuple[tuple[tuple[int, ...], str], ...]) -> None:
        super().__init__(operation, calls)
        self.operation = operation
        self.calls = calls

    def __str__(self) -> str:
        made = "; ".join(f"{_ranks(ranks)} called {call}" for ranks, call in self.calls)
        return f"the ranks disagree at {self.operation}: {made}"


class PeerLostError(DureError, RuntimeError):
    """A rank died or became silent while others waited for it.

    Also a RuntimeError, like the errors of torch.distributed. `ranks`: the lost ranks; `operation`
    and `step`: the operation in which the others waited; `reason`: "was killed by SIGKILL", "fell
    silent (nothing for 10 s)", …
    """

    def __init__(self, ranks: tuple[int, ...], operation: str, step: str, reason: str) -> None:
        super().__init__(ranks, operation, step, reason)
        self.ranks = ranks
        self.operation = operation
        self.step = step
        self.reason = reason

    def __str__(self) -> str:
        return f"{_ranks(self.ranks)} {self.reason}, during {self.operation} of {self.step}"


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


class CallError(ValueError, RuntimeError):
    """Invalid arguments of a collective call; nothing was sent.

    A ValueError like all wrong arguments, and a RuntimeError like the errors of torch.distributed.
    """


class CallTimeoutError(TimeoutError, RuntimeError):
    """A wait for a call has timed out. The call continues.

    Also a RuntimeError, like the errors of torch.distributed.
    """


class PlanError(DureError, ValueError):
    """Layers divided by a plan compute another function than the model; every rank raises it.

    Also a ValueError, because the plan is an argument.
    """

    exit_code = 2


class TooFewUpdatesError(DureError, ValueError):
    """An aggregation rule received too few updates, or no finite update."""


class TooFewClientsError(DureError):
    """Too few clients of a federation were present, or answered in time, to continue."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known name and the list."""
    known = list(known)
    # Compared without case, and shown with the original case.
    spelt = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower().replace("_", "-"), spelt, n=1)
    hint = f", did you mean {spelt[near[0]]!r}? There are: " if near else "; there are: "
    return hint + ", ".join(known)


def warn(text: str) -> None:
    """Warn with the location of the nearest calling line of the user's code."""
    # Frames of contextlib lie between the two when an ExitStack closes.
    passed = (__name__.partition(".")[0], "contextlib")
    frame = sys._getframe(1)
    level = 2
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] in passed:
        frame = frame.f_back
        level += 1
    warnings.warn(text, stacklevel=level)
