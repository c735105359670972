"""Privacy settings of a federation: the field `privacy` of a strategy, as a value and as text.

The text names the protections, separated by "/": `secure-aggregation/user-level:1:1.1`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dure.federated.privacy.secure_aggregation.settings import (
    SecureAggregation,
    SecureAggregationPlus,
)
from dure.federated.privacy.user_level.settings import UserLevel
from dure.privacy.dp_sgd import DPSGD
from dure.privacy.protection import Protection
from dure.settings import read

PROTECTIONS: dict[str, type[Protection]] = {
    kind.name: kind for kind in (SecureAggregation, SecureAggregationPlus, UserLevel, DPSGD)
}
"""All protections, by the name that their text begins with."""

NONE = "none"
"""Text for no protection."""


@dataclass(frozen=True)
class Privacy:
    """Protections of a federation; all None means no protection.

    Args:
        secure: secure aggregation: the server sees only sums.
        user: differential privacy of clients.
        example: differential privacy of examples.
    """

    secure: SecureAggregation | None = None
    user: UserLevel | None = None
    example: DPSGD | None = None

    @property
    def counts_passes(self) -> bool:
        """Whether clients report passes over their data in place of samples.

        The numbers of examples then stay secret, even in sums.
        """
        return self.secure is not None and self.user is not None

    def __str__(self) -> str:
        there = [one for one in (self.secure, self.user, self.example) if one is not None]
        return "/".join(map(str, there)) or NONE


NOTHING = Privacy()
"""Default: no protection. A value, not a factory: the command line needs a default of the field's
class.
"""


def privacy_of(given: object) -> Privacy:
    """Return the privacy settings from a value, a protection, a sequence of protections, or text.

    Raises ValueError for any other type, and for two protections of a kind.
    """
    if isinstance(given, Privacy):
        return given
    if isinstance(given, str):
        return parse_privacy(given)
    pieces = given if isinstance(given, Sequence) else [given]
    found: dict[str, Protection] = {}
    for piece in pieces:
        kind = _kind(piece)
        if kind in found:
            raise ValueError(f"privacy has both {found[kind]} and {piece}: give one")
        found[kind] = piece  # type: ignore[assignment]
    return Privacy(**found)  # type: ignore[arg-type]


def _kind(piece: object) -> str:
    for name, kind in (("secure", SecureAggregation), ("user", UserLevel), ("example", DPSGD)):
        if isinstance(piece, kind):
            return name
    raise ValueError(
        f"privacy has {piece!r}, but its parts have to be {', '.join(PROTECTIONS)}; such as "
        "secure-aggregation/user-level:1:1.1"
    )


def parse_privacy(text: str) -> Privacy:
    """Return the privacy settings of a text; the inverse of `str`. Raises ValueError for others."""
    if text == NONE:
        return NOTHING
    return privacy_of([read(one, PROTECTIONS, "privacy") for one in text.split("/")])
