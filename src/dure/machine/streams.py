"""The standard streams of this process."""

from __future__ import annotations

import os
import select


def open_streams() -> None:
    """Open /dev/null for each of the descriptors 0, 1 and 2 that is closed.

    Otherwise the next file or socket would get the number of a closed descriptor, and printed text
    would go there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Mostly open gives this very number, the lowest that is free.
            os.dup2(os.open(os.devnull, os.O_RDWR), number)


def reader_is_gone(descriptor: int) -> bool:
    """Return whether the descriptor is a pipe without a reader."""
    looks = select.poll()
    looks.register(descriptor, 0)  # errors are always reported
    return any(event & select.POLLERR for _, event in looks.poll(0))
