"""ZB-V: two stages a rank, down the ranks and up again, with separate gradients of weights.

A rank stores at most 2p activations, each of half its layers. It is idle for about (p-1)/(6m) of
its work if forward, input gradient and weight gradient take equal time (`V_TIMES` for other times).

Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (V-shaped stages).
"""

from __future__ import annotations

from heapq import heappop, heappush

from dure.parallel.pipeline.schedule import Action, ComputeActions, Kind

V_TIMES: dict[Kind, int] = {"forward": 5, "input_gradient": 6, "weight_gradient": 4}
"""Times of actions for which `zero_bubble_v` is built. They are close to those of a transformer's
layer, whose attention has gradients of inputs alone. With these times the schedule is idle for at
most 12 (p-1) of 30 m + 12 (p-1). A schedule built for equal times would be idle for a tenth of the
time on two ranks, for any number of micro-batches. If the actions do take equal time, the schedule
takes 6 m + p - 1 of their times if p ≤ 2, and up to p - 2 more otherwise (p ≤ 8, m ≥ 2p).
"""

_Counts = dict[Kind, list[int]]


def v_shaped(ranks: int) -> tuple[int, ...]:
    """Return the rank of each of 2p stages: 0 … p-1, p-1 … 0."""
    return (*range(ranks), *reversed(range(ranks)))


def zero_bubble_v(ranks: int, microbatches: int) -> ComputeActions:
    """Return ZB-V: two stages a rank, down the ranks and up again; at most 2p activations a rank.

    The schedule is the result of a simulation in which actions take `V_TIMES`. A free rank takes
    the first possible action in this order: forward and input gradient of its second stage, forward
    and input gradient of its first stage, a weight gradient. The first stage leaves one of the
    rank's 2p slots for activations free. So there is no deadlock: the second stage of the oldest
    unfinished micro-batch always finds a slot, after the weight gradients of older micro-batches,
    which wait for no other rank.
    """
    # For each kind of action: the number of micro-batches that each stage has begun and finished.
    begun: _Counts = {kind: [0] * 2 * ranks for kind in V_TIMES}
    done: _Counts = {kind: [0] * 2 * ranks for kind in V_TIMES}
    computing: list[list[Action]] = [[] for _ in range(ranks)]
    # Actions in progress: time of the end, rank, kind, stage.
    ends: list[tuple[int, int, Kind, int]] = []
    free = set(range(ranks))
    clock = 0
    while min(done["weight_gradient"]) < microbatches:
        # sorted, so that all ranks make the same lists
        for rank in sorted(free):
            for kind, stage in _wishes(rank, ranks):
                left = begun[kind][stage] < microbatches
                if left and _is_ready(kind, stage, ranks, begun=begun, done=done):
                    computing[rank].append(Action(kind, stage, begun[kind][stage]))
                    begun[kind][stage] += 1
                    heappush(ends, (clock + V_TIMES[kind], rank, kind, stage))
                    free.discard(rank)
                    break
        # Advance to the next end of an action, and finish all actions that end at that time.
        clock = ends[0][0]
        while ends and ends[0][0] == clock:
            _, rank, kind, stage = heappop(ends)
            done[kind][stage] += 1
            free.add(rank)
    return computing


def _wishes(rank: int, ranks: int) -> list[tuple[Kind, int]]:
    """Return the kinds of actions and stages that a rank tries, the most urgent first."""
    first = rank
    second = 2 * ranks - 1 - rank
    return [
        ("forward", second),
        ("input_gradient", second),
        ("forward", first),
        ("input_gradient", first),
        ("weight_gradient", first),
        ("weight_gradient", second),
    ]


def _is_ready(kind: Kind, stage: int, ranks: int, begun: _Counts, done: _Counts) -> bool:
    """Return whether the next action of a kind in a stage of a V may begin."""
    number = begun[kind][stage]
    last = 2 * ranks - 1
    # A weight gradient needs its own input gradient, and waits for no other rank.
    if kind == "weight_gradient":
        return done["input_gradient"][stage] > number
    if kind == "input_gradient":
        after = stage == last or done["input_gradient"][stage + 1] > number
        return after and done["forward"][stage] > number
    # Activations that the rank stores for both of its stages; the first stage leaves a slot free,
    # so that the second can always continue.
    held = sum(
        begun["forward"][own] - done["weight_gradient"][own] for own in (stage, last - stage)
    )
    room = held < 2 * ranks - (stage < ranks)
    return room and (stage == 0 or done["forward"][stage - 1] > number)
