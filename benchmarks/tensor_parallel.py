"""Tensor parallelism of dure and of torch: seconds of a training step of a stack of MLPs.

The model is pairs of layers, x + W₂·gelu(W₁·x + b₁) + b₂ of widths d→4d→d. A step is forward,
backward and an update by SGD on the same batch. Two ranks of one thread each divide every pair by
columns and by rows. In every round each contender has some steps after a barrier, and another
contender begins. The time is that of the slowest rank. Times are medians over the rounds; ratios
are medians of the rounds' ratios. All learn the same: the losses of the first steps, and the whole
weights after them, are compared with those of one process.

    one thread            one process
    two threads           one process whose matrix products have two threads
    dure                  dure.parallel.tensor over dure's shared memory
    dure, gloo            the same over gloo
    DTensor, gloo         torch's parallelize_module, ColwiseParallel and RowwiseParallel, over gloo

    python benchmarks/tensor_parallel.py --result benchmarks/results/tensor_parallel.json

Progress and a table go to standard error, the result as JSON to standard output.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from outcome import give, takes_result
from rounds import largest_difference, median_ratio, quartiles, seconds_per_step, turns
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.collectives.group import Group
from dure.contracts.world import RankContext
from dure.machine.cores import available_cores
from dure.parallel.tensor import Column, Row, parallelize, whole_state_dict

JSON = dict[str, Any]


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Setting(NamedTuple):
    width: int
    pairs: int
    rows: int


SETTINGS = {
    "d=256": Setting(256, 2, 1792),
    "d=512": Setting(512, 4, 768),
}
"""A step takes one thread about 170 and 550 ms."""


class Pair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        added: Tensor = self.contract(F.gelu(self.expand(hidden)))
        return hidden + added


class Plain:
    """A model that trains in one process."""

    threads = 1

    def __init__(self, setting: Setting, group: Any) -> None:
        torch.manual_seed(0)
        self.inputs = torch.randn(setting.rows, setting.width)
        self.targets = torch.randn(setting.rows, setting.width)
        self.model: nn.Module = nn.Sequential(*(Pair(setting.width) for _ in range(setting.pairs)))
        self.divide(group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def divide(self, group: Any) -> None: ...

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(self.inputs), self.targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def weights(self) -> dict[str, Tensor]:
        """All of them, on every rank."""
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}


class TwoThreads(Plain):
    threads = 2


class Ours(Plain):
    def divide(self, group: Any) -> None:
        self.group = Group(group)
        parallelize(self.model, {"*.expand": Column(), "*.contract": Row()}, self.group)

    def weights(self) -> dict[str, Tensor]:
        return whole_state_dict(self.model)


class Torch(Plain):
    def divide(self, group: Any) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(dist.get_backend(group),))
        plan = {"*.expand": ColwiseParallel(), "*.contract": RowwiseParallel()}
        parallelize_module(self.model, mesh, plan)

    def weights(self) -> dict[str, Tensor]:
        return {
            name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor)
            .detach()
            .clone()
            for name, tensor in self.model.state_dict().items()
        }


TOLERANCE = 1e-4
"""How far weights may be from those of one thread after five steps, in float32."""

CONTENDERS: dict[str, tuple[type[Plain], str]] = {
    "one thread": (Plain, ""),
    "two threads": (TwoThreads, ""),
    "dure": (Ours, "dure"),
    "dure, gloo": (Ours, "gloo"),
    "DTensor, gloo": (Torch, "gloo"),
}
"""Who makes it, and the backend of its group; "" trains in one process."""


def timed(contender: Plain, alone: bool, steps: int, gloo: Any) -> float:
    """Seconds of a step, with the contender's own number of threads."""
    torch.set_num_threads(contender.threads)
    seconds = seconds_per_step(contender.step, steps, gloo, not alone or dist.get_rank() == 0)
    torch.set_num_threads(1)
    return seconds


def contest(
    names: list[str], setting: Setting, rounds: int, steps: int, context: RankContext
) -> JSON:
    """What every rank does: seconds of a step, a number a round, for each contender."""
    torch.set_num_threads(1)
    groups = {backend: dist.new_group(backend=backend) for backend in ("gloo", "dure")}
    contenders = {
        name: CONTENDERS[name][0](setting, groups.get(CONTENDERS[name][1])) for name in names
    }
    losses = {}
    for name, contender in contenders.items():
        losses[name] = [float(contender.step()) for _ in range(5)]
    weights = {name: contender.weights() for name, contender in contenders.items()}
    alone = weights["one thread"]
    apart = {name: largest_difference(own, alone) for name, own in weights.items()}
    wrong = {name: difference for name, difference in apart.items() if not difference < TOLERANCE}
    assert not wrong, f"these end with other weights than one thread: {wrong}"
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in turns(names, number):
            samples[name].append(
                timed(contenders[name], CONTENDERS[name][1] == "", steps, groups["gloo"])
            )
    return {
        name: {
            **quartiles(samples[name]),
            "losses": losses[name],
            "largest_difference": apart[name],
        }
        for name in names
    }


def sent(setting: Setting, context: RankContext) -> int:
    """Bytes that a rank of dure's contender sends in a step."""
    contender = Ours(setting, dist.new_group(backend="dure"))
    contender.step()
    return contender.group.meter.counters.bytes_sent


def ratios(rows: JSON) -> JSON:
    """One thread over each of the others, as medians of the rounds' ratios."""
    base = rows["one thread"]["samples"]
    return {
        f"one thread over {name}": median_ratio(base, row["samples"])
        for name, row in rows.items()
        if name != "one thread"
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument(
        "--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS)
    )
    parser.add_argument("--rounds", type=int, default=9, help="of all contenders; at least 2")
    parser.add_argument("--steps", type=int, default=5, help="of a contender in a round")
    parser.add_argument("--small", action="store_true", help="a tiny model, for a first try")
    takes_result(parser)
    asked = parser.parse_args()
    names = list(dict.fromkeys(["one thread", *asked.contenders]))
    world = dure.Processes(2, backend="gloo")
    rows = []
    for title in asked.settings:
        setting = Setting(32, 2, 64) if asked.small else SETTINGS[title]
        measured = world.run(
            partial(contest, names, setting, asked.rounds, asked.steps), lambda event: None
        )
        compared = ratios(measured)
        for name, row in measured.items():
            apart = f"weights differ by {row['largest_difference']:.1e}"
            show(
                f"{title:<8} {name:<14} {1e3 * row['median']:7.1f} ms  loss "
                f"{row['losses'][-1]:.6f}  {apart}"
            )
        for what, value in compared.items():
            show(f"{title:<8} {what:<30} {value:.2f}")
        nbytes = world.run(partial(sent, setting), lambda event: None)
        rows.append(
            {
                **setting._asdict(),
                "bytes_sent": nbytes,
                "contenders": measured,
                "compared": compared,
            }
        )
    head = {"benchmark": "tensor_parallel", "ranks": 2, "cores": available_cores()}
    head |= {"rounds": asked.rounds, "steps": asked.steps, "torch": torch.__version__}
    give({**head, "rows": rows}, asked.result)


if __name__ == "__main__":
    main()
