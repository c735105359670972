"""How a process of this machine ended, in words that are the same everywhere."""

from __future__ import annotations

import signal


def how_it_ended(status: int) -> str:
    """Of an exit status as Python has it, negative for a signal: "was killed by SIGKILL"."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal, which has no name
        return f"was killed by signal {-status}"
