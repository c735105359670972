"""Comparison of the parameters that every rank of a group should have in common.

Ranks that begin with the same weights and add the same updates keep the same weights. Two causes
let the weights diverge without a visible symptom: a forward pass that changes weights according to
its examples (data-dependent initialisation, a normalised embedding row, an average of activations),
and a rank that loads or clips weights alone.

Each rank sends two numbers for each parameter: the sum of the elements and the sum of their
magnitudes. Ranks compare after passes 1, 2, 4, 8 and so on, so that the cost is negligible; a
divergence that begins in pass t is found before pass 2t ends. The meter does not count these
messages.

Processors of different kinds may round the same update differently. Such differences add up as a
random walk: about √t roundings after t passes. Differences up to ten times that are accepted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from dure.collectives.group import Group

_ROUNDINGS = 10
"""Multiple of the expected rounding error (√t roundings after t passes) that is accepted."""

_PART = 1 << 16
"""Elements that are summed at once: half a megabyte in float64, which fits a cache."""


class ReplicaCheck:
    """Parameters of a model that all ranks of a group have in common."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], group: Group) -> None:
        self.named = list(named)
        self.group = group
        self.passes = 0

    def passed(self) -> None:
        """Compare the parameters of all ranks after a pass. Every rank calls this method.

        Only calls 1, 2, 4, 8 and so on compare. Raises ValueError, on every rank, if parameters
        differ.
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
                    f"the parameter {name} differs between rank {', '.join(map(str, apart))} and "
                    "rank 0: forward passes change it depending on their examples, or one rank "
                    "changed it alone. Initialise from data or change weights before training "
                    "and equally on all ranks, or use single-worker"
                )


class MutationGuard:
    """Parameters in the memory of several threads, where each thread would apply a change.

    The version counters of torch are compared in every pass. Changes that torch does not count,
    such as a write through `parameter.data`, are found by comparing sums, after passes 1, 2, 4 and
    so on.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.named = list(named)
        self.passes = 0
        self._seen: list[object] = []

    def begin(self) -> None:
        """Record the state of the parameters at the beginning of a pass."""
        self.passes += 1
        self._seen = self._now()

    def end(self) -> None:
        """Compare the parameters at the end of a pass.

        Raises ValueError if the pass changed a parameter.
        """
        for (name, _), before, now in zip(self.named, self._seen, self._now(), strict=True):
            if before != now:
                raise ValueError(
                    f"forward passes change the parameter {name}, which all workers of this "
                    "process share in memory: use Processes or single-worker"
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
    """Return the sum of a parameter's elements and the sum of their magnitudes, in float64."""
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
    """Return whether the sums of two ranks differ by more than `allowed` times the magnitudes."""
    if not all(map(math.isfinite, (*one, *other))):
        # NaN is unequal to itself: compare the text of the numbers instead
        return [str(number) for number in one] != [str(number) for number in other]
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) > allowed * other[1]
