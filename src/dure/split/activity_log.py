"""Record of a split learning run: activities over time, and messages by type.

first, newest    of two rounds, a bounded number of [name, activity, start, seconds], in seconds of
                 the run's clock: computation of a part of the model (head, tail, end), or
                 occupation of the link
kinds            [type, messages, bytes, largest] of messages with a payload, over all rounds
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dure.fleet.virtual_network import Transmission

LINK = "link"
"""Activity of a participant whose link is busy."""

FIRST = 200
"""Maximum number of activities of the first round."""

NEWEST = 1_500
"""Maximum number of activities of the newest round."""


class ActivityLog:
    """Record of a run."""

    def __init__(self) -> None:
        self.first: list[list[Any]] = []
        self.newest: list[list[Any]] = []
        self.round = -1
        """Newest round, from 0; -1 before the first round."""
        self.kinds: dict[str, list[int]] = {}

    def begin(self, round: int) -> None:
        """Begin a round."""
        if self.round >= 0 and not self.first:
            self.first = self.newest[:FIRST]
        self.round = round
        self.newest = []

    def did(self, who: str, what: str, began: float, seconds: float) -> None:
        """Record an activity; an occupation of the link for 0 seconds is omitted."""
        if len(self.newest) < NEWEST and (seconds > 0 or what != LINK):
            self.newest.append([who, what, _digits(began), _digits(seconds)])

    def passed(self, passage: Transmission) -> None:
        """Record a message with a payload."""
        counted = self.kinds.setdefault(str(passage.message.__struct_config__.tag), [0, 0, 0])
        counted[0] += 1
        counted[1] += passage.nbytes
        counted[2] = max(counted[2], passage.nbytes)
        self.did(passage.sender, LINK, passage.left, passage.gone - passage.left)
        self.did(passage.receiver, LINK, passage.arriving, passage.there - passage.arriving)

    def facts(self) -> dict[str, Any]:
        """Return the record for the run's summary."""
        return {
            "round": self.round,
            "first": self.first or self.newest[:FIRST],
            "newest": self.newest,
            "kinds": [[kind, *counted] for kind, counted in self.kinds.items()],
        }

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "first": [list(span) for span in self.first],
            "newest": [list(span) for span in self.newest],
            "round": self.round,
            "kinds": {kind: list(counted) for kind, counted in self.kinds.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.first = [list(span) for span in state["first"]]
        self.newest = [list(span) for span in state["newest"]]
        self.round = state["round"]
        self.kinds = {kind: list(counted) for kind, counted in state["kinds"].items()}


def _digits(seconds: float) -> float:
    """Return the seconds, rounded to 9 significant digits, as plots need no more."""
    return float(f"{seconds:.9g}")
