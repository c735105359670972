"""torch.distributed backends that carry the messages of a job's ranks.

gloo sends through sockets, also between machines. The backend dure stays within one machine: its
ranks share memory.
"""

from __future__ import annotations

import threading
from typing import Literal, get_args

Backend = Literal["gloo", "dure"]


def check_deadline(seconds: float) -> None:
    """Check a timeout in seconds. Raises ValueError unless a thread can wait that long."""
    if not 0 < seconds <= threading.TIMEOUT_MAX:  # refuses NaN too
        raise ValueError(
            f"deadline is {seconds} s, but it has to be above 0 and at most "
            f"{threading.TIMEOUT_MAX:.0f} s"
        )


def check_backend(name: str) -> None:
    """Check the name of a backend. Raises ValueError for an unknown name."""
    if name not in get_args(Backend):
        raise ValueError(f"there is no backend {name!r}: choose {' or '.join(get_args(Backend))}")
