"""Clipping of synchronous steps: the norm of a gradient that lies at several servers.

With staleness 0 the gradient of a step is the mean of all pushes of a clock, and each shard has a
range of it. The owners tell each other the squared norms of their ranges, and then all clip alike:

    |g|^2 = sum over shards of |g_shard|^2           g_shard <- g_shard · min(1, c / (|g| + 1e-6))

which is `torch.nn.utils.clip_grad_norm_` over the whole gradient. A norm is a function of the
pushes of a clock, so it may come late or twice; what is missing is asked for again. Nobody pushes
for the next clock before all shards have stepped, so the norms of one clock are all that is kept.

    a step of S servers     S · (S - 1) messages without payload
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dure.parameter_server.messages import Norms, Step

PATIENCE = 1.0
"""Seconds after which processes ask again for norms that they wait for."""


class At(NamedTuple):
    """A clock of a group: that of a step."""

    group: int
    clock: int


class Unclipped(NamedTuple):
    """A step that waits for norms, and the squared norm of its own gradient."""

    step: Step
    square: float


def square_of(gradient: Tensor) -> float:
    """The squared norm of a vector."""
    norm = float(torch.linalg.vector_norm(gradient))
    return norm * norm


@torch.no_grad()
def clip_to(largest: float, gradient: Tensor, squares: Mapping[int, float]) -> None:
    """Clips a range of a gradient, in place. squares: of all ranges, by shard."""
    norm = math.sqrt(sum(squares[shard] for shard in sorted(squares)))
    scale = largest / (norm + 1e-6)
    # Not "scale < 1": a norm that is no number makes the gradient none, as in torch.
    if not scale >= 1:
        gradient.mul_(scale)


class NormExchange:
    """Norms that a server has of steps that wait, and whom it has told of its own."""

    def __init__(self) -> None:
        self._known: dict[At, dict[int, float]] = {}
        self._told: set[At] = set()
        self.sent = math.inf
        """When it was asked for norms last; infinity where none are missing."""

    def note(self, at: At, squares: Mapping[int, float]) -> None:
        """These are the squared norms of some shards."""
        self._known.setdefault(at, {}).update(squares)

    def of(self, at: At) -> Mapping[int, float]:
        """The squared norms of a step that are known, by shard."""
        return self._known.get(at, {})

    def is_new(self, at: At) -> bool:
        """Whether others were not told yet of the norms of a step; they are told now."""
        if at in self._told:
            return False
        self._told.add(at)
        return True

    def keep(self, waiting: Collection[At], over: Mapping[int, int]) -> None:
        """Forgets all but the steps that wait, and those of later clocks than a group's last."""
        self._told &= set(waiting)
        self._known = {
            at: squares
            for at, squares in self._known.items()
            if at in waiting or at.clock > over.get(at.group, -1)
        }


def norms_at(at: At, squares: Mapping[int, float], asks: bool = False) -> Norms:
    """The message that tells norms."""
    return Norms(at.group, at.clock, dict(squares), asks)
