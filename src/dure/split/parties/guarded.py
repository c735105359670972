"""The gradients that leave the holder of the labels, as parties may see them.

    concat    each party is sent gradients of its own, with noise of its own
    sum       all are sent the same gradient, with the same noise: their mean tells no more

So a defence holds for each party alone. Parties who pool what they are sent know more where
activations are joined by concat: as the noise is drawn apart, the divergences of Marvell add up.

A party that has the labels goes backward with the true gradients, and so does the tail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dure.randomness.seeds import generator
from dure.split.leakage.defence import Defence, Memory
from dure.split.leakage.guard import Crossing, Guard


class GuardedGradients:
    """A defence at work for whoever has the labels.

    others: the parties who have none. draws: from where the noise of a step for one of them is
    drawn, which nobody else may know.
    """

    def __init__(
        self,
        defence: Defence,
        others: Sequence[str],
        join: str,
        draws: Callable[[str, int], torch.Generator],
    ) -> None:
        self.defence = defence
        self.shares_one = join == "sum"
        self._guards = {name: _guard(defence, name, draws) for name in others}

    def gradients(
        self, gradients: Mapping[str, Tensor | None], targets: Any, step: int
    ) -> dict[str, Tensor | None]:
        """Those of a batch, of all parties by name, as they leave; None stays None."""
        leaving = dict(gradients)
        if self.defence.guards != "gradients":
            return leaving
        seen: Tensor | None = None
        for name, guard in self._guards.items():
            own = gradients[name]
            if own is None:
                continue
            if seen is None or not self.shares_one:
                (seen,) = guard.gradients([own], targets, step)
            leaving[name] = seen.to(own.dtype)
        return leaving

    @property
    def memory(self) -> dict[str, Memory]:
        """What the defence remembers, by party."""
        return {name: guard.memory for name, guard in self._guards.items()}

    def remember(self, memory: Mapping[str, Memory]) -> None:
        """The inverse of `memory`."""
        for name, guard in self._guards.items():
            guard.memory = memory[name]


def _guard(defence: Defence, name: str, draws: Callable[[str, int], torch.Generator]) -> Guard:
    return Guard(defence, [], [Crossing(0, True)], lambda step: draws(name, step))


def activations_guard(
    defence: Defence, number: int, label_party: int | None, seed: int
) -> Guard | None:
    """The defence of what leaves the head of a party; None where nothing is guarded there."""
    if defence.guards != "activations" or number == label_party:
        return None
    return Guard(
        defence, [Crossing(0, True)], [], lambda step: generator(seed, "defence", number, step)
    )
