"""Pipelines of dure and of torch: seconds of a step on two ranks, and what the schedule allows.

A transformer of eight layers computes the gradient of a batch. In every round each contender has
some steps after a barrier, and another contender begins. The time is that of the slowest rank.
Times are medians over the rounds; ratios are medians of the rounds' ratios. It is checked that all
find the same gradients. Memory that a step has freed is kept for the next one, for all contenders,
as in `dure.train`: otherwise page faults would depend on which contender ran before.

    single                   one process of one thread, the batch at once
    micro-batched            the same, a micro-batch after the other
    side by side             the same in both processes at once, which exchange nothing
    torch GPipe, 1F1B, …     torch.distributed.pipelining over gloo, the model cut by hand at the
                             places at which dure cuts it
    dure gpipe, 1f1b, …      dure's, over shared memory

    ideal                    micro-batched / ranks, and the bubble that the schedule cannot avoid if
                             forward and the two parts of backward take equally long
    possible                 side by side / ranks, and the bubble for the times that they took
    predicted                the simulator's, from the times that dure's actions and a message took
                             in those steps

    python benchmarks/pipeline.py --result benchmarks/results/pipeline.json

Progress and a table go to standard error, the result as JSON to standard output. docs/pipeline.md
has the figures.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from outcome import give, takes_result
from pages import fill, table
from rounds import (
    largest_difference,
    median_ratio,
    seconds_of_a_message,
    seconds_per_step,
    turns,
)
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn import functional as F

import dure
from dure.contracts.world import RankContext
from dure.machine.memory import keep_freed_memory
from dure.parallel.mesh.mesh import Mesh
from dure.parallel.mesh.strategy import Parallel, ParallelLearner
from dure.parallel.pipeline.builders import make
from dure.parallel.pipeline.schedule import COMPUTING, Schedule
from dure.parallel.pipeline.simulate import Times, simulate
from dure.tasks.models import Transformer

JSON = dict[str, Any]
CHARACTERS = 65
CONTEXT = 64
LAYERS = 8
HEADS = 4
RANKS = 2
TOLERANCE = 1e-4
"""How far gradients may be from those of one process, in float32."""


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def network(width: int) -> Transformer:
    return Transformer(CHARACTERS, CONTEXT, LAYERS, HEADS, width)


def examples(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    characters = torch.randint(0, CHARACTERS, (count, CONTEXT + 1), generator=generator)
    return characters[:, :-1].contiguous(), characters[:, 1:].contiguous()


def seeded(width: int) -> Transformer:
    torch.manual_seed(0)
    return network(width)


class Head(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.norm = model.norm
        self.output = model.output

    def forward(self, hidden: Tensor) -> Tensor:
        return self.output(self.norm(hidden)).transpose(1, 2)


class Foot(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.embedding = model.embedding
        self.position = model.position

    def forward(self, indices: Tensor) -> Tensor:
        return self.embedding(indices) + self.position(torch.arange(indices.shape[1]))


# Who competes.


class Alone:
    """One process; the other ranks wait, or do the same."""

    def __init__(self, width: int, batch: int, microbatches: int, on_all: bool = False) -> None:
        self.model = seeded(width)
        self.microbatches = microbatches
        self.waits = not on_all and dist.get_rank() > 0
        self.inputs, self.targets = examples(batch)

    def step(self) -> None:
        if self.waits:
            return
        self.model.zero_grad()
        pairs = zip(
            self.inputs.chunk(self.microbatches), self.targets.chunk(self.microbatches), strict=True
        )
        for inputs, targets in pairs:
            (F.cross_entropy(self.model(inputs), targets) / self.microbatches).backward()

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}


class Torchs:
    """torch's schedules; stages of whole layers, `per_rank` on each rank."""

    def __init__(
        self,
        width: int,
        batch: int,
        microbatches: int,
        kind: Any,
        group: Any,
        per_rank: int,
        v_shaped: bool = False,
    ) -> None:
        rank = dist.get_rank()
        stages = RANKS * per_rank
        self.model = seeded(width)
        blocks = list(self.model.blocks)
        size = len(blocks) // stages
        pieces = [nn.Sequential(*blocks[i * size : (i + 1) * size]) for i in range(stages)]
        pieces[0].insert(0, Foot(self.model))
        pieces[-1].append(Head(self.model))
        homes = [i if i < RANKS else 2 * RANKS - 1 - i for i in range(stages)] if v_shaped else None
        mine = [i for i in range(stages) if (homes[i] if homes else i % RANKS) == rank]
        made = [
            pipelining.PipelineStage(pieces[i], i, stages, torch.device("cpu"), group=group)  # type: ignore[attr-defined]
            for i in mine
        ]
        self.pieces = [pieces[i] for i in mine]
        self.first = 0 in mine
        self.last = stages - 1 in mine
        stage: Any = made[0] if per_rank == 1 else made
        self.schedule = kind(stage, microbatches, loss_fn=F.cross_entropy)
        self.inputs, self.targets = examples(batch)

    def step(self) -> None:
        for piece in self.pieces:
            piece.zero_grad()
        given = (self.inputs,) if self.first else ()
        if self.last:
            losses: list[Tensor] = []
            self.schedule.step(*given, target=self.targets, losses=losses)
        else:
            self.schedule.step(*given)

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}


