"""Replicas stay alike: what every rank holds whole is compared now and then.

Ranks that begin with the same weights and add the same updates keep the same weights. A forward
pass that changes weights by the examples that it sees (an initialisation that looks at data, a row
that is normalised when it is looked up, an average of activations) takes them apart, and so does a
rank that alone loads or clips weights. Nothing else would show it.

Each rank says of each parameter two numbers, its sum and the sum of its magnitudes. That is done
after passes 1, 2, 4, 8 and so on, so that it costs next to nothing, and what began in a pass is
found before twice as many are over. Bookkeeping, which the meter does not count.

Processors of several kinds may round one update differently. Such differences add up as a random
walk: after t passes they are about √t roundings, and ten times as much is taken for alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from dure.collectives.group import Group

_ROUNDINGS = 10

_PART = 1 << 16
"""Elements that are summed at once: those of half a megabyte in float64, which a cache holds."""


class Alike:
    """The parameters of a model that all ranks of a group hold alike."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], group: Group) -> None:
        self.named = list(named)
        self.group = group
        self.passes = 0

    def passed(self) -> None:
        """After a pass of all ranks, when all hold the same; every rank calls it.

        Raises ValueError, on every rank, if their parameters differ.
        """
        self.passes += 1
        if _is_power_of_two(self.passes) and self.group.size > 1 and self.named:
            self._compare()

    def _compare(self) -> None:
        mine = [number for _, parameter in self.named for number in sums_of(parameter)]
        rows = self.group.all_gather_values(mine, "comparison of weights")
        for position, (name, parameter) in enumerate(self.named):
            here = [row[2 * position : 2 * position + 2] for row in rows]
            allowed = _ROUNDINGS * _rounding(parameter.dtype) * math.sqrt(self.passes)
            apart = [rank for rank, sums in enumerate(here) if _differ(sums, here[0], allowed)]
            if apart:
                raise ValueError(
                    f"the parameter {name} is another on rank {', '.join(map(str, apart))} than on "
                    f"rank 0: forward passes change it by the examples that they see, or one rank "
                    f"changed it alone. Initialise from data, or change weights, before training "
                    f"and on all ranks alike, or take single-worker"
                )


class Still:
    """Parameters that several threads read in one memory: a change would be made by each of them.

    Torch counts most changes, and the counters are compared in every pass; what it does not count,
    such as what is written through `parameter.data`, is found by sums, after passes 1, 2, 4 and so
    on.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.named = list(named)
        self.passes = 0
        self._seen: list[object] = []

    def begin(self) -> None:
        """A pass begins."""
        self.passes += 1
        self._seen = self._now()

    def end(self) -> None:
        """It ends. Raises ValueError if it has changed a parameter."""
        for (name, _), before, now in zip(self.named, self._seen, self._now(), strict=True):
            if before != now:
                raise ValueError(
                    f"forward passes change the parameter {name}, which all workers of this "
                    f"process use in one memory: take Processes, or single-worker"
                )

    def _now(self) -> list[object]:
        sums = _is_power_of_two(self.passes)
        return [
            (parameter._version, list(map(str, sums_of(parameter))) if sums else None)
            for _, parameter in self.named
        ]


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


@torch.no_grad()
def sums_of(parameter: nn.Parameter) -> tuple[float, float]:
    """The sum of a parameter's elements and that of their magnitudes."""
    values = parameter.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    total = 0.0
    magnitudes = 0.0
    # Part by part: a whole parameter in float64 takes ten times as long.
    for part in torch.split(values.reshape(-1), _PART):
        doubled = part.double()
        total += float(doubled.sum())
        magnitudes += float(doubled.abs().sum())
    return total, magnitudes


def _rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def _differ(one: Sequence[float], other: Sequence[float], allowed: float) -> bool:
    """Whether two ranks' numbers differ by more than `allowed` of the magnitudes."""
    if not all(map(math.isfinite, (*one, *other))):
        # NaN is alike everywhere, and nothing more can be said of it
        return [str(number) for number in one] != [str(number) for number in other]
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) > allowed * other[1]
