"""What interleaving gives and what it costs: v = 1, 2 and 4 stages a rank, with and without a skip.

A model of 4p layers is cut into v·p stages, so that every rank computes as much whatever v is. Its
layers wait, as a processor waits while its accelerator computes (benchmarks/waiting.py): ranks do
not take each other's cores, and what is measured is the schedule, the messages and the runtime. The
second model is the same with a skip connection from before its first layer to after its last, which
therefore crosses every boundary between stages.

    measured    idle share of the ranks' time in a step, in medians over the rounds
    simulated   the simulator's, from the mean times of the same steps' actions, and of a message
    formula     (p-1)/(v·m+p-1), whose idle over busy is (p-1)/(v·m)
    messages    of a step, of all ranks: 2·m·(v·p-1), each of one tensor, or of two with the skip
    bytes       what the meter counts; it is compared with the formula, and a difference ends it

A second table is the simulator's alone: the idle share where every message takes a share of the
time that a rank computes forward for a micro-batch.

    python benchmarks/study_interleaving.py --page docs/study-interleaving.md \\
        --result benchmarks/results/study_interleaving.json

Progress and tables go to standard error, the result as JSON to standard output.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from outcome import give, takes_result
from pages import fill, table
from pipeline_bubble import COMPUTES, measured
from rounds import seconds_of_a_message
from torch import Tensor, nn
from waiting import WIDTH, Layer

import dure
from dure.contracts.world import RankContext
from dure.parallel.mesh.mesh import Mesh
from dure.parallel.mesh.strategy import Parallel, ParallelLearner
from dure.parallel.pipeline.builders import make
from dure.parallel.pipeline.simulate import Times, simulate
from dure.record.idleness import over_busy

JSON = dict[str, Any]
LAYERS = 4
"""Of a rank."""
EXAMPLES = 256
"""Of a micro-batch."""
SENDS = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Seconds of a message over those of a rank's forward of a micro-batch."""


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Model(nn.Module):
    """skips: whether what goes into the first layer is added to what leaves the last one."""

    def __init__(self, layers: int, forward: float, backward: float, skips: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(forward, backward) for _ in range(layers))
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        before: Tensor = self.first(x)
        after = before
        for layer in self.layers:
            after = layer(after)
        return after + before if self.skips else after


def learner_of(
    context: RankContext, asked: argparse.Namespace, v: int, skips: bool
) -> ParallelLearner:
    ranks = context.group.size
    count = asked.microbatches * EXAMPLES
    data = torch.utils.data.TensorDataset(torch.randn(count, WIDTH), torch.randn(count, WIDTH))
    task = dure.Task(
        partial(Model, LAYERS * ranks, asked.forward / 1e3, asked.backward / 1e3, skips),
        nn.functional.mse_loss,
        data,
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )
    each = LAYERS // v
    cut = tuple(f"layers.{context}" for context in range(each, LAYERS * ranks, each))
    strategy = Parallel(Mesh(pipeline=ranks), None, asked.microbatches, "interleaved", v, cut=cut)
    return ParallelLearner(task, context, 0, strategy)


def sent(learner: ParallelLearner, context: RankContext) -> JSON:
    """What all ranks together send in one step: messages, tensors in them, bytes."""
    counters = context.group.meter.counters
    before = counters.messages_sent, counters.bytes_sent
    learner.gradients(torch.arange(len(learner.train_examples)))
    own = counters.messages_sent - before[0], counters.bytes_sent - before[1]
    rows = context.group.all_gather_values(list(map(float, own)), "the benchmark")
    tensors, nbytes = (int(sum(column)) for column in zip(*rows, strict=True))
    messages = sum(
        action.kind in ("send_output", "send_gradient")
        for actions in learner.schedule.actions
        for action in actions
    )
    return {"messages": messages, "tensors": tensors, "bytes": nbytes}


def formula(ranks: int, microbatches: int, v: int, skips: bool) -> JSON:
    """Of the same; a message is one tensor, or two that a skip connection is part of."""
    messages = 2 * microbatches * (v * ranks - 1)
    tensors = messages * (2 if skips else 1)
    bubble = (ranks - 1) / (v * microbatches + ranks - 1)
    return {
        "messages": messages,
        "tensors": tensors,
        "bytes": tensors * EXAMPLES * WIDTH * 4,
        "formula": bubble,
    }


