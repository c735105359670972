"""All-reduces of dure.

A further all-reduce is a file that declares an `ALL_REDUCE`, and a line here.
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

# Imported by name, so that this list is the only place to change for a new algorithm.
_DECLARED: tuple[AllReduce, ...] = tuple(import_module(file).ALL_REDUCE for file in _FILES)

ALL_REDUCES: dict[str, AllReduce] = {declared.name: declared for declared in _DECLARED}
"""Every all-reduce by name, in the order of lists; `auto` chooses among them."""

PREDICTABLE: dict[str, AllReduce] = {
    name: declared for name, declared in ALL_REDUCES.items() if declared.path is not None
}
"""All-reduces with a known cost; the cost of a backend's own all-reduce is unknown."""
