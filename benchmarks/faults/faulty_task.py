"""A task in which one process does what it should not, once, at a place and a moment that are told.

    place     loss, forward, backward, data, metric, optimizer; forward:2 and backward:2 are those
              of the third block of the model
    kind      raise, exit (`sys.exit(7)`), hang (sleep without end), stop (SIGSTOP), kill (SIGKILL)
    after     so many passes of the place in a process go well before; then the first process that
              comes by strikes, and no other

Whoever strikes writes who it is into a file first: what is said of it afterwards is held against
that.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import dure
from dure.data.datasets import DatasetExamples

KINDS = ("raise", "exit", "hang", "stop", "kill")
BLOCKS = 3
CLIENTS = 4
EXAMPLES = 96
FEATURES, CLASSES = 8, 4

IN_THIS_PROCESS: dict[str, Any] = {"passes": 0, "struck": False, "client": None, "name": None}
"""How often the place was passed, whether the fault was here, whose example was read last, and what
the process is called."""


@dataclass(frozen=True)
class Fault:
    """What happens, where and when. marker: the file that is written then.

    on: the rank that strikes, where there are ranks; None is whoever comes first.
    """

    place: str
    kind: str
    after: int
    marker: str
    on: int | None = None

    def told(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, told: str) -> Fault:
        return cls(**json.loads(told))

    def here(self, place: str) -> None:
        """A process passes a place."""
        if place != self.place or not self._is_mine():
            return
        IN_THIS_PROCESS["passes"] += 1
        if IN_THIS_PROCESS["passes"] <= self.after:
            return
        # What fails goes on failing: a metric is tried again on all examples at once.
        again = self.kind == "raise" and IN_THIS_PROCESS["struck"]
        if again or self._is_first():
            IN_THIS_PROCESS["struck"] = True
            strike(self.kind)

    def _is_mine(self) -> bool:
        return self.on is None or not dist.is_initialized() or dist.get_rank() == self.on

    def _is_first(self) -> bool:
        try:
            file = os.open(self.marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        os.write(file, json.dumps(who()).encode())
        os.close(file)
        return True


def who() -> dict[str, Any]:
    """This process, as far as it knows."""
    rank = dist.get_rank() if dist.is_initialized() else None
    client = IN_THIS_PROCESS["client"]
    name = IN_THIS_PROCESS["name"]
    return {"rank": rank, "client": client, "name": name, "pid": os.getpid(), "at": time.time()}


def strike(kind: str) -> None:
    if kind == "raise":
        raise RuntimeError("on purpose")
    if kind == "exit":
        sys.exit(7)
    while kind == "hang":
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)


# The places


@torch.library.custom_op("faults::passage", mutates_args=())
def passage(inputs: Tensor, told: str, block: int) -> Tensor:
    """Gives back what it gets, and is a place, as is its backward pass.

    An operator, and not an `autograd.Function`: pipelines take it along. told: the fault.
    """
    Fault.of(told).here(f"forward:{block}")
    return inputs.clone()


@torch.library.custom_op("faults::back", mutates_args=())
def back(gradient: Tensor, told: str, block: int) -> Tensor:
    Fault.of(told).here(f"backward:{block}")
    return gradient.clone()


@passage.register_fake
def _(inputs: Tensor, told: str, block: int) -> Tensor:
    return torch.empty_like(inputs)


@back.register_fake
def _(gradient: Tensor, told: str, block: int) -> Tensor:
    return torch.empty_like(gradient)


def _note(ctx: Any, inputs: tuple[Tensor, str, int], output: Tensor) -> None:
    ctx.told, ctx.block = inputs[1:]


def _gradient(ctx: Any, gradient: Tensor) -> Any:
    return back(gradient, ctx.told, ctx.block), None, None


passage.register_autograd(_gradient, setup_context=_note)


class Passage(nn.Module):
    """A layer that passes on what it gets, and is a place."""

    def __init__(self, fault: Fault, block: int) -> None:
        super().__init__()
        self.told, self.block = fault.told(), block

    def forward(self, inputs: Tensor) -> Tensor:
        passed: Tensor = passage(inputs, self.told, self.block)
        return passed


class Loss:
    """Cross-entropy. pairs: as (sum, count), which engines of many clients at once can compute."""

    def __init__(self, fault: Fault, pairs: bool) -> None:
        self.fault, self.pairs = fault, pairs

    def __call__(self, outputs: Tensor, targets: Tensor) -> Any:
        if torch.is_grad_enabled():
            self.fault.here("loss")
        if self.pairs:
            return F.cross_entropy(outputs, targets, reduction="sum"), len(targets)
        return F.cross_entropy(outputs, targets)


class Metric:
    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.fault.here("metric")
        return (outputs.argmax(1) == targets).float().mean()


class Stepping(torch.optim.SGD):
    """fault: of the one that trains; those that systems make to try something out have none."""

    fault: Fault | None = None

    def step(self, closure: Any = None) -> Any:
        if self.fault is not None:
            self.fault.here("optimizer")
        return super().step(closure)


def stepping(parameters: Any, fault: Fault) -> torch.optim.Optimizer:
    optimizer = Stepping(parameters, lr=0.05)
    optimizer.fault = fault
    return optimizer


class Rows(Dataset[Any]):
    """Examples that are read one by one; the k-th of client k mod `CLIENTS`."""

    def __init__(self, inputs: Tensor, targets: Tensor, fault: Fault) -> None:
        self.inputs, self.targets, self.fault = inputs, targets, fault

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        IN_THIS_PROCESS["client"] = index % CLIENTS
        self.fault.here("data")
        return self.inputs[index], self.targets[index]


def network(fault: Fault) -> nn.Module:
    """Blocks of a layer, an activation and, where the fault is in that block, a passage."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = []
    for block in range(BLOCKS):
        blocks += [nn.Linear(FEATURES, FEATURES), nn.Tanh()]
        if fault.place in (f"forward:{block}", f"backward:{block}"):
            blocks.append(Passage(fault, block))
    return nn.Sequential(*blocks, nn.Linear(FEATURES, CLASSES))


def task_of(fault: Fault, reads: bool = False, pairs: bool = False) -> dure.Task:
    """The task. reads: its examples are read one by one, so that clients are known by them. pairs:
    as its loss has it.

    Only the place of the fault is other than in any task, so that engines compute as they would.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(EXAMPLES, FEATURES, generator=generator)
    targets = inputs[:, :CLASSES].argmax(dim=1)
    keys = [index % CLIENTS for index in range(EXAMPLES)]
    if reads or fault.place == "data":
        train: Any = DatasetExamples(Rows(inputs, targets, fault), keys)
    else:
        train = dure.Examples(inputs, targets, keys)
    changes: dict[str, Any] = {}
    if fault.place == "metric":
        changes["metrics"] = {"accuracy": Metric(fault)}
    own = fault.place == "optimizer"
    return dure.Task(
        model=partial(network, fault),
        loss=Loss(fault, pairs) if fault.place == "loss" else F.cross_entropy,
        train=train,
        test=(inputs[:32], targets[:32]),
        optimizer=partial(stepping, fault=fault) if own else partial(torch.optim.SGD, lr=0.05),
        name="faulty",
        **changes,
    )


def struck(marker: Path) -> dict[str, Any] | None:
    """Who has struck, and when; None where nobody has."""
    try:
        found: dict[str, Any] = json.loads(marker.read_text())
        return found
    except (OSError, ValueError):
        return None
