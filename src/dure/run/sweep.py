"""Sweeps: find the best settings of a strategy or its task among several.

    grid      every combination of the values given, in their order
    random    a number of trials; each setting is drawn independently, from its values or a range
              (J. Bergstra and Y. Bengio, "Random Search for Hyper-Parameter Optimization", JMLR 13,
              2012: if few of many settings matter, random trials try more values of those settings
              than a grid)

A trial is a system of a comparison (`dure.run.compare`), with the same folders, seeds and resuming.
Trials are a function of the seed alone. The best trial is chosen by a validation metric if there is
one; a choice by test data overestimates the chosen trial.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dure.arguments import shown
from dure.record.history import is_spread, judging, lower_is_better
from dure.record.run import Run
from dure.record.spread import spread
from dure.run.registry import split_settings


@dataclass(frozen=True)
class ValueRange:
    """A range of values: uniform, uniform in the logarithm, or whole numbers.

    low, high: bounds; whole numbers include both. kind: "uniform", "log" or "int".
    """

    low: float
    high: float
    kind: str = "uniform"

    def drawn(self, chance: random.Random) -> float | int:
        """Return a random value of the range."""
        if self.kind == "int":
            return chance.randint(int(self.low), int(self.high))
        if self.kind == "log":
            return math.exp(chance.uniform(math.log(self.low), math.log(self.high)))
        return chance.uniform(self.low, self.high)


Values = Sequence[Any] | ValueRange
"""Possible values of a setting."""


def parse_values(name: str, text: str) -> Values:
    """Parse the values of a setting: "0.1,0.01", "log:1e-4:0.1", "uniform:0:1", "int:8:64".

    Listed values stay texts, since their type depends on the setting. Raises ValueError for
    malformed text.
    """
    kind, _, rest = text.partition(":")
    if kind not in ("uniform", "log", "int"):
        return _parts(name, text)
    try:
        low, high = map(float, rest.split(":"))
    except ValueError:
        raise ValueError(
            f"{name}={text}: write a range as {kind}:LOW:HIGH, such as {kind}:1:10"
        ) from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"{name}={text}: the range has to go from a number to a larger one")
    if kind == "log" and low <= 0:
        raise ValueError(f"{name}={text}: a logarithmic range needs numbers above 0")
    if kind == "int" and not (low.is_integer() and high.is_integer()):
        raise ValueError(f"{name}={text}: these are not integers")
    return ValueRange(low, high, kind)


def _parts(name: str, text: str) -> Sequence[str]:
    parts = split_settings(text)
    if not all(parts):
        raise ValueError(f"{name}={text}: a value is missing")
    if len(set(parts)) < len(parts):
        raise ValueError(f"{name}={text}: a value is given twice")
    return parts


def trials(
    space: Mapping[str, Values], draws: int | None = None, seed: int = 0
) -> list[dict[str, Any]]:
    """Return the settings of each trial.

    space: values of each setting. draws: number of random trials; None takes the whole grid.
    Raises ValueError for an empty space, a range in a grid, or a number of trials below 1.
    """
    if not space:
        raise ValueError("a sweep needs at least one setting with several values")
    if draws is None:
        ranges = [name for name, values in space.items() if isinstance(values, ValueRange)]
        if ranges:
            raise ValueError(
                f"{ranges[0]} is a range, which a grid cannot enumerate: give the number of "
                "trials to draw"
            )
        grid = itertools.product(*(values for values in space.values()))  # type: ignore[arg-type]
        return [dict(zip(space, values, strict=True)) for values in grid]
    if not isinstance(draws, int) or isinstance(draws, bool) or draws < 1:
        raise ValueError(f"the number of trials is {shown(draws)}, but it has to be 1 or more")
    return _drawn(space, draws, seed)


def _drawn(space: Mapping[str, Values], draws: int, seed: int) -> list[dict[str, Any]]:
    """Return distinct random trials; a small space may have fewer than requested."""
    found: list[dict[str, Any]] = []
    # A generator of its own, seeded by text: the same trials on every machine.
    chance = random.Random(f"dure sweep {seed}")
    # In a small space most draws are duplicates, so the number of draws is bounded.
    for _ in range(20 * draws):
        if len(found) == draws:
            break
        trial = {
            name: values.drawn(chance) if isinstance(values, ValueRange) else chance.choice(values)
            for name, values in space.items()
        }
        if trial not in found:
            found.append(trial)
    return found


@dataclass(frozen=True)
class RankedTrial:
    """A trial and its result: the mean over its seeds of the metric that ranks the trials."""

    label: str
    value: float
    runs: Sequence[Run]


def judge_of(runs: Sequence[Run], metric: str | None = None) -> str:
    """Return the metric that ranks the trials.

    metric: the requested metric. By default a validation metric precedes a test metric, and a
    metric that rises precedes a metric that falls. Raises ValueError if no run has the metric.
    """
    there: dict[str, None] = dict.fromkeys(
        name for run in runs for name in run.summary["best"] if not is_spread(name)
    )
    if metric is not None:
        if metric not in there:
            raise ValueError(f"no trial measured {metric!r}; available metrics: {', '.join(there)}")
        return metric
    if not there:
        raise ValueError("no trial has a metric: the task has neither validation nor test data")
    return min(there, key=judging)


def ranked(runs: Sequence[Run], metric: str) -> list[RankedTrial]:
    """Return the trials, best first, without trials that lack a finite value."""
    by_label: dict[str, list[Run]] = {}
    for run in runs:
        by_label.setdefault(run.label, []).append(run)
    seeds = max(map(len, by_label.values()), default=0)
    found = []
    for label, group in by_label.items():
        values = [_value_of(run, metric) for run in group]
        told = spread([value for value in values if value is not None])
        # A trial with a failed or diverged seed is not ranked.
        if told is not None and None not in values and len(group) == seeds:
            found.append(RankedTrial(label, told.mean, group))
    return sorted(found, key=lambda one: one.value, reverse=not lower_is_better(metric))


def _value_of(run: Run, metric: str) -> float | None:
    """Return the run's value of the metric; that of the best model if the metric chose it."""
    best = run.summary.get("best_model") or {}
    value: float | None = best.get("value") if best.get("monitor") == metric else None
    return run.summary.get(metric) if value is None else value