class Ours:
    def __init__(
        self, width: int, batch: int, microbatches: int, schedule: str, context: RankContext
    ) -> None:
        data = examples(batch)
        per_rank = 2 if schedule in ("interleaved", "zero-bubble-v") else 1
        stages = RANKS * per_rank
        cut = tuple(f"blocks.{i * LAYERS // stages}" for i in range(1, stages))
        strategy = Parallel(Mesh(pipeline=RANKS), None, microbatches, schedule, per_rank, cut=cut)
        task = dure.Task(
            partial(network, width),
            F.cross_entropy,
            torch.utils.data.TensorDataset(*data),
            optimizer=SGD,
        )
        self.learner = ParallelLearner(task, context, 0, strategy)
        with torch.no_grad():
            mine = dict(seeded(width).named_parameters())
            for name, parameter in self.learner.rank_state.parameters.items():
                parameter.copy_(mine[name])
        self.indices = torch.arange(batch)
        self.spans: list[list[tuple[str, int, int, float]]] = []  # of each step

    def step(self) -> None:
        for parameter in self.learner.rank_state.parameters.values():
            parameter.grad = None
        self.learner.gradients(self.indices)
        (engine,) = self.learner._engines.values()
        self.spans.append(
            [(a.kind, a.stage, a.microbatch, end - start) for a, start, end in engine.spans]
        )

    def gradients(self) -> dict[str, Tensor]:
        return {
            name: p.grad
            for name, p in self.learner.rank_state.parameters.items()
            if p.grad is not None
        }

    def times(self) -> list[Any]:
        """The mean seconds of each kind of action in each stage, from all ranks."""
        rows: list[Any] = [None] * RANKS
        timed = [span for step in self.spans[1:] for span in step]  # the first one was not timed
        dist.all_gather_object(rows, timed)
        self.spans = []
        return [row for rank in rows for row in rank]


SGD = partial(torch.optim.SGD, lr=0.1)


def contenders(
    width: int, batch: int, microbatches: int, gloo: Any, context: RankContext
) -> dict[str, Callable[[], Any]]:
    theirs = partial(Torchs, width, batch, microbatches)
    ours = partial(Ours, width, batch, microbatches)
    made: dict[str, Callable[[], Any]] = {
        "single": partial(Alone, width, batch, 1),
        "micro-batched": partial(Alone, width, batch, microbatches),
        "side by side": partial(Alone, width, batch, microbatches, on_all=True),
        "torch GPipe": partial(theirs, pipelining.ScheduleGPipe, gloo, 1),
        "torch 1F1B": partial(theirs, pipelining.Schedule1F1B, gloo, 1),
        "torch Interleaved1F1B": partial(theirs, pipelining.ScheduleInterleaved1F1B, gloo, 2),
        "torch ZBV": partial(theirs, pipelining.ScheduleZBVZeroBubble, gloo, 2, v_shaped=True),
    }
    for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v"):
        made[f"dure {schedule}"] = partial(ours, schedule, context)
    return made


PARTED = ("zero-bubble", "zero-bubble-v")
"""Schedules whose bubble depends on how long the two parts of backward take."""


