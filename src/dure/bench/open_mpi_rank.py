"""A rank of Open MPI in the benchmark; mpirun starts this file as a script.

The script loads neither dure nor torch. It connects to the Unix socket named on its command line,
executes an order for each line of JSON, and answers with a line. Between two lines it is blocked in
a read, so that it takes no core from the contender whose turn it is.
"""

from __future__ import annotations

import json
import resource
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

PERIOD = 1024
"""Period of the contents in elements; contest.py has the same value."""


def cpu_seconds() -> float:
    """Return the CPU seconds of this process so far, including kernel time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class MpiRank:
    """Orders that the benchmark may send to a rank: a method for each."""

    def __init__(self) -> None:
        self.world = MPI.COMM_WORLD
        self.buffer: Any = np.empty(0, np.float32)

    def prepare(self, elements: int) -> dict[str, Any]:
        """Allocate the buffer of a size."""
        self.buffer = np.zeros(elements, np.float32)
        self.buffer[:] = 0.0  # so that the pages are there
        return {}

    def check(self) -> dict[str, Any]:
        """Return whether the sum over all ranks is correct."""
        ranks = self.world.size
        n = self.buffer.size
        pattern = np.arange(PERIOD, dtype=np.float32)
        self.buffer[:] = np.resize(pattern + self.world.rank, n)
        self.reduce()
        # The sum over all ranks r of pattern + r; whole numbers, so that it is exact.
        sums = ranks * pattern + ranks * (ranks - 1) // 2
        right = bool(np.array_equal(self.buffer, np.resize(sums, n)))
        # Zeros stay zeros in all timed calls.
        self.buffer[:] = 0.0
        return {"right": right}

    def time(self, calls: int, warm: bool) -> dict[str, Any]:
        """Return seconds and CPU seconds on this rank. warm: after an untimed call."""
        if warm:
            self.reduce()
        # All ranks begin together; the barrier itself is not timed.
        self.world.Barrier()
        cpu = cpu_seconds()
        begin = time.perf_counter()
        for _ in range(calls):
            self.reduce()
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "cpu": cpu_seconds() - cpu}

    def reduce(self) -> None:
        """Execute the measured call."""
        self.world.Allreduce(MPI.IN_PLACE, self.buffer, op=MPI.SUM)


def main() -> None:
    """Execute orders until the socket is closed."""
    rank = MpiRank()
    deeds: dict[str, Callable[..., dict[str, Any]]] = {
        "prepare": rank.prepare,
        "check": rank.check,
        "time": rank.time,
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[1])
        stream = connection.makefile("rw")

        def say(answer: dict[str, Any]) -> None:
            stream.write(json.dumps(answer) + "\n")
            stream.flush()

        say({"rank": rank.world.rank, "version": MPI.Get_library_version()})
        for line in stream:
            order = json.loads(line)
            say(deeds[order.pop("do")](**order))


if __name__ == "__main__":
    main()
