"""World of one worker in the calling process, without other processes or communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from dure.collectives.group import Group
from dure.contracts.world import Kind, RankContext
from dure.machine.cores import threads_under_quota
from dure.machine.threads import threads
from dure.record.meter import Meter
from dure.record.trace import Trace
from dure.worlds.interrupts import on_interrupt

Value = TypeVar("Value")


def run_in_process(
    program: Callable[[RankContext], Value],
    report: Callable[[dict[str, Any]], None],
    name: str,
    kind: Kind = "ranks",
    devices: tuple[torch.device, ...] = (torch.device("cpu"),),
    is_worker: bool = True,
) -> Value:
    """Run `program` in this process. Ctrl-C requests a stop after the current step.

    Args:
        program: Function that trains, called with the rank's context.
        report: Function that receives the events of the run.
        name: Name of the process in the trace, such as "rank 0".
        kind: Kind of the workers: "ranks", "clients" or "threads".
        devices: Devices of the worker.
        is_worker: Whether the steps that the meter counts are training steps.

    Returns:
        The result of `program`.
    """
    trace = Trace()
    asked: list[bool] = []
    # No process group: a group of one rank sends nothing.
    group = Group(None, Meter(name, trace, is_worker))
    context = RankContext(group, trace, report, lambda: bool(asked), kind=kind, devices=devices)
    # The current step completes: the driver checks `asked` between steps.
    own_threads = threads(threads_under_quota(torch.get_num_threads()))
    with own_threads, on_interrupt(lambda: asked.append(True)):
        return program(context)
