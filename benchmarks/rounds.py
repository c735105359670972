"""Contenders in turns: another one begins each round, and the slowest rank's time counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def quartiles(samples: Sequence[float]) -> dict[str, Any]:
    """The median, the quartiles and the samples themselves."""
    several = samples if len(samples) > 1 else [*samples] * 2
    low, middle, high = statistics.quantiles(several, n=4, method="inclusive")
    return {"median": middle, "quartiles": [low, high], "samples": list(samples)}


def quartiles_of(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Those of one number of several rows."""
    return quartiles([row[name] for row in rows])


def median_ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def largest_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Between two sets of tensors of the same names, of any of their numbers."""
    return max(float((value - other[name]).abs().max()) for name, value in one.items())


def turns(names: Sequence[str], number: int) -> list[str]:
    """The order of round `number`."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def seconds_per_step(
    step: Callable[[], object], steps: int, group: Any, takes_part: bool = True
) -> float:
    """Of the slowest rank, after a barrier. group: one whose ranks sleep while they wait."""
    if takes_part:
        step()  # brings back what others have pushed out of the caches
    dist.barrier(group)
    started = time.perf_counter()
    for _ in range(steps if takes_part else 0):
        step()
    seconds = torch.tensor((time.perf_counter() - started) / steps, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group)
    return seconds.item()


def seconds_of_a_message(group: Any, elements: int, times: int = 40) -> float:
    """Seconds of a message between ranks 0 and 1 that wait for it: the median half of a ping-pong.

    All ranks of the group call.
    """
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
