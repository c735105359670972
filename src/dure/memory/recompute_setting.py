"""Setting of the modules to recompute in backward, such as `layers.*`, or `all`."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from dure.errors import suggestion

ALL = "all"
"""Choice with the smallest peak memory."""


@dataclass(frozen=True)
class Recompute:
    """Patterns of module names, such as layers.*; none by default.

    ("all",) chooses the modules with which a step has the smallest peak memory.
    """

    patterns: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def __str__(self) -> str:
        return "+".join(self.patterns) if self.patterns else "none"

    @property
    def all(self) -> bool:
        """Whether dure chooses the modules."""
        return self.patterns == (ALL,)

    def names(self, model: nn.Module) -> tuple[str, ...]:
        """Return the modules that match the patterns, without modules inside others of them.

        Raises ValueError for a pattern without a match.
        """
        known = [name for name, _ in model.named_modules() if name]
        found: list[str] = []
        for pattern in self.patterns:
            matching = fnmatch.filter(known, pattern)
            if not matching:
                raise ValueError(
                    f"recompute: there is no module {pattern!r}{suggestion(pattern, known)}"
                )
            found += matching
        return outermost(name for name in known if name in found)


def outermost(names: Any) -> tuple[str, ...]:
    """Return the names that are not inside another of the names, in order."""
    listed = list(names)
    return tuple(
        name for name in listed if not any(name.startswith(f"{other}.") for other in listed)
    )


def as_recompute(value: Recompute | Sequence[str] | str | bool) -> Recompute:
    """Convert patterns, their text (`layers.*+head`, or with commas), or a bool to a setting.

    Raises ValueError for other values.
    """
    if isinstance(value, Recompute):
        return value
    if isinstance(value, bool):
        return Recompute((ALL,) if value else ())
    if isinstance(value, str):
        words = [word.strip() for word in value.replace(",", "+").split("+")]
        return Recompute() if words == ["none"] else as_recompute(words)
    patterns = tuple(value)
    if not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise ValueError(
            f"recompute is {value!r}, but it has to be names of modules, such as layers.*, or all"
        )
    if ALL in patterns and len(patterns) > 1:
        raise ValueError(
            f"recompute: {ALL} lets dure choose and cannot be combined with other names"
        )
    return Recompute(patterns)
