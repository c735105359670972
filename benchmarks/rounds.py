"""How contenders are timed in turns: who begins changes from round to round, and the slowest rank's
time counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def quartiles(samples: Sequence[float]) -> dict[str, Any]:
    """The median, the quartiles and the samples themselves."""
    several = samples if len(samples) > 1 else [*samples] * 2
    low, middle, high = statistics.quantiles(several, n=4, method="inclusive")
    return {"median": middle, "quartiles": [low, high], "samples": list(samples)}


def turns(names: Sequence[str], number: int) -> list[str]:
    """The order of round `number`."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def seconds_per_step(
    step: Callable[[], object], steps: int, group: Any, takes_part: bool = True
) -> float:
    """Of the slowest rank, behind a barrier. group: one whose ranks sleep while they wait."""
    if takes_part:
        step()  # what others have pushed out of the caches comes back
    dist.barrier(group)
    started = time.perf_counter()
    for _ in range(steps if takes_part else 0):
        step()
    seconds = torch.tensor((time.perf_counter() - started) / steps, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group)
    return seconds.item()


def seconds_of_a_message(group: Any, elements: int, times: int = 40) -> float:
    """One way between ranks 0 and 1 that wait for it, the median half of a ping-pong. All ranks of
    the group call."""
    tensor = torch.zeros(elements)
    peer = 1 - group.rank
    samples = [0.0]
    for _ in range(times if group.rank < 2 else 0):
        started = time.perf_counter()
        for sends in (group.rank == 0, group.rank == 1):
            if sends:
                group.send(tensor, peer)
            else:
                group.receive(tensor, peer)
        samples.append((time.perf_counter() - started) / 2)
    return float(group.all_gather_values([statistics.median(samples)])[0][0])
