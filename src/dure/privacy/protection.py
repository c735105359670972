"""Base class of protections: a text form, as for the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dure.machine.extras import check_extra
from dure.settings import write

NEEDS = ("cryptography", "dp_accounting")
"""Libraries of the extra "privacy"."""


def check_installed() -> None:
    """Raise ValueError, before any work, if a library for protections is not installed."""
    check_extra("privacy", "privacy", NEEDS)


@dataclass(frozen=True)
class Protection:
    """Protection of clients' or examples' data against other parties.

    A subclass is a frozen dataclass with a text form (`dure.settings`), such as `user-level:1:1.1`.
    """

    name: ClassVar[str]

    def __str__(self) -> str:
        return write(self)
