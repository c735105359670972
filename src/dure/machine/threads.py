"""How many threads a step deserves.

Threads share a step only through barriers, each of which costs microseconds on idle cores and
milliseconds on busy ones. Below `SMALL_STEP` floating-point operations that costs more than it
gains, so a small step gets one thread; evaluations, with their large batches, get all. The choice
depends on the model and the batch alone, not on a measurement: same seed, same bits.

Measured on two cores (a step of the digits MLP, 21 million operations; of the digits CNN, 390
million): one thread 0.8 and 13 ms, two threads 0.9 and 10 ms on idle cores, but 2.5 ms and more for
the MLP where others compute as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL_STEP = 100e6
"""Floating-point operations of a step below which it gets one thread."""


def threads_for(flops: float) -> int:
    """One thread if a step has fewer operations than `SMALL_STEP`, else as many as torch has."""
    return 1 if flops < SMALL_STEP else torch.get_num_threads()


def set_own_threads(count: int) -> None:
    """How many threads the operators of the calling thread use.

    OpenMP and MKL keep that number for every thread. torch also remembers it for threads that have
    not computed yet, which take it over at their first operation. So the calling thread must have
    had its first operation before, and a thread that starts others says its own number once more
    after they have called this.
    """
    torch.get_num_threads()  # counts as a first operation
    torch.set_num_threads(count)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """So many threads inside the block; None leaves them as they are."""
    if count is None or count == (before := torch.get_num_threads()):
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
