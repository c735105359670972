"""Presence of clients for the report: periods on the federation's clock.

A function of the journal, like the rest of the carrier's state: a resumed run has the same periods.
The clock stands while the server is down, so that clients do not count as absent then.
"""

from __future__ import annotations

from typing import Any

MOST = 5_000
"""Maximum periods stored, the first of a run."""


class PresenceLog:
    """Periods of presence of all clients."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        """Start of presence by client, for clients that are present."""
        self._spans: list[list[Any]] = []

    def came(self, client: int, at: float) -> None:
        self._since.setdefault(client, at)

    def went(self, client: int, at: float) -> None:
        began = self._since.pop(client, None)
        if began is not None and len(self._spans) < MOST:
            self._spans.append([client, round(began, 6), round(at, 6)])

    def spans(self, now: float) -> list[list[Any]]:
        """Return [client, from, to] for all periods; current periods end now."""
        there = [
            [client, round(began, 6), round(max(began, now), 6)]
            for client, began in sorted(self._since.items())
        ]
        return self._spans + there

    def state(self) -> list[Any]:
        return [list(self._since.items()), [list(span) for span in self._spans]]

    def restore(self, state: list[Any]) -> None:
        since, spans = state
        self._since = dict(since)
        self._spans = [list(span) for span in spans]
