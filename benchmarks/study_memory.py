"""The memory of a rank against the formula, for every system.

A chain of linear layers of 2,048 features and one of 256 are trained by each system for a few
steps of AdamW on batches of 16, each run in a process of its own, with the ranks that the system
has. What the peak of the largest rank grows by from the small model to the large one is what the
model takes: what a process has anyway, and torch, are in both. Memory is Pss of /proc, where what
several ranks share counts once, divided over them; it is read some fifty times a second, from the
start to the last step. By the formula that is

    a·W + b·G + c·S + d·U    weights, gradients and the optimizer's state of the undivided model,
                             and what an update makes on its way, of which a rank has these parts
                             (dure.memory.formula)

Activations of such batches are less than a hundredth of that. Systems that do not say which parts
their workers hold have no formula, and are told as a multiple of W.

    python benchmarks/study_memory.py --page docs/study-memory.md \\
        --result benchmarks/results/study_memory.json

Progress and a table go to standard error, the result as JSON to standard output.
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
from part_memory import notes, watched
from torch import nn

import dure
from dure.contracts.strategy import Strategy
from dure.machine.cores import available_cores
from dure.machine.memory import enable_huge_pages
from dure.memory.formula import training_memory_of

JSON = dict[str, Any]
LAYERS = 8
BATCH = 16
SMALL = 256
LARGE = 2048
STEPS = 6


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def systems() -> dict[str, tuple[Strategy, int]]:
    """Each with its ranks."""
    mesh = partial(dure.Parallel, batch_size=BATCH, microbatches=2)
    return {
        "single worker": (dure.SingleWorker(BATCH), 1),
        "data parallel": (dure.DataParallel(BATCH), 2),
        "ZeRO 1": (dure.ZeRO(1, BATCH), 2),
        "ZeRO 2": (dure.ZeRO(2, BATCH), 2),
        "ZeRO 3": (dure.ZeRO(3, BATCH), 2),
        "tensor parallel": (dure.TensorParallel(BATCH), 2),
        "tensor parallel, columns": (dure.TensorParallel(BATCH, plan=_plan("columns")), 2),
        "tensor parallel, rows": (dure.TensorParallel(BATCH, plan=_plan("rows")), 2),
        "pipeline": (dure.Pipeline(BATCH, 2), 2),
        "pipeline x tensor": (mesh(dure.Mesh(pipeline=2, tensor=2)), 4),
        "data x pipeline, ZeRO 1": (mesh(dure.Mesh(data=2, pipeline=2), zero=1), 4),
        "local SGD": (dure.LocalSGD(batch_size=BATCH), 2),
        "DiLoCo": (dure.DiLoCo(batch_size=BATCH), 2),
        "parallel SGD": (dure.ParallelSGD(batch_size=BATCH), 2),
        "ADMM": (dure.ADMM(batch_size=BATCH), 2),
    }


def _plan(name: str) -> Any:
    # A plan by its name: the strategy makes it a plan.
    return name


def chain(width: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def task_of(width: int) -> dure.Task:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(4 * BATCH, width, generator=generator)
    return dure.Task(
        partial(chain, width),
        nn.functional.mse_loss,
        (data, data.flip(0)),
        optimizer=partial(torch.optim.AdamW, lr=1e-4),
    )


def train(name: str, width: int, phase: Path) -> None:
    """A run, in this process and those that it starts; the phase is written into a file."""
    strategy, ranks = systems()[name]
    world = dure.Processes(ranks) if ranks > 1 else None
    count = 1 if strategy.traits.unit == "round" else STEPS
    stop = dure.Stop(**{f"{strategy.traits.unit}s": count})
    told = notes(phase, count)
    dure.train(task_of(width), strategy, world, stop, seed=0, check=False, on_progress=told)


def peak(name: str, width: int) -> int:
    """Bytes at the peak of the largest rank until the last step, of a run in its own process."""
    # As for the command line, and for ranks.
    variables: dict[str, str] = {}
    enable_huge_pages(variables)
    phases = watched(__file__, "--one", name, str(width), **variables)
    who = "parent" if systems()[name][1] == 1 else "rank"
    return max(phases.get(phase, {}).get(who, 0) for phase in ("start", "training"))


def formula(name: str, width: int) -> tuple[int, int | None]:
    """Bytes of the weights, and what a rank needs of weights, gradients and state."""
    strategy, ranks = systems()[name]
    task = task_of(width)
    need = training_memory_of(task.model(), task.optimizer)
    shares = strategy.shares(ranks)
    return need.weights, None if shares is None else need.of(shares).total


def row_of(name: str, asked: argparse.Namespace) -> JSON:
    ranks = systems()[name][1]
    small, large = (peak(name, width) for width in (SMALL, asked.large))
    weights, said = formula(name, asked.large)
    less, said_small = formula(name, SMALL)
    return {
        "system": name,
        "ranks": ranks,
        "base": small,
        "peak": large,
        "weights": weights - less,
        "grown": large - small,
        "formula": None if said is None or said_small is None else said - said_small,
    }


def cells(rows: list[JSON]) -> str:
    head = ["system", "ranks", "peak of a rank, MB", "memory of the model, MB", "formula, MB"]
    head += ["model over formula", "model over weights"]
    lines = []
    for row in rows:
        said = row["formula"]
        lines.append(
            [
                row["system"],
                str(row["ranks"]),
                f"{row['peak'] / 1e6:.0f}",
                f"{row['grown'] / 1e6:.0f}",
                "–" if said is None else f"{said / 1e6:.0f}",
                "–" if said is None else f"{row['grown'] / said:.2f}",
                f"{row['grown'] / row['weights']:.2f}",
            ]
        )
    return table(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", nargs="+", choices=list(systems()), default=list(systems()))
    parser.add_argument("--large", type=int, default=LARGE, metavar="WIDTH", help="features")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--page", type=Path, help="the page whose table is filled")
    takes_result(parser)
    asked = parser.parse_args()
    if asked.one is not None:
        name, width, phase = asked.one
        train(name, int(width), Path(phase))
        return
    rows = []
    for name in asked.systems:
        rows.append(row_of(name, asked))
        show(f"{name}: {rows[-1]}")
    show(cells(rows))
    if asked.page is not None:
        fill(asked.page, {"memory": cells(rows)})
    head = {"benchmark": "study_memory", "cores": available_cores(), "torch": torch.__version__}
    give({**head, "rows": rows}, asked.result)


if __name__ == "__main__":
    main()
