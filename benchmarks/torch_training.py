"""torch's own training over the backends dure and gloo: DDP, FSDP2 and tensor parallel, unchanged.

Each of them trains on the built-in digits twice in one world of ranks: from the same weights, on
the same batches, once in a group of gloo and once in a group of dure. In every round each backend
has some steps, after a barrier, and the other backend begins the next round. The time is that of
the slowest rank. Then dure's own DataParallel trains on worlds of both backends, which take turns.
Each rank has one thread. Figures are medians and quartiles over the rounds. The ratio is the median
of the rounds' ratios, above 1 where dure is faster. The losses of all steps and ranks are compared.

    python benchmarks/torch_training.py [--ranks 2 4] \\
        --result benchmarks/results/torch_training.json

Progress and a table go to standard error, the result as JSON to standard output. docs/benchmarks.md
has the figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from outcome import give, takes_result
from rounds import quartiles
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import dure
from dure.contracts.fresh_model import seeded_model
from dure.contracts.world import RankContext
from dure.machine.cores import available_cores
from dure.randomness.seeds import shuffled
from dure.tasks.models import TwoNN

BATCH = 64
"""Examples of a step over all ranks together, as in dure's DataParallel; with tensor parallel every
rank sees all."""

BACKENDS = ("gloo", "dure")
WIDTHS = {"small": 200, "middle": 1400}

JSON = dict[str, Any]


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def digits(width: int) -> dure.Task:
    task = dure.load_task("digits")
    return dataclasses.replace(task, model=partial(TwoNN, features=64, width=width), test=None)


def data_parallel(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, process_group=group)


def mesh_of(group: dist.ProcessGroup) -> DeviceMesh:
    """Named after its backend: meshes of the same ranks and names are equal, and DTensor would take
    the first's group for both."""
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(dist.get_backend(group),))


