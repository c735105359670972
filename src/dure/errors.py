"""What can go wrong, by name.

Wrong arguments are `ValueError`, as everywhere in Python. The rest are the classes below; each message says
what was wrong, where, and what to do. `exit_code` is what the command line answers with: 2 where the user's
input has to change, 1 where a run failed.
"""

from __future__ import annotations


class DureError(Exception):
    """Base of all errors that dure itself raises."""

    exit_code = 1


class DataError(DureError):
    """A data file is missing or is not what its name promises."""

    exit_code = 2


class RunFolderError(DureError):
    """A run folder cannot be used as asked: not empty, not a run, or damaged."""

    exit_code = 2


class LossNotFiniteError(DureError):
    """The loss became NaN or infinite. The last good checkpoint is kept.

    `loss`: its value; `where`: the worker, as "rank 1" or "client 17"; `when`: as "step 12" or "round 3".
    """

    exit_code = 2

    def __init__(self, loss: float, where: str, when: str) -> None:
        super().__init__(loss, where, when)
        self.loss, self.where, self.when = loss, where, when

    def __str__(self) -> str:
        return (
            f"the loss is {self.loss} at {self.when} on {self.where}: "
            "lower the learning rate, or look for bad values in the data"
        )


class WorkerFailedError(DureError):
    """The user's own code raised on a worker; `__cause__` is that error where it could be carried here.

    `who`: "rank 1" or "client 17"; `step`: what it worked on; `traceback`: its traceback, as text.
    """

    def __init__(self, who: str, step: str, reason: str, traceback: str = "") -> None:
        super().__init__(who, step, reason, traceback)
        self.who, self.step, self.reason, self.traceback = who, step, reason, traceback

    def __str__(self) -> str:
        return f"{self.who} failed in {self.step}: {self.reason}"


class PeerLostError(DureError):
    """A rank died or fell silent while others waited for it.

    `ranks`: the lost ranks; `operation` and `step`: what the others waited in; `reason`: "was killed by
    SIGKILL", "fell silent (nothing for 10 s)", …
    """

    def __init__(self, ranks: tuple[int, ...], operation: str, step: str, reason: str) -> None:
        super().__init__(ranks, operation, step, reason)
        self.ranks, self.operation, self.step, self.reason = ranks, operation, step, reason

    def __str__(self) -> str:
        names = "rank " + ", ".join(map(str, self.ranks)) if len(self.ranks) == 1 else f"ranks {list(self.ranks)}"
        return f"{names} {self.reason}, during {self.operation} of {self.step}"
