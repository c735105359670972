"""ZB-V: two stages a rank, down the ranks and up again, and the gradients of weights apart.

A rank holds at most 2p activations of half a stage each, and is idle for about (p-1)/(6m) of its
work where forward, input gradient and weight gradient take equally long (`V_TIMES` for other
times).

Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (V-shaped stages).
"""

from __future__ import annotations

from heapq import heappop, heappush

from dure.parallel.pipeline.schedule import Action, Computing, Kind

V_TIMES: dict[Kind, int] = {"forward": 5, "input_gradient": 6, "weight_gradient": 4}
"""What `zero_bubble_v` is made for, since a layer of a transformer takes about that: its attention
has gradients of inputs alone. With these it is idle for at most 12 (p-1) of 30 m + 12 (p-1); made
for actions that take equally long it would be idle for a tenth of the time on two ranks, however
many micro-batches there are. Where they do take equally long it takes 6 m + p - 1 of their times if
p ≤ 2, and up to p - 2 more otherwise (p ≤ 8, m ≥ 2p)."""

_Counts = dict[Kind, list[int]]


def v_shaped(ranks: int) -> tuple[int, ...]:
    """Homes of 2p stages: 0 … p-1, p-1 … 0."""
    return (*range(ranks), *reversed(range(ranks)))


def zero_bubble_v(ranks: int, microbatches: int) -> Computing:
    """Two stages a rank, down the ranks and up again (ZB-V); a rank holds at most 2p activations.

    Made by a simulation in which actions take `V_TIMES` and a free rank takes what it can, in this
    order: forward and input gradient of its second stage, forward and input gradient of its first,
    a weight gradient. Of the places for activations the first stage leaves one free. So nothing
    deadlocks: the second stage of the oldest micro-batch that is not done always finds a place,
    once the weight gradients of older ones, which wait for nobody, are there.
    """
    # For each kind of action: how many micro-batches each stage has begun, and has done.
    begun: _Counts = {kind: [0] * 2 * ranks for kind in V_TIMES}
    done: _Counts = {kind: [0] * 2 * ranks for kind in V_TIMES}
    computing: list[list[Action]] = [[] for _ in range(ranks)]
    # What is under way: when it ends, on which rank, of which kind, in which stage.
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
        # On to the next moment at which something ends, and all that ends with it.
        clock = ends[0][0]
        while ends and ends[0][0] == clock:
            _, rank, kind, stage = heappop(ends)
            done[kind][stage] += 1
            free.add(rank)
    return computing


def _wishes(rank: int, ranks: int) -> list[tuple[Kind, int]]:
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
    """Whether the next action of a kind in a stage of a V may begin."""
    number = begun[kind][stage]
    last = 2 * ranks - 1
    # It needs its own input gradient, and waits for no other rank.
    if kind == "weight_gradient":
        return done["input_gradient"][stage] > number
    if kind == "input_gradient":
        after = stage == last or done["input_gradient"][stage + 1] > number
        return after and done["forward"][stage] > number
    # Activations that the rank holds, of both of its stages; the first leaves one place free.
    held = sum(
        begun["forward"][own] - done["weight_gradient"][own] for own in (stage, last - stage)
    )
    room = held < 2 * ranks - (stage < ranks)
    return room and (stage == 0 or done["forward"][stage - 1] > number)
