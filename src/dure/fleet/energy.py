"""Energy of a client's device: joules per operation, and per byte of its link.

    joules = operations · PER_OPERATION + down · PER_BYTE_DOWN + up · PER_BYTE_UP

Text forms: `none`, which counts nothing, and `joules:PER_OPERATION:PER_BYTE_DOWN:PER_BYTE_UP`, such
as `joules:1e-10:2e-6:9e-6`. There is no default: the numbers differ by orders of magnitude between
devices and links, so measure yours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from dure.arguments import NamedSettings, at_least
from dure.settings import listed, read, write


@dataclass(frozen=True)
class Energy(NamedSettings):
    """Base class of energy settings, with a name, a text form, and `joules`."""

    def joules(self, operations: float, down: float, up: float) -> float | None:
        """Return the joules of operations and of bytes down and up; None if not counted."""
        raise NotImplementedError

    def __str__(self) -> str:
        """Return the text that `parse_energy` reads."""
        return write(self)


@dataclass(frozen=True)
class NoEnergy(Energy):
    """No energy count."""

    name: ClassVar[str] = "none"

    def joules(self, operations: float, down: float, up: float) -> float | None:
        return None


@dataclass(frozen=True)
class Joules(Energy):
    """Equal energy for all devices: joules per operation, per byte received, and per byte sent."""

    name: ClassVar[str] = "joules"
    per_operation: float = field(default=0.0, metadata=at_least(0, finite=True))
    per_byte_down: float = field(default=0.0, metadata=at_least(0, finite=True))
    per_byte_up: float = field(default=0.0, metadata=at_least(0, finite=True))

    def joules(self, operations: float, down: float, up: float) -> float | None:
        return operations * self.per_operation + down * self.per_byte_down + up * self.per_byte_up


ENERGIES: dict[str, type[Energy]] = listed(globals(), Energy)
"""Built-in settings by the name with which their text form begins."""


def parse_energy(text: str) -> Energy:
    """Return the energy setting that `text` names; raise ValueError for any other text."""
    return read(text, ENERGIES, "energy setting", Energy)
