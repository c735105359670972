"""What a federation protects: `privacy` of a strategy, as a value and as text.

A text names protections, with "/" between them: `secure-aggregation/user-level:1:1.1`.
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
"""Every protection by the name its text form begins with."""

NONE = "none"
"""The text of no protection."""


@dataclass(frozen=True)
class Privacy:
    """What a federation protects; None of each is nothing.

    secure: the server sees sums alone. user: differential privacy of clients. example: of examples.
    """

    secure: SecureAggregation | None = None
    user: UserLevel | None = None
    example: DPSGD | None = None

    @property
    def counts_passes(self) -> bool:
        """Whether samples are passes of clients over their data.

        How many examples they have is then told to nobody, not even in sums.
        """
        return self.secure is not None and self.user is not None

    def __str__(self) -> str:
        there = [one for one in (self.secure, self.user, self.example) if one is not None]
        return "/".join(map(str, there)) or NONE


NOTHING = Privacy()
"""The default. Not a factory: a command line takes one of the field's own class for no default."""


def privacy_of(given: object) -> Privacy:
    """A privacy, of one, of a protection, of several, or of a text.

    Raises ValueError for anything else, and for two of a kind.
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
            raise ValueError(f"privacy has {found[kind]} and {piece}: give one of them")
        found[kind] = piece  # type: ignore[assignment]
    return Privacy(**found)  # type: ignore[arg-type]


def _kind(piece: object) -> str:
    for name, kind in (("secure", SecureAggregation), ("user", UserLevel), ("example", DPSGD)):
        if isinstance(piece, kind):
            return name
    raise ValueError(
        f"privacy has {piece!r}, but it is made of {', '.join(PROTECTIONS)}; such as "
        f"secure-aggregation/user-level:1:1.1"
    )


def parse_privacy(text: str) -> Privacy:
    """The inverse of `str`. Raises ValueError for text that names no protection."""
    if text == NONE:
        return NOTHING
    return privacy_of([read(one, PROTECTIONS, "privacy") for one in text.split("/")])
