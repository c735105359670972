"""Events of the journal in order, for the server's main thread.

    check_in    a client is available, with its examples    begin      enough clients are available
    leave       it has disconnected without work            tick       time has passed
    missing     it has disconnected while at work           update     its update has been received
    back        it has reconnected                          failed     its own code raised
    measured    its evaluation of a model                   all_measured   end of an evaluation
    once        a result computed once, which has a file
    asks        smallest cohort of a client, recorded by the server without a check-in

A tick is written only if no other event occurs when time alone requires an action.

After a restart the events after the checkpoint come first, and clients are served only then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from dure.deploy.clock import FederationClock
from dure.deploy.journal import Event, Journal
from dure.deploy.server.outbox import ClientOutbox

BACK_OFF = 5.0
"""Seconds for which the clock stands after a restart: the longest wait of clients before a retry.
"""

LOOK = 0.25
"""Seconds between two checks whether the user wants the server to stop."""


class JournalEvents:
    """Events in order.

    `opens` is called once, before clients are served. The attribute `now` is the time of the newest
    event, and `applied` is its number.
    """

    def __init__(
        self,
        journal: Journal,
        clock: FederationClock,
        outbox: ClientOutbox,
        opens: Callable[[], None],
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._outbox = outbox
        self._opens = opens
        self.now = 0.0
        self.applied = 0
        self.aside: deque[Event] = deque()
        """Events received during an evaluation or a computation, still to be applied."""

    @property
    def live(self) -> bool:
        """Whether the events happen now, rather than before a restart."""
        return not self._journal.behind

    def next(self, wake: float, moment: float = LOOK) -> Event | None:
        """Return the next event; None if none arrives within `moment` seconds. Ticks at `wake`."""
        if self._journal.behind:
            event = self._journal.next(moment)
        else:
            if not self._outbox.open.is_set():
                self._open()
            left = wake - self._clock.now()
            if left <= 0:
                # Logged, because its effects are visible: which clients get work.
                self._journal.write("tick")
                left = moment
            event = self._journal.next(min(left, moment))
        if event is None:
            return None
        self.now = event.at
        self.applied = event.seq
        if not self._outbox.open.is_set():
            self._see(event)
        return event

    def _open(self) -> None:
        """Serve clients: all events from before the restart are applied."""
        # Deadlines wait until clients have found the restarted server.
        self._clock.hold(BACK_OFF if self._journal.resumed else 0.0)
        self._outbox.begin(BACK_OFF)
        self._opens()

    def _see(self, event: Event) -> None:
        """Update a session by an event of an earlier process, whose handlers had updated it."""
        session = self._outbox.session(event.client) if event.client >= 0 else None
        if session is None:
            return
        if event.kind in ("check_in", "back", "update", "measured"):
            session.available = True
            session.missing = False
        elif event.kind in ("leave", "missing", "failed"):
            session.available = False
            session.missing = event.kind == "missing"

    def state(self) -> dict[str, Any]:
        """Return the state for checkpoints."""
        return {
            "now": self.now,
            "applied": self.applied,
            # Checkpoints have texts and no bytes; Latin-1 has a character for every byte.
            "waiting": [[*event[:-1], event.body.decode("latin-1")] for event in self.aside],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state; the journal's later events follow."""
        self.now = state["now"]
        self.applied = state["applied"]
        self.aside = deque(
            Event._make([*event, body.encode("latin-1")]) for *event, body in state["waiting"]
        )
        self._journal.read_from(self.applied)
