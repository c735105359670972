"""What can go wrong, by name.

Wrong arguments are `ValueError`, as everywhere in Python. The rest are the classes below; each
message says what was wrong, where, and what to do. `exit_code` is what the command line answers
with: 2 where the user's input has to change, 1 where a run failed.
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
"""Signs of an error's text that are told: it may be as long as its class likes."""


def text_of(error: BaseException) -> str:
    """What an error says, in signs that every file and message can hold.

    A class of a user's own makes its text, and may fail in that: then the text says so, so that the
    error itself is told and not another one.
    """
    try:
        text = str(error)
    except BaseException as another:
        text = f"(its text cannot be printed: {type(another).__name__})"
    if len(text) > MOST_OF_A_TEXT:
        text = f"{text[:MOST_OF_A_TEXT]} ({len(text) - MOST_OF_A_TEXT:,} more signs)"
    return _writable(text)


def described(error: BaseException) -> str:
    """An error as its class and what it says: "ValueError: the shapes differ"."""
    return f"{type(error).__name__}: {text_of(error)}"


def first_line(error: BaseException) -> str:
    """The first line of what an error says; "nothing" where it says nothing."""
    return (text_of(error).strip() or "nothing").split("\n")[0]


def traceback_of(error: BaseException) -> str:
    """The traceback of an error, as text that every file and message can hold."""
    return _writable("".join(traceback.format_exception(error)))


def _writable(text: str) -> str:
    """The text without halves of signs, which Python allows and UTF-8 does not."""
    return text.encode("utf-8", "backslashreplace").decode()


class DureError(Exception):
    """Base of all errors that dure itself raises."""

    exit_code = 1


class StopRun(Exception):  # noqa: N818 - it says what is to be done, and nothing has gone wrong
    """Raised by a callback: the run is to end as at a limit, with all that it has learned."""


class CallbackFailedError(DureError):
    """A callback of the user's raised an error. The run was ended, and is kept.

    run: the `Run`, which is whole up to then; None where there is none.
    """

    run: Any = None

    def __init__(self, who: str, when: str, reason: str) -> None:
        super().__init__(
            f"the callback {who} failed {when}: {reason}. The run ended there, and what it has "
            f"learned is kept: in its folder, and as .run of this error"
        )


def travels(error: DureError) -> bool:
    """Whether a process of the same program makes the same error of its pickle.

    One of a user's own class may have arguments that are no such, or a class that is found nowhere.
    """
    try:
        again = pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return type(again) is type(error)


class DataError(DureError):
    """A data file is missing or is not what its name promises."""

    exit_code = 2


class RunFolderError(DureError):
    """A run folder cannot be used as asked: not empty, not a run, or damaged."""

    exit_code = 2


class RunFolderWriteError(RunFolderError):
    """A file of a run folder cannot be written: the disk is full, say.

    The run has failed; its last checkpoint is whole.
    """

    exit_code = 1


class DamagedUpdateError(RunFolderError):
    """The file of an update is missing, or is not the one that its client has sent.

    The message names the file; where a server, a replay or a backup ends by it, also the client,
    and the round where it is known.
    """

    exit_code = 1


class StateError(DureError):
    """The folder of a client cannot be used: another process has it, it is another's, or damaged.

    The message names the folder or the file.
    """

    exit_code = 2


class PolicyError(DureError, ValueError):
    """`policy.toml` of a client cannot be read or makes no sense, or a server asks for what the
    site has not agreed to."""

    exit_code = 2


class AuditError(DureError):
    """A log of what left a client's machine is not as it was written, or is another process's."""

    exit_code = 2


class AgreementError(DureError):
    """Two clients cannot agree on a key, or what one has sealed for the other does not open."""

    exit_code = 1


class ServeError(DureError):
    """A server cannot begin: its address is taken, say, or a file of its own will not do."""

    exit_code = 2


class LineageError(DureError):
    """A model is not the one that was signed, or not as it was."""

    exit_code = 1