def list_of(schedule: str, microbatches: int) -> Schedule:
    return make(
        schedule, RANKS, microbatches, 2 if schedule in ("interleaved", "zero-bubble-v") else 1
    )


def bubble(schedule: str, microbatches: int, rows: list[Any] | None = None) -> float:
    """What a schedule takes longer than without a bubble, with stages alike and messages that take
    no time.

    rows: measured actions, whose kinds' mean times are taken; else forward and the parts of
    backward are equally long.
    """
    made = list_of(schedule, microbatches)
    times = Times.uniform(made.stages, 1, 2)
    if rows is not None:
        times = Times(*((mean(rows, kind),) * made.stages for kind in COMPUTING))
    return simulate(made, times).bubble_over_ideal


def mean(rows: list[Any], kind: str, stage: int | None = None) -> float:
    """Of the seconds of actions of a kind, in one stage or in all."""
    found = [seconds for k, s, _, seconds in rows if k == kind and stage in (None, s)]
    return statistics.fmean(found) if found else 0.0


def means(rows: list[Any], kind: str, stages: int) -> tuple[float, ...]:
    """Of the seconds of actions of a kind, for each stage."""
    return tuple(mean(rows, kind, stage) for stage in range(stages))


def predicted(schedule: str, microbatches: int, rows: list[Any], send: float) -> JSON:
    """From the mean seconds of each stage's actions, and those of a message."""
    made = list_of(schedule, microbatches)
    times = Times(*(means(rows, kind, made.stages) for kind in COMPUTING), send=send)
    simulation = simulate(made, times)
    return {
        "seconds": simulation.makespan,
        "bubble": simulation.bubble,
        "of_stages_alike": bubble(schedule, microbatches, rows if schedule in PARTED else None),
    }


