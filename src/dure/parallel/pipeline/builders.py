"""Builders of the known pipeline schedules.

For stages that take equal time and messages that take none, with p ranks and m micro-batches:

    schedule       stages a rank  idle over busy, x
    naive          1              p - 1, as m = 1
    gpipe          1              (p-1)/m
    1f1b           1              (p-1)/m
    interleaved    v              (p-1)/(v·m), if p divides m; else up to (p-1)/m
    zero-bubble    1              (p-1)(F+I-min(F,I,W))/(m(F+I+W)), if m ≥ p
                                  (2p-1-m)/(3m), if m < p and F = I = W
    zero-bubble-v  2              (p-1)/(6m) to (2p-3)/(6m), if m ≥ 2p and F = I = W

As a share of all time the idle time is x/(1+x): (p-1)/p for the naive schedule, whose single batch
passes through one rank after the other, and (p-1)/(m+p-1) for gpipe and 1f1b.

    schedule       most activations that a rank stores, of m micro-batches
    naive          1
    gpipe          m
    1f1b           p - rank
    interleaved    2(p-rank-1) + (v-1)p + 1, each a v-th of a rank's layers
    zero-bubble    p
    zero-bubble-v  2p, each half of a rank's layers

Sources: Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism"; Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training"
(1F1B), and 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
(interleaved); Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (ZB-H1), and 2024, "Pipeline
Parallelism with Controllable Memory" (V-shaped stages).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dure.parallel.pipeline.schedule import Action, ComputeActions, Schedule, with_transfers
from dure.parallel.pipeline.zero_bubble_v import v_shaped, zero_bubble_v
from dure.settings import suggestion


def _forwards(stage: int, microbatches: int) -> list[Action]:
    return [Action("forward", stage, number) for number in range(microbatches)]


def _backwards(stage: int, microbatches: int) -> list[Action]:
    return [Action("backward", stage, number) for number in range(microbatches)]


def _alternating(
    forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int
) -> list[Action]:
    """Return `warm_up` forwards, then forwards and backwards in turn, then the other backwards."""
    warm_up = min(warm_up, len(forwards))
    actions = list(forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        actions += [forward, backward]
    # a backward is left for each forward of the warm-up
    return [*actions, *backwards[len(forwards) - warm_up :]]


def gpipe(ranks: int, microbatches: int) -> ComputeActions:
    """Return GPipe: all forwards, then all backwards in reverse order of micro-batches."""
    return [
        [*_forwards(rank, microbatches), *reversed(_backwards(rank, microbatches))]
        for rank in range(ranks)
    ]


def one_f_one_b(ranks: int, microbatches: int) -> ComputeActions:
    """Return 1F1B: p - rank - 1 forwards to warm up, then a forward and a backward in turn.

    A rank stores at most p - rank activations.
    """
    return [
        _alternating(
            _forwards(rank, microbatches), _backwards(rank, microbatches), ranks - rank - 1
        )
        for rank in range(ranks)
    ]


def interleaved(ranks: int, microbatches: int, stages_per_rank: int) -> ComputeActions:
    """Return 1F1B with v stages a rank: stage s on rank s mod p, each for p micro-batches in turn.

    A rank warms up with 2(p-rank-1) + (v-1)p forwards. If p does not divide m, the schedule is that
    of the next multiple of p with the surplus micro-batches left out. A micro-batch depends only on
    its own actions, so no action waits for a surplus micro-batch. With v = 1 the schedule is 1F1B.
    """
    if stages_per_rank == 1:
        return one_f_one_b(ranks, microbatches)
    turns: list[tuple[int, int]] = []
    # The turns go up to a multiple of p; micro-batches that are too many are taken out below.
    for first in range(0, microbatches, ranks):
        for chunk in range(stages_per_rank):
            turns += [(chunk, number) for number in range(first, first + ranks)]
    computing = []
    for rank in range(ranks):
        forwards = [Action("forward", chunk * ranks + rank, number) for chunk, number in turns]
        backwards = [
            Action("backward", (stages_per_rank - 1 - chunk) * ranks + rank, number)
            for chunk, number in turns
        ]
        # Before a rank's first backward: two forwards for every later rank, and the forwards of p
        # micro-batches in each of its chunks except the last.
        actions = _alternating(
            forwards, backwards, 2 * (ranks - rank - 1) + (stages_per_rank - 1) * ranks
        )
        computing.append([action for action in actions if action.microbatch < microbatches])
    return computing


def zero_bubble(ranks: int, microbatches: int) -> ComputeActions:
    """Return ZB-H1: 1F1B with I in place of B, and each W `rank` micro-batches later.

    The gradient that the previous rank waits for leaves earlier by the time of W. The deferred W
    run at the end, while 1F1B is idle. Each rank stores p activations.
    """
    return [
        _with_weights_later(actions, delay=rank)
        for rank, actions in enumerate(one_f_one_b(ranks, microbatches))
    ]


def _with_weights_later(actions: Iterable[Action], delay: int) -> list[Action]:
    """Split each backward into I and W, and delay each W by `delay` micro-batches."""
    done: list[Action] = []
    # deferred weight gradients, oldest first
    left: list[Action] = []
    for action in actions:
        if action.kind != "backward":
            done.append(action)
            continue
        done.append(action._replace(kind="input_gradient"))
        left.append(action._replace(kind="weight_gradient"))
        if len(left) > delay:
            done.append(left.pop(0))
    return done + left


def round_robin(ranks: int, stages_per_rank: int = 1) -> tuple[int, ...]:
    """Return the rank of each of v·p stages: 0 … p-1, repeated v times."""
    return tuple(range(ranks)) * stages_per_rank


def in_order(home: Sequence[int], microbatches: int) -> Schedule:
    """Return a schedule with all forwards, then all backwards, for any placement of stages.

    home: the rank of each stage.
    """
    computing: list[list[Action]] = [[] for _ in range(max(home) + 1)]
    for stage, rank in enumerate(home):
        computing[rank] += _forwards(stage, microbatches)
    for stage, rank in reversed(list(enumerate(home))):
        computing[rank] += _backwards(stage, microbatches)
    return with_transfers("in-order", home, microbatches, computing)


def forward_only(home: Sequence[int], microbatches: int) -> Schedule:
    """Return a schedule of forwards alone, for evaluation.

    Among the forwards that are ready, a rank takes the forward of the latest stage.
    """
    order: list[Action] = []
    for stage in range(len(home)):
        order += _forwards(stage, microbatches)
    # Micro-batch m is in stage s at time m + s; at equal times the oldest micro-batch comes first.
    order.sort(key=lambda action: (action.stage + action.microbatch, action.microbatch))
    computing: list[list[Action]] = [[] for _ in range(max(home) + 1)]
    for action in order:
        computing[home[action.stage]].append(action)
    return with_transfers("forward-only", home, microbatches, computing)


SCHEDULES: dict[str, str] = {
    "naive": "the whole batch through one rank after the other",
    "gpipe": "all forwards, then all backwards; holds every micro-batch's activations",
    "1f1b": "forward and backward in turn; idle as GPipe, holds at most one micro-batch a rank",
    "interleaved": "1F1B with several stages a rank: less idle, more messages",
    "zero-bubble": "1F1B with the gradients of weights apart, where ranks would wait (ZB-H1)",
    "zero-bubble-v": "gradients apart, two stages a rank, down the ranks and up again (ZB-V)",
}
"""Schedules: name to summary."""

_ONE_STAGE: dict[str, Callable[[int, int], ComputeActions]] = {
    # with a single micro-batch GPipe is the naive schedule
    "naive": gpipe,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zero-bubble": zero_bubble,
}


def make(name: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """Return the schedule of that name, with transfers.

    Raises ValueError for an unknown name or for numbers that the schedule does not support.
    """
    if name not in SCHEDULES:
        raise ValueError(f"there is no schedule {name!r}{suggestion(name, SCHEDULES)}")
    for what, number in (
        ("ranks", ranks),
        ("microbatches", microbatches),
        ("stages_per_rank", stages_per_rank),
    ):
        if number < 1:
            raise ValueError(f"{what} is {number}: give 1 or more")
    if name == "naive" and microbatches != 1:
        raise ValueError(
            f"the naive schedule has one micro-batch, not {microbatches}: give 1, or use 'gpipe'"
        )
    if name == "zero-bubble-v" and stages_per_rank != 2:
        raise ValueError(
            f"zero-bubble-v has two stages a rank, not {stages_per_rank}: give stages_per_rank=2"
        )
    if name in _ONE_STAGE and stages_per_rank != 1:
        raise ValueError(
            f"{name} has one stage a rank, not {stages_per_rank}: give stages_per_rank=1, or use "
            "'interleaved'"
        )
    if name == "zero-bubble-v":
        return with_transfers(
            name, v_shaped(ranks), microbatches, zero_bubble_v(ranks, microbatches)
        )
    if name == "interleaved":
        computing = interleaved(ranks, microbatches, stages_per_rank)
        return with_transfers(name, round_robin(ranks, stages_per_rank), microbatches, computing)
    return with_transfers(
        name, round_robin(ranks), microbatches, _ONE_STAGE[name](ranks, microbatches)
    )
