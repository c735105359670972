"""How contenders are timed in turns: who begins changes from round to round, and the slowest rank's time counts."""

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


def seconds_per_step(step: Callable[[], object], steps: int, group: Any, takes_part: bool = True) -> float:
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
