"""Number of threads for a step.

Threads share a step only through barriers, each of which costs microseconds on idle cores and
milliseconds on busy cores. Below `SMALL_STEP` floating-point operations the barriers cost more than
the threads gain, so a small step gets a single thread; evaluations, with their large batches, get
all. The choice depends on the model and the batch alone, not on a measurement: same seed, same
bits.

Measured on two cores (a step of the digits MLP, 21 million operations; of the digits CNN, 390
million): a single thread 0.8 and 13 ms, two threads 0.9 and 10 ms on idle cores, but 2.5 ms and
more for the MLP if other processes compute as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL_STEP = 100e6
"""Floating-point operations of a step below which the step gets a single thread."""


def threads_for(flops: float) -> int:
    """Return 1 if a step has fewer operations than `SMALL_STEP`, else torch's number of threads."""
    return 1 if flops < SMALL_STEP else torch.get_num_threads()


def set_own_threads(count: int) -> None:
    """Set the number of threads for the operators of the calling thread.

    OpenMP and MKL keep the number for every thread. torch also stores it as the default for threads
    that have not computed yet, which adopt it at their first operation. So the calling thread must
    have run an operation before, and a thread that starts others sets its own number again after
    they have called this function.
    """
    torch.get_num_threads()  # counts as a first operation
    torch.set_num_threads(count)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Context manager: use `count` threads inside; None leaves the number unchanged."""
    if count is None or count == (before := torch.get_num_threads()):
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