def row_of(context: RankContext, asked: argparse.Namespace, v: int, skips: bool) -> JSON:
    ranks = context.group.size
    learner = learner_of(context, asked, v, skips)
    said = formula(ranks, asked.microbatches, v, skips)
    found = sent(learner, context)
    if found != {key: said[key] for key in found}:
        raise ValueError(f"v = {v}: {found} was sent, and {said} by the formula")
    send = seconds_of_a_message(context.group, EXAMPLES * WIDTH)
    made = learner.schedule

    def simulated(spans: list[tuple[str, int, float, float]]) -> JSON:
        seconds: dict[tuple[str, int], list[float]] = {}
        for kind, stage, start, end in spans:
            seconds.setdefault((kind, stage), []).append(end - start)

        def means(kind: str) -> tuple[float, ...]:
            each = [seconds.get((kind, stage), [0.0]) for stage in range(made.stages)]
            return tuple(sum(one) / len(one) for one in each)

        simulation = simulate(made, Times(*map(means, COMPUTES), send=send))
        return {"simulated": simulation.bubble, "simulated_seconds": simulation.makespan}

    count = len(learner.train_examples)
    return {
        "ranks": ranks,
        "stages_per_rank": v,
        "skips": skips,
        "send_seconds": send,
        **said,
        **measured(learner, count, asked.rounds, context, simulated),
    }


def program(asked: argparse.Namespace, context: RankContext) -> list[JSON]:
    torch.set_num_threads(1)
    context.group.step = "a benchmark"
    return [row_of(context, asked, v, skips) for skips in (False, True) for v in (1, 2, 4)]


def predicted(asked: argparse.Namespace) -> list[JSON]:
    """The simulator's idle shares where messages take time, for every number of ranks."""
    rows = []
    for ranks in asked.ranks:
        for v in (1, 2, 4):
            schedule = make("interleaved", ranks, asked.microbatches, v)
            shares = []
            for send in SENDS:
                # A rank computes forward for 1, and backward for as much longer as was asked.
                longer = asked.backward / asked.forward
                times = Times.uniform(schedule.stages, 1 / v, longer / v, send)
                shares.append(simulate(schedule, times).bubble)
            rows.append({"ranks": ranks, "stages_per_rank": v, "idle": shares})
    return rows


def share(value: float) -> str:
    over = over_busy(value)
    return f"{100 * value:.1f} % ({'∞' if over is None else f'{over:.3f}'})"


def cells(rows: list[JSON]) -> str:
    head = ["ranks, stages a rank", "messages", "tensors", "kB", "ms a step"]
    head += ["idle, measured (over busy)", "simulated", "formula"]
    lines = []
    for row in rows:
        name = f"{row['ranks']}, {row['stages_per_rank']}{', skip' if row['skips'] else ''}"
        numbers = [f"{row['messages']}", f"{row['tensors']}", f"{row['bytes'] / 1e3:,.0f}"]
        idle = [share(row[key]) for key in ("measured", "simulated", "formula")]
        lines.append([name, *numbers, f"{1e3 * row['makespan']:,.0f}", *idle])
    return table(head, lines)


def predictions(rows: list[JSON]) -> str:
    head = ["ranks, stages a rank", *(f"a message takes {100 * one:g} %" for one in SENDS)]
    lines = []
    for row in rows:
        name = f"{row['ranks']}, {row['stages_per_rank']}"
        lines.append([name, *(f"{100 * one:.1f} %" for one in row["idle"])])
    return table(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--forward", type=float, default=30, metavar="MS", help="of a layer")
    parser.add_argument("--backward", type=float, default=60, metavar="MS", help="of a layer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--page", type=Path, help="the page whose tables are filled")
    takes_result(parser)
    asked = parser.parse_args()
    rows: list[JSON] = []
    for ranks in asked.ranks:
        rows += dure.Processes(ranks, deadline=120).run(partial(program, asked), lambda event: None)
    delayed = predicted(asked)
    show(cells(rows))
    show(predictions(delayed))
    if asked.page is not None:
        fill(asked.page, {"interleaving": cells(rows), "messages": predictions(delayed)})
    setting = {"forward_ms": asked.forward, "backward_ms": asked.backward}
    setting |= {"microbatches": asked.microbatches, "rounds": asked.rounds}
    give(
        {
            "benchmark": "study_interleaving",
            **setting,
            "torch": torch.__version__,
            "rows": rows,
            "delayed": delayed,
        },
        asked.result,
    )


if __name__ == "__main__":
    main()
