"""What all protections have in common: a text, as the command line takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dure.machine.extras import check_extra
from dure.settings import write

NEEDS = ("cryptography", "dp_accounting")
"""The libraries of the extra "privacy"."""


def check_installed() -> None:
    """Raises ValueError, before any work, where what protections need is not installed."""
    check_extra("privacy", "privacy", NEEDS)


@dataclass(frozen=True)
class Protection:
    """Something that keeps from others what clients or examples would give away.

    A frozen dataclass with a text form (`dure.settings`), such as `user-level:1:1.1`.
    """

    name: ClassVar[str]

    def __str__(self) -> str:
        return write(self)
