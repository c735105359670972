"""How far a process has come that trains for clients, and how long it is waited for.

    it          counts the steps that it has made (`Engine.look`), and the jobs that it has done
    who waits   looks at these numbers again and again, and gives the process up where they stay
                the same for `deadline` seconds (`dure.machine.patience`)

A job as a whole may take as long as it likes. A process that was stopped, or that hangs in a step,
is given up; so is one whose single step takes longer than the deadline, for nobody can tell the two
apart from outside.

Cost: a number written a step.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from dure.federated.engines.job import Job

DEADLINE = 60.0
"""Seconds without a step until a process is given up, where nobody says otherwise."""


class Progress:
    """Two numbers in memory that forked processes share: the jobs of a chunk that are done, and
    the steps that were ever made."""

    def __init__(self) -> None:
        self._numbers = memoryview(mmap.mmap(-1, 16)).cast("q")

    def done(self, jobs: int) -> None:
        """So many jobs of the chunk are done."""
        self._numbers[0] = jobs

    def step(self) -> None:
        """Another step begins."""
        self._numbers[1] += 1

    @property
    def jobs(self) -> int:
        """How many jobs of its chunk are done."""
        return self._numbers[0]

    def now(self) -> tuple[int, ...]:
        """The numbers as they are."""
        return tuple(self._numbers)


def silent(deadline: float, stopped: bool) -> str:
    """Why a process was given up, for people."""
    if stopped:
        return f"the process that trained for it has been stopped for {deadline:g} s"
    return (
        f"the process that trained for it has made no step for {deadline:g} s: it hangs, or a "
        f"single step takes longer, and then a longer deadline helps"
    )


def named(jobs: Sequence[Job], done: int, one_by_one: bool) -> tuple[str, str]:
    """Whose work it is that a process was at, and when, for errors.

    done: how many of the jobs were done; one_by_one: whether they are done one after another.
    """
    if one_by_one:
        jobs = [jobs[min(done, len(jobs) - 1)]]
    clients = ", ".join(job.who for job in jobs)
    who = clients if len(jobs) == 1 else f"one of {clients}"
    return who, f"round {jobs[0].round + 1}"
