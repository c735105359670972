"""Measured time of a message of a pipeline, beside the measured work of a stage on a micro-batch.

    compute    mean seconds of a computation: a forward, a backward, or one of its parts
    step       seconds of a step on a rank
    message    (step - simulated) / messages: the time by which a message makes the step longer

*simulated* is the duration of the same schedule with the measured computations and with messages
that take no time (`dure.parallel.pipeline.simulate`), and *messages* is the largest number of
messages that a rank receives. So the time of a message contains the copies, the wake-up of the
receiver, and what a rank waits for because others are late.

A schedule divides the work of a step into smaller computations with a message between each other.
Where a message takes longer than a computation, more micro-batches and more stages a rank make the
step longer: the naive schedule, which sends fewest messages, may then be faster than interleaving.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class StepCosts(NamedTuple):
    """Times of a rank's step in seconds; messages: number of messages that the rank received."""

    compute: float
    step: float
    messages: int


class MessageCost(NamedTuple):
    """Mean seconds of a computation of a stage on a micro-batch, and of a message."""

    compute: float
    message: float


def cost_facts(steps: Sequence[StepCosts]) -> dict[str, Any] | None:
    """Return the medians over steps, as JSON; None without a step.

    The first step, which is slower than the others, counts only if there is no other.
    """
    later = steps[1:] or steps
    if not later:
        return None
    return {
        "compute": statistics.median(one.compute for one in later),
        "step": statistics.median(one.step for one in later),
        "messages": max(one.messages for one in later),
    }


def message_cost(facts: Sequence[Mapping[str, Any]]) -> MessageCost | None:
    """Return the cost of a message in a run; None without messages or without measurements.

    facts: the facts of each rank, with `cost_facts` as "step_costs". They may be from a damaged
    folder. In a mesh, the first pipeline counts.
    """
    # Both load torch, which facts without a pipeline do not need.
    if len(facts) < 2 or "schedule" not in facts[0]:
        return None
    from dure.parallel.pipeline.schedule import Schedule
    from dure.parallel.pipeline.simulate import Times, simulate

    try:
        schedule = Schedule.parse(facts[0]["schedule"])
        own = [one for one in facts if not (one["at"]["data"] or one["at"]["tensor"])]
        own.sort(key=lambda one: one["at"]["pipeline"])
        costs = [StepCosts(**one["step_costs"]) for one in own]
        messages = max(one.messages for one in costs)
        if len(costs) != schedule.ranks or messages < 1:
            return None
        seconds = tuple(float(costs[rank].compute) for rank in schedule.home)
        times = Times(seconds, seconds, seconds, seconds)
        excess = max(float(one.step) for one in costs) - simulate(schedule, times).makespan
        compute = statistics.fmean(seconds)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return MessageCost(compute, max(0.0, excess) / messages)


def slow_message_note(facts: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a note if messages of a run take longer than the work between them; None if not.

    There is no note for a single stage a rank with a single micro-batch: the naive schedule.
    """
    cost = message_cost(facts)
    if cost is None or cost.message <= cost.compute:
        return None
    from dure.parallel.pipeline.schedule import Schedule

    schedule = Schedule.parse(facts[0]["schedule"])
    interleaves = schedule.stages > schedule.ranks
    if schedule.microbatches == 1 and not interleaves:
        return None
    fewer = "fewer stages a rank, " if interleaves else ""
    return (
        f"a message adds {1000 * cost.message:.3g} ms to a step, but a stage computes a "
        f"micro-batch in {1000 * cost.compute:.3g} ms: the overhead of messages exceeds the work, so the "
        f"naive schedule may be faster; take {fewer}fewer micro-batches, or larger layers or batches"
    )
