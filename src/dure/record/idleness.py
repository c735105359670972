"""How long workers had nothing to do, in the two ways in which papers say it.

    idle share       = idle / (busy + idle)    (N-1)/N for one batch that passes through N ranks
    idle over busy   = idle / busy             (N-1) for it; (p-1)/m for m micro-batches, p stages

Busy is to compute, or to transfer. One follows from the other: over = share / (1 - share).
"""

from __future__ import annotations


def idle_share(busy: float, idle: float) -> float | None:
    """Of all the time. busy, idle: seconds. None where no time is known."""
    return idle / (busy + idle) if busy + idle > 0 else None


def over_busy(share: float | None) -> float | None:
    """The same time over that of being busy; None where nobody was busy, or nothing is known."""
    return share / (1 - share) if share is not None and share < 1 else None


def written(share: float | None) -> str:
    """Both, as tables show them: 50 % (1.00)."""
    if share is None:
        return "–"
    over = over_busy(share)
    return f"{100 * share:.0f} % ({'∞' if over is None else f'{over:.2f}'})"
