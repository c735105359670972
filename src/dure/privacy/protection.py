"""What all protections have in common: a text, as the command line takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dure.settings import write


@dataclass(frozen=True)
class Protection:
    """Something that keeps from others what clients or examples would give away.

    A frozen dataclass with a text form (`dure.settings`), such as `user-level:1:1.1`.
    """

    name: ClassVar[str]

    def __str__(self) -> str:
        return write(self)
