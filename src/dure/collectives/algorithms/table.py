"""The all-reduces that dure brings along.

One more is a file, which declares an `ALL_REDUCE`, and a line here.
"""

from __future__ import annotations

from importlib import import_module

from dure.collectives.algorithms.algorithm import AllReduce

_FILES = (
    "dure.collectives.algorithms.ring",
    "dure.collectives.algorithms.master",
    "dure.collectives.algorithms.one_shot",
    "dure.collectives.algorithms.tree",
    "dure.collectives.algorithms.halving_doubling",
    "dure.collectives.algorithms.hierarchical",
    "dure.collectives.algorithms.native",
)

# By name and not by an import of each, so that the list is the only place that knows them.
_DECLARED: tuple[AllReduce, ...] = tuple(import_module(file).ALL_REDUCE for file in _FILES)

ALL_REDUCES: dict[str, AllReduce] = {declared.name: declared for declared in _DECLARED}
"""Every all-reduce by its name, in the order in which they are listed; `auto` is one of these."""

PREDICTABLE: dict[str, AllReduce] = {
    name: declared for name, declared in ALL_REDUCES.items() if declared.path is not None
}
"""Those whose cost is known: a backend's own all-reduce does not tell what it does."""