def fsdp2(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(group)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {"layers.1": ColwiseParallel(), "layers.3": RowwiseParallel()}
    return parallelize_module(model, mesh_of(group), plan)


SYSTEMS: dict[str, Callable[[nn.Module, dist.ProcessGroup], nn.Module]] = {
    "DistributedDataParallel": data_parallel,
    "FSDP2": fsdp2,
    "tensor parallel": tensor_parallel,
}


class Training:
    """One model in training in one group, on one rank."""

    def __init__(self, system: str, task: dure.Task, group: dist.ProcessGroup) -> None:
        self.task = task
        self.model = SYSTEMS[system](seeded_model(task, 0).train(), group)
        self.optimizer = task.optimizer(self.model.parameters())
        self.ranks = 1 if system == "tensor parallel" else dist.get_world_size()
        self.per_epoch = len(task.train) // BATCH
        self.step = 0
        self.losses: list[float] = []

    def advance(self) -> None:
        epoch, position = divmod(self.step, self.per_epoch)
        if position == 0:
            self.order = shuffled(len(self.task.train), 0, epoch)
        joint = self.order[position * BATCH : (position + 1) * BATCH]
        mine = joint.tensor_split(self.ranks)[dist.get_rank() % self.ranks]
        self.optimizer.zero_grad()
        loss = self.task.loss(
            self.model(self.task.train.inputs[mine]), self.task.train.targets[mine]
        )
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        self.step += 1

    def seconds_per_step(self, steps: int) -> float:
        """Of the slowest rank, over `steps` steps behind a barrier; the world's group (gloo) has
        the time measured."""
        dist.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            self.advance()
        return slowest((time.perf_counter() - started) / steps)


def check_that_each_has_its_backend(both: dict[str, Training]) -> None:
    """gloo's collectives appear in a profile of a step on gloo, and in none of a step on dure."""
    for backend, training in both.items():
        with torch.autograd.profiler.profile(use_kineto=False) as profile:
            training.advance()
        seen = any(event.key.startswith("gloo:") for event in profile.key_averages())
        assert seen == (backend == "gloo"), f"a step on {backend} is carried by another backend"


def slowest(value: float) -> float:
    """The largest of all ranks' values, on every rank."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def contest(rounds: int, batch: float, context: RankContext) -> list[JSON]:
    """What every rank does: all systems and models, each on both backends by turns. The world is of
    gloo."""
    torch.set_num_threads(1)
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    rows = []
    for size, width in WIDTHS.items():
        task = digits(width)
        for system in SYSTEMS:
            both = {backend: Training(system, task, groups[backend]) for backend in BACKENDS}
            check_that_each_has_its_backend(both)
            for _ in range(2):  # the first steps connect, allocate and fill caches
                pilot = max(training.seconds_per_step(3) for training in both.values())
            steps = max(3, math.ceil(batch / pilot))
            samples: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
            for number in range(rounds):
                for backend in BACKENDS[:: 1 if number % 2 else -1]:
                    samples[backend].append(both[backend].seconds_per_step(steps))
            one, other = (training.losses for training in both.values())
            apart = max(abs(a - b) for a, b in zip(one, other, strict=True))
            rows.append(row(system, size, task, steps, samples, slowest(apart)))
            if context.group.rank == 0:
                context.report({"unit": "row", "step": len(rows), **rows[-1]})
    return rows


def row(
    system: str,
    size: str,
    task: dure.Task,
    steps: int,
    samples: dict[str, list[float]],
    apart: float,
) -> JSON:
    ratios = [gloo / ours for gloo, ours in zip(samples["gloo"], samples["dure"], strict=True)]
    return {
        "system": system,
        "model": size,
        "parameters": sum(parameter.numel() for parameter in task.model().parameters()),
        "steps_per_round": steps,
        **{backend: quartiles(samples[backend]) for backend in BACKENDS},
        "gloo_over_dure": quartiles(ratios),
        "largest_difference_of_losses": apart,
    }


def own(ranks: int, rounds: int, steps: int, size: str, all_reduce: Any) -> JSON:
    """dure's DataParallel, in worlds of both backends by turns; seconds of training, without
    starts."""
    task = digits(WIDTHS[size])
    samples = {backend: [] for backend in BACKENDS}
    losses = {}
    strategy = dure.DataParallel(BATCH, all_reduce)
    for number in range(rounds):
        for backend in BACKENDS[:: 1 if number % 2 else -1]:
            world = dure.Processes(ranks, backend=backend)
            run = dure.train(
                task, strategy, world, stop=dure.Stop(steps=steps), seed=0, evaluate_every=10**9
            )
            samples[backend].append(run.summary["seconds"] / steps)
            losses[backend] = [step.loss for step in run.history.steps]
    apart = max(abs(a - b) for a, b in zip(losses["gloo"], losses["dure"], strict=True))
    return row(f"dure DataParallel {all_reduce}", size, task, steps, samples, apart)


def line(row: JSON) -> str:
    times = "  ".join(f"{backend} {row[backend]['median'] * 1e3:7.2f} ms" for backend in BACKENDS)
    low, high = row["gloo_over_dure"]["quartiles"]
    ratio = f"{row['gloo_over_dure']['median']:5.2f}x ({low:.2f}–{high:.2f})"
    name = f"{row['system']:<25} {row['model']:<7} {row['parameters']:>9,}"
    return f"{name}  {times}  {ratio}  losses {row['largest_difference_of_losses']:.1e} apart"


def measured(asked: argparse.Namespace, ranks: int) -> list[JSON]:
    show(f"{ranks} ranks; a step's median, gloo over dure with quartiles")
    world = dure.Processes(ranks, backend="gloo")
    rows = world.run(
        partial(contest, asked.rounds, asked.batch_seconds), lambda event: show(line(event))
    )
    for size in WIDTHS:
        for all_reduce in ("native", "ring"):
            rows.append(own(ranks, asked.rounds, asked.steps, size, all_reduce))
            show(line(rows[-1]))
    return [{"ranks": ranks, **row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[2])
    parser.add_argument("--rounds", type=int, default=15, help="of both backends; at least 2")
    parser.add_argument(
        "--batch-seconds",
        type=float,
        default=0.2,
        help="how long a backend's steps of a round take",
    )
    parser.add_argument("--steps", type=int, default=100, help="of a run of dure's DataParallel")
    takes_result(parser)
    asked = parser.parse_args()
    about = {"benchmark": "torch_training", "task": "digits", "batch": BATCH, "threads_per_rank": 1}
    about |= {"cores": available_cores(), "rounds": asked.rounds, "torch": torch.__version__}
    rows = []
    for ranks in asked.ranks:
        rows += measured(asked, ranks)
    give({**about, "rows": rows}, asked.result)


if __name__ == "__main__":
    main()
