"""The plan of a benchmark from the options of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dure.bench.fit import CALIBRATORS
from dure.bench.plan import CONTENDERS, LADDER, BenchPlan, parse_size

# Every second size up to 16 MiB.
QUICK = BenchPlan(sizes=LADDER[0:7:2], ranks=(2, 4), repeats=3, batch=0.005, longest=0.1)


def plan(
    sizes: Sequence[str] = (),
    ranks: Sequence[int] = (),
    contenders: Sequence[str] = (),
    repeats: int | None = None,
    quick: bool = False,
    fit: bool = False,
) -> BenchPlan:
    """Return the plan; options that are not given have their defaults.

    Args:
        sizes: texts such as "64K".
        ranks: numbers of ranks.
        contenders: names of contenders.
        repeats: timed batches per contender and size.
        quick: use smaller defaults.
        fit: add the contenders that the cost model needs.

    Raises:
        ValueError: for options that cannot be measured.
    """
    names = list(contenders or CONTENDERS)
    # The fit needs these contenders.
    if fit:
        names += [name for name in CALIBRATORS if name not in names]
    asked: dict[str, Any] = {
        "sizes": tuple(parse_size(text) for text in sizes),
        "ranks": tuple(ranks),
        "repeats": repeats,
    }
    # Options that are not given keep the plan's own default.
    given = {name: value for name, value in asked.items() if value not in ((), None)}
    usual = QUICK if quick else BenchPlan()
    return replace(usual, contenders=tuple(names), **given)
