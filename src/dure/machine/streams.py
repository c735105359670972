"""The standard streams of this process."""

from __future__ import annotations

import os
import select


def open_streams() -> None:
    """Opens /dev/null for those of the descriptors 0, 1 and 2 that are closed.

    The next file or socket would get the number of a closed one, and what is printed would go
    there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Mostly open gives this very number, the lowest that is free.
            os.dup2(os.open(os.devnull, os.O_RDWR), number)


def nobody_reads(descriptor: int) -> bool:
    """Whether it is a pipe whose reader is gone."""
    looks = select.poll()
    looks.register(descriptor, 0)  # errors are told unasked
    return any(event & select.POLLERR for _, event in looks.poll(0))
