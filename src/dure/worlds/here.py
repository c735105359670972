"""One worker in the calling process: nothing is started, nothing is sent."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from dure.collectives.group import Group
from dure.contracts.strategy import Kind, Place
from dure.record.meter import Meter
from dure.record.trace import Trace
from dure.worlds.interrupts import on_interrupt

Value = TypeVar("Value")


def under_torchrun() -> bool:
    """Whether torchrun (or whoever sets the same variables) has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ


def leads_here() -> bool:
    """Whether this process is the one that talks to the user: of those of torchrun, rank 0."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def refuse_under_torchrun(world: str) -> None:
    """Raises ValueError where N processes would each do the same work and write the same files."""
    if under_torchrun() and int(os.environ["WORLD_SIZE"]) > 1:
        raise ValueError(
            f"torchrun has started {os.environ['WORLD_SIZE']} ranks, and {world} is one: start it "
            f"without"
        )


def run_here(
    program: Callable[[Place], Value],
    report: Callable[[dict[str, Any]], None],
    name: str,
    kind: Kind = "ranks",
    devices: tuple[torch.device, ...] = (torch.device("cpu"),),
    is_worker: bool = True,
) -> Value:
    """Runs `program` in this process. Ctrl-C asks it to end after its step.

    name: of its lane in the trace, such as "rank 0". is_worker: whether what is counted in that
    lane trains.
    """
    trace = Trace()
    asked: list[bool] = []
    # No process group: a group of one sends nothing.
    group = Group(None, Meter(name, trace, is_worker))
    place = Place(group, trace, report, lambda: bool(asked), kind=kind, devices=devices)
    # The step at hand is finished: the driver looks at `asked` between steps.
    with on_interrupt(lambda: asked.append(True)):
        return program(place)
