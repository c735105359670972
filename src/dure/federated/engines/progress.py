"""Progress of a training process, and its supervision.

    process     counts its steps (`ClientEngine.look`), and its finished jobs
    waiter      polls these numbers, and treats the process as hung if they stay the same for
                `deadline` seconds (`dure.machine.stall_timeout`)

A job as a whole may take any time. A process that was stopped, or that hangs in a step, counts as
hung; so does a process whose single step takes longer than the deadline, because the two look the
same from outside.

Cost: a number written per step.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from dure.federated.engines.job import ClientJob

DEADLINE = 60.0
"""Default of the seconds without a step after which a process counts as hung."""


class ProcessProgress:
    """Two counters in memory that forked processes share.

    The counters are the finished jobs of a chunk, and all steps so far.
    """

    def __init__(self) -> None:
        self._numbers = memoryview(mmap.mmap(-1, 16)).cast("q")

    def done(self, jobs: int) -> None:
        """Set the number of finished jobs of the chunk."""
        self._numbers[0] = jobs

    def step(self) -> None:
        """Count another step."""
        self._numbers[1] += 1

    @property
    def jobs(self) -> int:
        """Number of finished jobs of the chunk."""
        return self._numbers[0]

    def now(self) -> tuple[int, ...]:
        """Return the present numbers."""
        return tuple(self._numbers)


def hang_reason(deadline: float, stopped: bool) -> str:
    """Return why a process counts as hung, for messages."""
    if stopped:
        return f"the process that trained for it has been stopped for {deadline:g} s"
    return (
        f"the process that trained for it has made no step for {deadline:g} s: it hangs, or a "
        f"single step takes longer, and then a longer deadline helps"
    )


def work_of(jobs: Sequence[ClientJob], done: int, one_by_one: bool) -> tuple[str, str]:
    """Return (clients, round) that a process was working for, for errors.

    done: number of finished jobs; one_by_one: whether jobs run one after another.
    """
    if one_by_one:
        jobs = [jobs[min(done, len(jobs) - 1)]]
    clients = ", ".join(job.who for job in jobs)
    who = clients if len(jobs) == 1 else f"one of {clients}"
    return who, f"round {jobs[0].round + 1}"
