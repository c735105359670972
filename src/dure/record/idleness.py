"""Idle time of workers, in the two forms used by papers.

    idle share       = idle / (busy + idle)    (N-1)/N for one batch that passes through N ranks
    idle over busy   = idle / busy             (N-1) for it; (p-1)/m for m micro-batches, p stages

Busy is the time of computing or transferring. The forms are equivalent: over = share / (1 - share).
"""

from __future__ import annotations


def idle_share(busy: float, idle: float) -> float | None:
    """Return the idle share of all time. busy, idle: seconds. None if both are 0."""
    return idle / (busy + idle) if busy + idle > 0 else None


def over_busy(share: float | None) -> float | None:
    """Return idle over busy time for an idle share; None without busy time, or for None."""
    return share / (1 - share) if share is not None and share < 1 else None


def written(share: float | None) -> str:
    """Return both forms as text, as in tables: 50 % (1.00)."""
    return "–" if share is None else f"{100 * share:.0f} % ({written_ratio(share)})"


def written_ratio(share: float | None) -> str:
    """Return idle over busy time as text, 1.00 for a share of 50 %."""
    over = over_busy(share)
    if over is not None:
        return f"{over:.2f}"
    return "–" if share is None else "∞"
