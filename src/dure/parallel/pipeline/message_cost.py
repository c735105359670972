"""Measured time of a message of a pipeline, beside the measured work of a stage on a micro-batch.

    compute    mean seconds of a computation: a forward, a backward, or one of its parts
    message    mean seconds in which a rank sends a message, plus its shortest wait for a message

A schedule divides the work of a step into smaller computations with a message between each other.
Where a message takes longer than a computation, more micro-batches and more stages a rank make the
step longer: the naive schedule, which sends fewest messages, may then be faster than interleaving.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class StepCosts(NamedTuple):
    """Seconds of a computation and of a message in a step; see the module."""

    compute: float
    message: float


def step_costs(
    computed: Sequence[float], sent: Sequence[float], waited: Sequence[float]
) -> StepCosts | None:
    """Return the costs of a step; None for a rank that computes or communicates nothing.

    Args:
        computed: seconds of each computation.
        sent: seconds of each send.
        waited: seconds of each wait for a message.
    """
    if not computed or not (sent or waited):
        return None
    sending = statistics.fmean(sent) if sent else 0.0
    return StepCosts(statistics.fmean(computed), sending + min(waited, default=0.0))


def cost_facts(steps: Sequence[StepCosts], microbatches: int) -> dict[str, Any] | None:
    """Return the medians over steps, as JSON; None without a step.

    The first step, which is slower than the others, counts only if there is no other.
    """
    later = steps[1:] or steps
    if not later:
        return None
    return {
        "compute": statistics.median(step.compute for step in later),
        "message": statistics.median(step.message for step in later),
        "microbatches": microbatches,
    }


def slow_message_note(facts: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a note if messages of a run take longer than the work between them; None if not.

    facts: the facts of each rank, with `cost_facts` as "step_costs". There is no note for a single
    stage a rank with a single micro-batch, which is the naive schedule.
    """
    # The facts may be from a damaged folder.
    costs = [one["step_costs"] for one in facts if isinstance(one.get("step_costs"), Mapping)]
    try:
        pairs = [(float(one["compute"]), float(one["message"])) for one in costs]
        microbatches = max((int(one["microbatches"]) for one in costs), default=1)
        stages = max((len(one.get("stages", ())) for one in facts), default=1)
    except (KeyError, TypeError, ValueError):
        return None
    if not pairs or (microbatches == 1 and stages == 1):
        return None
    compute = statistics.fmean(seconds for seconds, _ in pairs)
    message = statistics.fmean(seconds for _, seconds in pairs)
    if message <= compute:
        return None
    fewer = "fewer stages a rank, " if stages > 1 else ""
    return (
        f"a message takes {1000 * message:.3g} ms, but a stage computes a micro-batch in "
        f"{1000 * compute:.3g} ms: the overhead of messages exceeds the work, so the naive "
        f"schedule may be faster; take {fewer}fewer micro-batches, or larger layers or batches"
    )
