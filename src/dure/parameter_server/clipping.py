"""Clipping of synchronous steps: the norm of a gradient that is distributed over servers.

With staleness 0 the gradient of a step is the mean of all pushes of a clock, and each shard has a
range of it. The owners exchange the squared norms of their ranges, and all clip by the same factor:

    |g|^2 = sum over shards of |g_shard|^2           g_shard <- g_shard · min(1, c / (|g| + 1e-6))

which is `torch.nn.utils.clip_grad_norm_` over the whole gradient. A norm is a function of the
pushes of a clock, so it may arrive late or twice; missing norms are requested again. No worker
pushes for the next clock before all shards have stepped, so only the norms of a single clock are
stored.

    a step of S servers     S · (S - 1) messages without payload
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dure.parameter_server.messages import Norms, ShardStep

PATIENCE = 1.0
"""Seconds between requests of processes for missing norms."""


class GroupClock(NamedTuple):
    """Clock of a group; identifies a step."""

    group: int
    clock: int


class PendingClip(NamedTuple):
    """Step that waits for norms, and the squared norm of its own gradient."""

    step: ShardStep
    square: float


def square_of(gradient: Tensor) -> float:
    """Return the squared norm of a vector."""
    norm = float(torch.linalg.vector_norm(gradient))
    return norm * norm


@torch.no_grad()
def clip_to(largest: float, gradient: Tensor, squares: Mapping[int, float]) -> None:
    """Clip a range of a gradient in place, to the norm `largest`. `squares`.

    By shard, of all ranges.
    """
    norm = math.sqrt(sum(squares[shard] for shard in sorted(squares)))
    scale = largest / (norm + 1e-6)
    # Not "scale < 1": a NaN norm must make the gradient NaN, as in torch.
    if not scale >= 1:
        gradient.mul_(scale)


class NormExchange:
    """A server's squared norms of waiting steps, and the steps whose norms it has sent."""

    def __init__(self) -> None:
        self._known: dict[GroupClock, dict[int, float]] = {}
        self._told: set[GroupClock] = set()
        self.sent = math.inf
        """Time of the last request for norms; infinity if none are missing."""

    def note(self, at: GroupClock, squares: Mapping[int, float]) -> None:
        """Store squared norms of some shards."""
        self._known.setdefault(at, {}).update(squares)

    def of(self, at: GroupClock) -> Mapping[int, float]:
        """Return the known squared norms of a step, by shard."""
        return self._known.get(at, {})

    def is_new(self, at: GroupClock) -> bool:
        """Return whether the norms of a step were not sent yet, and mark them as sent."""
        if at in self._told:
            return False
        self._told.add(at)
        return True

    def keep(self, waiting: Collection[GroupClock], over: Mapping[int, int]) -> None:
        """Drop all norms except those of waiting steps and of clocks after a group's last step."""
        self._told &= set(waiting)
        self._known = {
            at: squares
            for at, squares in self._known.items()
            if at in waiting or at.clock > over.get(at.group, -1)
        }


def norms_at(at: GroupClock, squares: Mapping[int, float], asks: bool = False) -> Norms:
    """Return the message with these norms."""
    return Norms(at.group, at.clock, dict(squares), asks)
