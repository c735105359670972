"""What was asked for on the command line, as a plan."""

from __future__ import annotations

from collections.abc import Sequence

from dure.bench.fit import CALIBRATORS
from dure.bench.plan import CONTENDERS, LADDER, Plan, parse_size

QUICK_SIZES = LADDER[0:7:2]


def plan(
    sizes: Sequence[str] = (),
    ranks: Sequence[int] = (),
    contenders: Sequence[str] = (),
    repeats: int | None = None,
    quick: bool = False,
    fit: bool = False,
) -> Plan:
    """The plan; what is not given has its default, a smaller one if `quick`. Raises ValueError."""
    names = list(contenders or CONTENDERS)
    if fit:
        names += [name for name in CALIBRATORS if name not in names]
    return Plan(
        tuple(parse_size(text) for text in sizes) or (QUICK_SIZES if quick else LADDER),
        tuple(ranks) or ((2, 4) if quick else (2, 4, 8)),
        tuple(names),
        repeats if repeats is not None else 3 if quick else 5,
        0.005 if quick else 0.02,
        0.1 if quick else 0.6,
    )
