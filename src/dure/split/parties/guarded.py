"""Defence of the gradients that leave the holder of the labels, per party.

    concat    each party receives its own gradients, with its own noise
    sum       all parties receive the same gradient with the same noise, so that the mean over
              parties reveals no more than a single copy

The defence protects against each party alone. Parties that pool their gradients learn more if the
join is concat: the noise of each party is independent, so the divergences of Marvell add up.

A party that has the labels goes backward with the true gradients, and so does the tail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dure.randomness.seeds import generator
from dure.split.leakage.defence import Defence, Memory
from dure.split.leakage.guard import CutValue, Guard


class GuardedGradients:
    """Defence that the holder of the labels applies to outgoing gradients.

    others: names of the parties without labels. join: "concat" or "sum". draws: `draws(name, step)`
    returns the generator of the noise for a party at a step, which no other party may know.
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
        """Return the outgoing gradients of a batch, by party; None stays None."""
        leaving = dict(gradients)
        if self.defence.guards != "gradients":
            return leaving
        seen: Tensor | None = None
        for name, guard in self._guards.items():
            own = gradients[name]
            if own is None:
                continue
            # With a sum all parties have the same gradient: independent noise would average out.
            if seen is None or not self.shares_one:
                (seen,) = guard.gradients([own], targets, step)
            leaving[name] = seen.to(own.dtype)
        return leaving

    @property
    def memory(self) -> dict[str, Memory]:
        """State of the defence, by party."""
        return {name: guard.memory for name, guard in self._guards.items()}

    def remember(self, memory: Mapping[str, Memory]) -> None:
        """Restore the state that `memory` returned."""
        for name, guard in self._guards.items():
            guard.memory = memory[name]


def _guard(defence: Defence, name: str, draws: Callable[[str, int], torch.Generator]) -> Guard:
    return Guard(defence, [], [CutValue(0, True)], lambda step: draws(name, step))


def activations_guard(
    defence: Defence, number: int, label_party: int | None, seed: int
) -> Guard | None:
    """Return the defence of the output of a party's head; None if the defence does not guard it."""
    if defence.guards != "activations" or number == label_party:
        return None
    return Guard(
        defence, [CutValue(0, True)], [], lambda step: generator(seed, "defence", number, step)
    )
