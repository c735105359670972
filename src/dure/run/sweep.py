"""Sweeps: which settings of a system, or of its task, are the best of a few.

    grid      every combination of the values given, in their order
    random    so many trials; each setting is drawn by itself, from its values or from a range
              (J. Bergstra and Y. Bengio, "Random Search for Hyper-Parameter Optimization", JMLR 13,
              2012: where few of many settings matter, draws try more values of those than a grid)

A trial is a system of a comparison (`dure.run.compare`): its folder, its seeds and how it goes on
are those of a comparison. Trials are a function of the seed alone. What is chosen is chosen by a
validation metric, where there is one; test data that choose flatter what they have chosen.
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
from dure.run.registry import divided


@dataclass(frozen=True)
class Range:
    """From one number to another: uniform, or of which the logarithm is, or whole numbers alone."""

    low: float
    high: float
    kind: str = "uniform"

    def drawn(self, chance: random.Random) -> float | int:
        """One of them."""
        if self.kind == "int":
            return chance.randint(int(self.low), int(self.high))
        if self.kind == "log":
            return math.exp(chance.uniform(math.log(self.low), math.log(self.high)))
        return chance.uniform(self.low, self.high)


Values = Sequence[Any] | Range
"""Those that a setting may have."""


def parse_values(name: str, text: str) -> Values:
    """Values of a setting from its text: "0.1,0.01", "log:1e-4:0.1", "uniform:0:1", "int:8:64".

    Values stay texts, since what they are depends on the setting. Raises ValueError for what is
    none.
    """
    kind, _, rest = text.partition(":")
    if kind not in ("uniform", "log", "int"):
        return _parts(name, text)
    try:
        low, high = map(float, rest.split(":"))
    except ValueError:
        raise ValueError(
            f"{name}={text}: a range is {kind}:LOW:HIGH, such as {kind}:1:10"
        ) from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"{name}={text}: the range has to go from a number to a larger one")
    if kind == "log" and low <= 0:
        raise ValueError(f"{name}={text}: a logarithm is of numbers above 0")
    if kind == "int" and not (low.is_integer() and high.is_integer()):
        raise ValueError(f"{name}={text}: these are no whole numbers")
    return Range(low, high, kind)


def _parts(name: str, text: str) -> Sequence[str]:
    parts = divided(text)
    if not all(parts):
        raise ValueError(f"{name}={text}: a value is missing")
    if len(set(parts)) < len(parts):
        raise ValueError(f"{name}={text}: a value is given twice")
    return parts


def trials(
    space: Mapping[str, Values], draws: int | None = None, seed: int = 0
) -> list[dict[str, Any]]:
    """The settings of each trial.

    space: the values of each setting. draws: so many trials, drawn; None is the whole grid.
    Raises ValueError for a space or a number that makes none.
    """
    if not space:
        raise ValueError("a sweep needs at least one setting with several values")
    if draws is None:
        ranges = [name for name, values in space.items() if isinstance(values, Range)]
        if ranges:
            raise ValueError(
                f"{ranges[0]} is a range, which no grid goes through: say how many trials are drawn"
            )
        grid = itertools.product(*(values for values in space.values()))  # type: ignore[arg-type]
        return [dict(zip(space, values, strict=True)) for values in grid]
    if not isinstance(draws, int) or isinstance(draws, bool) or draws < 1:
        raise ValueError(f"the number of trials is {shown(draws)}, but it is at least 1")
    return _drawn(space, draws, seed)


def _drawn(space: Mapping[str, Values], draws: int, seed: int) -> list[dict[str, Any]]:
    """No trial twice: of a small grid there may be fewer than asked."""
    found: list[dict[str, Any]] = []
    # Of its own, and seeded by text: the same on every machine, whatever else is drawn.
    chance = random.Random(f"dure sweep {seed}")
    # Where all values are few, a draw often meets one that is there; in the end it gives up.
    for _ in range(20 * draws):
        if len(found) == draws:
            break
        trial = {
            name: values.drawn(chance) if isinstance(values, Range) else chance.choice(values)
            for name, values in space.items()
        }
        if trial not in found:
            found.append(trial)
    return found


@dataclass(frozen=True)
class Ranked:
    """A trial and what it reached: the mean over its seeds of the metric that judges."""

    label: str
    value: float
    runs: Sequence[Run]


def judge_of(runs: Sequence[Run], metric: str | None = None) -> str:
    """The metric by which trials are judged.

    metric: the one asked for. By default a validation metric, then one of test data; what rises
    comes first. Raises ValueError if no run has it.
    """
    there: dict[str, None] = dict.fromkeys(
        name for run in runs for name in run.summary["best"] if not is_spread(name)
    )
    if metric is not None:
        if metric not in there:
            raise ValueError(f"no trial measured {metric!r}; there is {', '.join(there)}")
        return metric
    if not there:
        raise ValueError(
            "no trial measured anything: the task has neither validation nor test data"
        )
    return min(there, key=judging)


def ranked(runs: Sequence[Run], metric: str) -> list[Ranked]:
    """The trials, the best first; those without a finite value are left out."""
    by_label: dict[str, list[Run]] = {}
    for run in runs:
        by_label.setdefault(run.label, []).append(run)
    seeds = max(map(len, by_label.values()), default=0)
    found = []
    for label, group in by_label.items():
        values = [_value_of(run, metric) for run in group]
        told = spread([value for value in values if value is not None])
        # A seed that came to nothing, or that failed, counts against its trial.
        if told is not None and None not in values and len(group) == seeds:
            found.append(Ranked(label, told.mean, group))
    return sorted(found, key=lambda one: one.value, reverse=not lower_is_better(metric))


def _value_of(run: Run, metric: str) -> float | None:
    """What the model has that the run would be taken for: the best one, where it was chosen by
    this metric."""
    best = run.summary.get("best_model") or {}
    value: float | None = best.get("value") if best.get("monitor") == metric else None
    return run.summary.get(metric) if value is None else value
