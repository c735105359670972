"""The events of the journal, one after another, for the server's main thread.

    check_in    a client is there, with so many examples    begin      enough are there
    leave       it has gone, and had nothing to do          tick       time has passed
    missing     it has gone while at work                   update     its update lies here
    back        and is there again                          failed     its own code raised
    measured    what it says of a model                     all_measured   no other is waited for
    once        what was made once, and lies in a file
    asks        for how many clients in a new model one asks that does not come itself to say so

A tick is written only where nothing else happens when time has something to do.

After a restart the events behind the checkpoint come first, and clients may call only then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from dure.worlds.network.clock import Clock
from dure.worlds.network.journal import Event, Journal
from dure.worlds.network.server.desk import Desk

BACK_OFF = 5.0
"""Seconds for which the clock stands after a restart: as long as clients wait to try again."""

LOOK = 0.25
"""Seconds after which a waiting server looks whether its user wants it to stop."""


class Events:
    """Events in their order. opens: called once, when clients may come.

    now: of the newest event. applied: its number.
    """

    def __init__(
        self, journal: Journal, clock: Clock, desk: Desk, opens: Callable[[], None]
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._desk = desk
        self._opens = opens
        self.now = 0.0
        self.applied = 0
        self.aside: deque[Event] = deque()
        """Events that came while clients measured, or while something was made once, and are still
        to be applied."""

    @property
    def live(self) -> bool:
        """Whether this happens now, and was not gone through before a restart."""
        return not self._journal.behind

    def next(self, wake: float, moment: float = LOOK) -> Event | None:
        """The next event; None where none came for a moment. wake: when a tick is one."""
        if self._journal.behind:
            event = self._journal.next(moment)
        else:
            if not self._desk.open.is_set():
                self._open()
            left = wake - self._clock.now()
            if left <= 0:
                # Logged, since what it brings about can be seen: who is asked.
                self._journal.write("tick")
                left = moment
            event = self._journal.next(min(left, moment))
        if event is None:
            return None
        self.now = event.at
        self.applied = event.seq
        if not self._desk.open.is_set():
            self._see(event)
        return event

    def _open(self) -> None:
        """All that was logged before a restart has been gone through: clients may come."""
        # Deadlines wait until clients have noticed that the server is back.
        self._clock.hold(BACK_OFF if self._journal.resumed else 0.0)
        self._desk.begin(BACK_OFF)
        self._opens()

    def _see(self, event: Event) -> None:
        """Who is there after an event of an earlier life of the server: its handlers knew that."""
        seat = self._desk.seat(event.client) if event.client >= 0 else None
        if seat is None:
            return
        if event.kind in ("check_in", "back", "update", "measured"):
            seat.here = True
            seat.missing = False
        elif event.kind in ("leave", "missing", "failed"):
            seat.here = False
            seat.missing = event.kind == "missing"

    def state(self) -> dict[str, Any]:
        """For checkpoints."""
        return {
            "now": self.now,
            "applied": self.applied,
            # Checkpoints have texts and no bytes; any byte is a letter of this alphabet.
            "waiting": [[*event[:-1], event.body.decode("latin-1")] for event in self.aside],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`: the journal's events after it come next."""
        self.now = state["now"]
        self.applied = state["applied"]
        self.aside = deque(
            Event._make([*event, body.encode("latin-1")]) for *event, body in state["waiting"]
        )
        self._journal.read_from(self.applied)
