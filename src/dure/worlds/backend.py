"""Which torch.distributed backend carries what the ranks of a job send.

gloo goes through sockets, between machines too. dure stays within one machine: its ranks share
memory.
"""

from __future__ import annotations

import threading
from typing import Literal, get_args

Backend = Literal["gloo", "dure"]


def check_deadline(seconds: float) -> None:
    """Raises ValueError for what is no time that a rank can wait."""
    if not 0 < seconds <= threading.TIMEOUT_MAX:  # NaN is not either
        raise ValueError(
            f"deadline is {seconds} s, but it is above 0 and at most {threading.TIMEOUT_MAX:.0f} s"
        )


def check_backend(name: str) -> None:
    """Raises ValueError if there is no backend called `name`."""
    if name not in get_args(Backend):
        raise ValueError(f"there is no backend {name!r}: it is {' or '.join(get_args(Backend))}")