class LossNotFiniteError(DureError):
    """The loss became NaN or infinite. The last good checkpoint is kept.

    `loss`: its value; `where`: the worker, such as "rank 1" or "client 17"; `when`: such as
    "step 12" or "round 3". `intact`: whether what was being trained is still as it was before,
    which is then kept as one more checkpoint. `bad_values`: where the training data hold NaN or
    infinity, in words; empty where they were not looked through, or hold none.
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
            return f"the training data have bad values ({self.bad_values})"
        return "lower the learning rate, or look for bad values in the data"


class CutNotANumberError(LossNotFiniteError):
    """What crosses a cut of the model has NaN. The last good checkpoint is kept.

    `what`: "activations" or "gradients"; `where`: who has sent them. The rest as in
    `LossNotFiniteError`.
    """

    def __init__(self, what: str, where: str, when: str, intact: bool = True) -> None:
        super().__init__(math.nan, where, when, intact)
        # What it is made of again in another process.
        self.args = (what, where, when, intact)
        self.what = what

    def __str__(self) -> str:
        return f"{self.where} sends {self.what} with NaN at {self.when}: {self.advice}"


class WorkerFailedError(DureError):
    """The user's own code raised on a worker.

    `__cause__` is that error, where it could be carried here. `who`: "rank 1" or "client 17";
    `step`: what it worked on; `traceback`: its traceback, as text.
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
    """The user's dataset has raised where an example was asked for; `__cause__` is its error.

    No DureError: whoever runs the user's code makes a WorkerFailedError of it, as of any other
    error there, with the worker and the step.
    """


@contextmanager
def exit_is_a_failure(who: str, step: str) -> Iterator[None]:
    """`sys.exit` in the user's own code, with whatever status, is a failure like any other.

    Raises WorkerFailedError for it, and for whatever else is no Exception but Ctrl-C: the process
    is to end neither silently nor with status 0. So it does for a dataset that raises, which is one
    kind of error wherever it is read.
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
    """Ranks that should have made the same collective call made different ones.

    Every rank raises the same text.

    A RuntimeError too, as torch.distributed's own errors are. `operation`: the call, such as
    "call 17"; `calls`: (ranks, what they called) for each different call.
    """

    def __init__(self, operation: str, calls: tuple[tuple[tuple[int, ...], str], ...]) -> None:
        super().__init__(operation, calls)
        self.operation = operation
        self.calls = calls

    def __str__(self) -> str:
        made = "; ".join(f"{_ranks(ranks)} called {call}" for ranks, call in self.calls)
        return f"the ranks disagree at {self.operation}: {made}"


class PeerLostError(DureError, RuntimeError):
    """A rank died or fell silent while others waited for it.

    A RuntimeError too, as torch.distributed's own are.

    `ranks`: the lost ranks; `operation` and `step`: what the others waited in; `reason`: "was
    killed by SIGKILL", "fell silent (nothing for 10 s)", …
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
    """Arguments with which a collective call cannot be made; nothing has travelled.

    A ValueError as all wrong arguments are, and a RuntimeError as torch.distributed's own are.
    """


class CallTimeoutError(TimeoutError, RuntimeError):
    """A call was waited for, and it was not over in time. It goes on.

    A RuntimeError too, as torch.distributed's own are.
    """


class PlanError(DureError, ValueError):
    """Layers that a plan divides compute something else than the model; every rank raises it.

    A ValueError too: the plan is an argument.
    """

    exit_code = 2


class TooFewUpdatesError(DureError, ValueError):
    """A federation's rule was given too few updates, or none that is finite."""


class TooFewClientsError(DureError):
    """Too few clients of a federation were there, or answered in time, for it to go on."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, if any, and the list."""
    known = list(known)
    # Compared without case, and shown as it is written.
    spelt = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower().replace("_", "-"), spelt, n=1)
    hint = f", did you mean {spelt[near[0]]!r}? There are: " if near else "; there are: "
    return hint + ", ".join(known)


def warn(text: str) -> None:
    """Warns at the line of the user's that led here, and not at one of dure's."""
    # Where something is closed in the end, Python's own stack of what is to be closed lies between.
    passed = (__name__.partition(".")[0], "contextlib")
    frame = sys._getframe(1)
    level = 2
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] in passed:
        frame = frame.f_back
        level += 1
    warnings.warn(text, stacklevel=level)
