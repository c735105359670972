"""One worker in the calling process: nothing is started, nothing is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from dure.collectives.group import Group
from dure.contracts.strategy import Kind, Place
from dure.machine.cores import threads_under_quota
from dure.machine.threads import threads
from dure.record.meter import Meter
from dure.record.trace import Trace
from dure.worlds.interrupts import on_interrupt

Value = TypeVar("Value")


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
    own_threads = threads(threads_under_quota(torch.get_num_threads()))
    with own_threads, on_interrupt(lambda: asked.append(True)):
        return program(place)
