"""Sentences of torch that callers search in an error's text, added to dure's texts.

Scripts, and torch's own tests, recognise a timeout, and a rank that is missing at a monitored
barrier, by gloo's texts:

    Timed out waiting 60000ms
    [Rank 0]: Rank 1 failed to pass monitoredBarrier in 60000 ms        rank 0, of the first one
    [Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 60000 ms    with wait_all_ranks
    Rank 0 timed out in monitoredBarrier after 0 ms.                    without any time
    Rank 2 successfully reached monitoredBarrier, but received errors …     every other rank

Ranks are ranks of the group. Source: `ProcessGroupGloo::monitoredBarrier` of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence

from dure.errors import PeerLostError


def timed_out(seconds: float) -> str:
    """Return the end of a sentence about a call that timed out."""
    return f"the call timed out (in gloo's words: Timed out waiting {_milliseconds(seconds)}ms)"


def not_in_time(seconds: float) -> str:
    """Return the reason of an error for ranks that did not arrive in time."""
    return f"did not come within {seconds:g} s: {timed_out(seconds)}"


def at_monitored_barrier(
    loss: PeerLostError, rank: int, names: Sequence[int], seconds: float, wait_all_ranks: bool
) -> PeerLostError:
    """Return the error of a monitored barrier, with torch's text.

    Args:
        loss: the original error.
        rank: this rank in the group.
        names: names of the group's ranks in errors.
        seconds: timeout of the barrier.
        wait_all_ranks: whether the text names all missing ranks.
    """
    missing = [number for number, name in enumerate(names) if name in loss.ranks]
    text = _monitored(rank, missing, seconds, wait_all_ranks)
    return PeerLostError(loss.ranks, loss.operation, loss.step, f"{loss.reason} ({text})")


def _monitored(rank: int, missing: Sequence[int], seconds: float, wait_all_ranks: bool) -> str:
    if rank != 0 or not missing:
        return (
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting "
            f"for send/recv from rank 0. Please check rank 0 logs for faulty rank."
        )
    limit = _milliseconds(seconds)
    if wait_all_ranks:
        which = f"Ranks {', '.join(map(str, missing))}"
        return f"[Rank 0]: {which} failed to pass monitoredBarrier in {limit} ms"
    if not limit:
        return (
            f"Rank 0 timed out in monitoredBarrier after {limit} ms.\n"
            f"No ranks successfully processed in monitoredBarrier."
        )
    return f"[Rank 0]: Rank {missing[0]} failed to pass monitoredBarrier in {limit} ms"


def _milliseconds(seconds: float) -> int:
    return round(1000 * seconds)
