"""Who was there when, for the report: spans on the federation's clock.

A function of the journal, as all that the carrier knows: a run that goes on after a restart has the
same spans. While the server is down its clock stands, so that nobody is away for that.
"""

from __future__ import annotations

from typing import Any

MOST = 5_000
"""Spans that are remembered, the first ones of a run."""


class Presence:
    """Spans of all clients."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        """Those who are there, and since when."""
        self._spans: list[list[Any]] = []

    def came(self, client: int, at: float) -> None:
        self._since.setdefault(client, at)

    def went(self, client: int, at: float) -> None:
        began = self._since.pop(client, None)
        if began is not None and len(self._spans) < MOST:
            self._spans.append([client, round(began, 6), round(at, 6)])

    def spans(self, now: float) -> list[list[Any]]:
        """(client, from, to), also of those who are still there."""
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
