"""Descriptions of the exit status of a process, equal on all machines."""

from __future__ import annotations

import signal


def exit_description(status: int) -> str:
    """Return "exited with status 1" or "was killed by SIGKILL".

    status: exit status as Python reports it, negative for a signal.
    """
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal, which has no name
        return f"was killed by signal {-status}"
