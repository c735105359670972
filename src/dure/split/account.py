"""What a run of split learning tells of itself: who did what when, and which messages went.

first, newest    of two rounds, a bounded number of [who, what, began, seconds], in seconds of the
                 run's clock: it computed with a part of the model (head, tail, end), or its
                 link was busy
kinds            [kind, messages, bytes, largest] of messages with a payload, in all rounds
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dure.fleet.virtual import Passage

LINK = "link"
"""What somebody does whose link is busy."""

FIRST = 200
"""Spans of the first round that are kept."""

NEWEST = 1_500
"""Spans of the newest round that are kept."""


class Account:
    """Of a run."""

    def __init__(self) -> None:
        self.first: list[list[Any]] = []
        self.newest: list[list[Any]] = []
        self.round = -1
        """The newest round, from 0."""
        self.kinds: dict[str, list[int]] = {}

    def begin(self, round: int) -> None:
        """A round begins."""
        if self.round >= 0 and not self.first:
            self.first = self.newest[:FIRST]
        self.round = round
        self.newest = []

    def did(self, who: str, what: str, began: float, seconds: float) -> None:
        """Somebody did something for so long; computing may take no time, a link may not."""
        if len(self.newest) < NEWEST and (seconds > 0 or what != LINK):
            self.newest.append([who, what, _digits(began), _digits(seconds)])

    def passed(self, passage: Passage) -> None:
        """A message with a payload went."""
        counted = self.kinds.setdefault(type(passage.message).__name__, [0, 0, 0])
        counted[0] += 1
        counted[1] += passage.nbytes
        counted[2] = max(counted[2], passage.nbytes)
        self.did(passage.sender, LINK, passage.left, passage.gone - passage.left)
        self.did(passage.receiver, LINK, passage.arriving, passage.there - passage.arriving)

    def facts(self) -> dict[str, Any]:
        """For the summary."""
        return {
            "round": self.round,
            "first": self.first or self.newest[:FIRST],
            "newest": self.newest,
            "kinds": [[kind, *counted] for kind, counted in self.kinds.items()],
        }

    def state(self) -> dict[str, Any]:
        """What it needs to go on."""
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
    """As many as pictures need."""
    return float(f"{seconds:.9g}")
