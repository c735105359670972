"""Bubbles of real and of simulated pipelines, on more ranks than this machine has cores.

By default a stage waits 120 ms forward and 240 ms backward for a micro-batch, as a processor waits
while its accelerator computes. So ranks do not take each other's cores, and what is measured is the
schedule, the messages and the runtime. All stages of all schedules take equally long. Times are
medians over the rounds:

    measured     idle share of the ranks' time from the first action's start to the last one's end,
                 on any rank; in tables beside it, in brackets, idle over busy
    simulated    the simulator's, from the mean times of the same steps' actions, and of a message
    exact        the simulator's, of actions of 1 and 2 and messages that take no time. It equals
                 the formula if there is one: (p-1)/(m+p-1), with v stages a rank
                 (p-1)/(v m + p-1)

    python benchmarks/pipeline_bubble.py --page docs/pipeline.md \\
        --result benchmarks/results/pipeline_bubble.json

Progress and a table go to standard error, the result as JSON to standard output.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from outcome import give, takes_result
from pages import fill, table
from rounds import seconds_of_a_message, seconds_per_step
from torch import nn
from waiting import WIDTH, network

import dure
from dure.contracts.world import RankContext
from dure.parallel.mesh.mesh import Mesh
from dure.parallel.mesh.strategy import Parallel, ParallelLearner
from dure.parallel.pipeline.builders import make
from dure.parallel.pipeline.simulate import Times, simulate

JSON = dict[str, Any]
COMPUTES = ("forward", "backward", "input_gradient", "weight_gradient")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measured(
    learner: ParallelLearner, batch: int, rounds: int, context: RankContext, simulated: Any
) -> JSON:
    """The bubbles of some steps, and what the simulator makes of their actions."""
    indices = torch.arange(batch)

    def step() -> None:
        for parameter in learner.rank_state.parameters.values():
            parameter.grad = None
        learner.gradients(indices)

    rows = []
    for _ in range(rounds + 1):
        seconds = seconds_per_step(step, 1, context.group.process_group)
        (engine,) = learner._engines.values()
        spans = [
            (a.kind, a.stage, start, end) for a, start, end in engine.spans if a.kind in COMPUTES
        ]
        everybodys: list[Any] = [None] * context.group.size
        dist.all_gather_object(everybodys, spans)
        kept = list(chain.from_iterable(everybodys))
        busy = sum(end - start for _, _, start, end in kept)
        # the processes share a clock
        makespan = max(end for _, _, _, end in kept) - min(start for _, _, start, _ in kept)
        bubble = 1 - busy / (context.group.size * makespan)
        rows.append(
            {"seconds": seconds, "makespan": makespan, "measured": bubble, **simulated(kept)}
        )
    medians = {}
    for key in rows[0]:
        medians[key] = statistics.median(row[key] for row in rows[1:])
    return medians


def bubbles(
    schedule: str, microbatches: int, asked: argparse.Namespace, context: RankContext
) -> JSON:
    ranks = context.group.size
    per_rank = 2 if schedule == "interleaved" else 1
    stages = ranks * per_rank
    made = make(schedule, ranks, microbatches, per_rank)
    forward = asked.forward / 1e3
    backward = asked.backward / 1e3
    data = torch.utils.data.TensorDataset(
        torch.randn(microbatches, WIDTH), torch.randn(microbatches, WIDTH)
    )
    optimizer = partial(torch.optim.SGD, lr=0.1)
    task = dure.Task(
        partial(network, stages, forward, backward),
        nn.functional.mse_loss,
        data,
        optimizer=optimizer,
    )
    cut = tuple(str(stage) for stage in range(1, stages))
    strategy = Parallel(Mesh(pipeline=ranks), None, microbatches, schedule, per_rank, cut=cut)
    learner = ParallelLearner(task, context, 0, strategy)
    send = seconds_of_a_message(context.group, WIDTH)

    def simulated(spans: list[tuple[str, int, float, float]]) -> JSON:
        def mean(kind: str, stage: int) -> float:
            found = [end - start for k, s, start, end in spans if (k, s) == (kind, stage)]
            return statistics.fmean(found) if found else 0.0

        def means(kind: str) -> tuple[float, ...]:
            return tuple(mean(kind, stage) for stage in range(made.stages))

        times = Times(*map(means, COMPUTES), send=send)
        simulation = simulate(made, times)
        return {"simulated": simulation.bubble, "simulated_seconds": simulation.makespan}

    row = measured(learner, microbatches, asked.rounds, context, simulated)
    times = Times.uniform(stages, 1, 2)
    if schedule == "zero-bubble":  # the waiting is all in the input gradient
        times = Times(times.forward, times.backward, times.backward, (0.0,) * stages)
    return {**row, "exact": simulate(made, times).bubble}


def program(asked: argparse.Namespace, context: RankContext) -> list[JSON]:
    torch.set_num_threads(1)
    context.group.step = "a benchmark"
    rows = []
    for schedule in SCHEDULES:
        for microbatches in asked.microbatches:
            row = bubbles(schedule, microbatches, asked, context)
            rows.append(
                {
                    "ranks": context.group.size,
                    "schedule": schedule,
                    "microbatches": microbatches,
                    **row,
                }
            )
    return rows


def both(bubble: float) -> str:
    """Idle time as a share of all, and over the busy time."""
    return f"{bubble:.3f} ({bubble / (1 - bubble):.3f})"


def cells(rows: list[JSON]) -> str:
    head = [
        "ranks, schedule, micro-batches",
        "measured",
        "simulated",
        "exact",
        "measured over simulated",
    ]
    lines = []
    for row in rows:
        name = f"{row['ranks']}, {row['schedule']}, {row['microbatches']}"
        shares = [both(row[key]) for key in ("measured", "simulated", "exact")]
        lines.append([name, *shares, f"{row['measured'] / row['simulated']:.2f}"])
    return table(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--forward", type=float, default=120, metavar="MS")
    parser.add_argument("--backward", type=float, default=240, metavar="MS")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--page", type=Path, help="the page whose table is filled")
    takes_result(parser)
    asked = parser.parse_args()
    rows: list[JSON] = []
    for ranks in asked.ranks:
        rows += dure.Processes(ranks, deadline=120).run(partial(program, asked), lambda event: None)
    show(cells(rows))
    if asked.page is not None:
        fill(asked.page, {"bubbles": cells(rows)})
    setting = {"forward_ms": asked.forward, "backward_ms": asked.backward, "rounds": asked.rounds}
    give(
        {"benchmark": "pipeline_bubble", **setting, "torch": torch.__version__, "rows": rows},
        asked.result,
    )


if __name__ == "__main__":
    main()
