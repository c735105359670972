"""Base class of plan entries with checked fields, and the context in which a model is divided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias, get_type_hints

import msgspec

from dure.collectives.group import Group
from dure.parallel.tensor.rng import RngTracker

Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]


class ValidatedEntry:
    """Base class of plan entries: fields reject values of other types with ValueError."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            try:
                # The dataclass is frozen, so a converted value, such as a tuple from a list, is
                # written this way.
                object.__setattr__(self, name, msgspec.convert(value, hint))
            except msgspec.ValidationError as error:
                raise ValueError(f"{type(self).__name__}({name}={value!r}): {error}") from None


@dataclass(frozen=True)
class DivisionContext:
    """Context of a division: group, `overlap` as in `ColumnParallel`, and the model's draws."""

    group: Group
    overlap: bool | None
    draws: RngTracker
