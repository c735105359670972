"""What all that a plan can say has in common: checked fields, and where a model is divided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias, get_type_hints

import msgspec

from dure.collectives.group import Group
from dure.parallel.tensor.draws import Draws

Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]


class Checked:
    """What all kinds have in common: their fields refuse values of other types."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            try:
                # Frozen: a value that is converted, such as a list to a tuple, is put back this
                # way.
                object.__setattr__(self, name, msgspec.convert(value, hint))
            except msgspec.ValidationError as error:
                raise ValueError(f"{type(self).__name__}({name}={value!r}): {error}") from None


@dataclass(frozen=True)
class At:
    """Where a model is divided. overlap: as in `ColumnParallel`. draws: of the whole model."""

    group: Group
    overlap: bool | None
    draws: Draws