def contest(
    width: int,
    batch: int,
    microbatches: int,
    rounds: int,
    steps: int,
    gloo: Any,
    context: RankContext,
) -> JSON:
    playing = {
        name: make() for name, make in contenders(width, batch, microbatches, gloo, context).items()
    }
    found: dict[str, dict[str, Tensor]] = {}
    for name, contender in playing.items():
        contender.step()
        rows: list[Any] = [None] * RANKS
        dist.all_gather_object(rows, contender.gradients())
        found[name] = {}
        for row in rows:
            found[name] |= row
        seconds_per_step(contender.step, 1, gloo)
        if isinstance(contender, Ours):
            contender.times()
    right = found["single"]
    apart = {name: largest_difference(right, grads) for name, grads in found.items()}
    wrong = {name: difference for name, difference in apart.items() if not difference < TOLERANCE}
    assert not wrong, f"these have other gradients than one process: {wrong}"
    send = seconds_of_a_message(context.group, -(-batch // microbatches) * CONTEXT * width)
    samples: dict[str, list[float]] = {name: [] for name in playing}
    times: dict[str, list[JSON]] = {name: [] for name in playing}
    names = list(playing)
    for number in range(rounds):
        for name in turns(names, number):
            samples[name].append(seconds_per_step(playing[name].step, steps, gloo))
            if isinstance(playing[name], Ours):
                times[name].append(
                    predicted(name.removeprefix("dure "), microbatches, playing[name].times(), send)
                )
    result: JSON = {}
    for name in names:
        result[name] = {"samples": samples[name], "median": statistics.median(samples[name])}
        result[name]["largest_difference_of_gradients"] = apart[name]
        if name.startswith("dure "):
            share = bubble(name.removeprefix("dure "), microbatches)
            ideal = [seconds / RANKS * (1 + share) for seconds in samples["micro-batched"]]
            pairs = zip(samples["side by side"], times[name], strict=True)
            possible = [seconds / RANKS * (1 + row["of_stages_alike"]) for seconds, row in pairs]
            busy = [1 - row["bubble"] for row in times[name]]
            measured = [
                1 - b * row["seconds"] / s
                for b, row, s in zip(busy, times[name], samples[name], strict=True)
            ]
            result[name] |= {
                "ideal": statistics.median(ideal),
                "over_ideal": statistics.median(
                    a / b for a, b in zip(samples[name], ideal, strict=True)
                ),
                "possible": statistics.median(possible),
                "over_possible": statistics.median(
                    a / b for a, b in zip(samples[name], possible, strict=True)
                ),
                "over_predicted": statistics.median(
                    a / row["seconds"] for a, row in zip(samples[name], times[name], strict=True)
                ),
                "bubble_measured": statistics.median(measured),
                "bubble_predicted": statistics.median(row["bubble"] for row in times[name]),
            }
    return result


def against(rows: JSON) -> JSON:
    """Each of torch's schedules over dure's of the same kind."""
    pairs = {
        "gpipe": "torch GPipe",
        "1f1b": "torch 1F1B",
        "interleaved": "torch Interleaved1F1B",
        "zero-bubble-v": "torch ZBV",
    }
    return {
        ours: median_ratio(rows[theirs]["samples"], rows[f"dure {ours}"]["samples"])
        for ours, theirs in pairs.items()
    }


def program(asked: argparse.Namespace, context: RankContext) -> JSON:
    torch.set_num_threads(1)
    gloo = dist.new_group(backend="gloo")
    context.group.step = "a benchmark"
    result: JSON = {}
    for microbatches in asked.microbatches:
        with keep_freed_memory():
            rows = contest(
                asked.width, asked.batch, microbatches, asked.rounds, asked.steps, gloo, context
            )
        result[str(microbatches)] = {"rows": rows, "torch_over_dure": against(rows)}
    return result


def describe(result: JSON) -> None:
    for microbatches, cell in result.items():
        show(
            f"\n{microbatches} micro-batches       ms   of ideal  of possible  of predicted   "
            f"bubble (predicted)"
        )
        for name, row in cell["rows"].items():
            more = ""
            if "ideal" in row:
                ratios = (row[f"over_{what}"] for what in ("ideal", "possible", "predicted"))
                more = "   {:6.3f}       {:6.3f}        {:6.3f}".format(*ratios)
                more += f"       {row['bubble_measured']:.3f} ({row['bubble_predicted']:.3f})"
            show(f"{name:22s} {row['median'] * 1e3:7.1f}{more}")
        show(
            "torch over dure: "
            + ", ".join(f"{k} {v:.3f}" for k, v in cell["torch_over_dure"].items())
        )


def tables(result: JSON) -> dict[str, str]:
    """For the page: milliseconds of every contender, and dure's over what is possible."""
    cells = list(result.items())
    names = list(cells[0][1]["rows"])
    rows = []
    for name in names:
        medians = [cell["rows"][name]["median"] for _, cell in cells]
        rows.append([name, *(f"{median * 1e3:.0f}" for median in medians)])
    head = ["ms a step", *(f"{microbatches} micro-batches" for microbatches, _ in cells)]
    more = []
    for name in (name for name in names if name.startswith("dure ")):
        row = [name.removeprefix("dure ")]
        for _, cell in cells:
            found = cell["rows"][name]
            versus = cell["torch_over_dure"].get(row[0])
            ratios = [
                f"{found[what]:.2f}" for what in ("over_predicted", "over_ideal", "over_possible")
            ]
            row.append(", ".join([*ratios, f"{versus:.2f}" if versus is not None else "none"]))
        more.append(row)
    title = "over predicted, ideal, possible; torch over dure"
    compared = [title, *(f"{microbatches}" for microbatches, _ in cells)]
    return {"pipeline": table(head, rows) + "\n\n" + table(compared, more)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--page", type=Path, default=None, help="the page whose tables to fill")
    takes_result(parser)
    asked = parser.parse_args()
    for microbatches in asked.microbatches:
        if asked.batch % microbatches:
            parser.error(
                f"a batch of {asked.batch} is not {microbatches} micro-batches of one size, as "
                f"torch wants"
            )
    world = dure.Processes(RANKS, deadline=120)
    result = world.run(partial(program, asked), lambda event: None)
    describe(result)
    setting = {
        "width": asked.width,
        "layers": LAYERS,
        "context": CONTEXT,
        "batch": asked.batch,
        "ranks": RANKS,
    }
    if asked.page is not None:
        fill(asked.page, tables(result))
    give(
        {"benchmark": "pipeline", **setting, "torch": torch.__version__, "microbatches": result},
        asked.result,
    )


if __name__ == "__main__":
    main()
