"""Cohort: the clients of a run by the journal's events: examples, machines, periods of presence.

The report at the end of the run has these facts, and so have checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from dure.deploy.server.outbox import ClientOutbox
from dure.deploy.server.presence import PresenceLog
from dure.wire.requests import Machine, MessageBody, UploadRequest

MOST_REPORTED = 50
"""Maximum metrics stored per client."""


class CheckInRecord(MessageBody, frozen=True):
    """Logged body of a check-in."""

    name: str
    examples: int
    held_out: int
    machine: Machine | None = None
    smallest_cohort: int = 1


class FederationCohort:
    """All clients that have ever checked in.

    `mine` is the server's machine, for comparison. `holds` is True if updates stay at their
    clients, which then report nothing about their examples. `measures` has the numbers of the
    clients with held-out examples.
    """

    def __init__(self, outbox: ClientOutbox, mine: Machine, holds: bool = False) -> None:
        self._outbox = outbox
        self._mine = mine
        self._holds = holds
        self.presence = PresenceLog()
        self.measures: set[int] = set()
        self._machines: dict[int, Machine | None] = {}
        self._asked: dict[int, int] = {}
        """Minimum number of clients of a new model that each client requires."""
        self._reported: dict[int, dict[str, float]] = {}
        """Metrics of each client's newest training."""

    def met(self, client: int, record: CheckInRecord) -> None:
        """Record a client's check-in."""
        self._machines[client] = record.machine
        if record.held_out:
            self.measures.add(client)
        else:
            self.measures.discard(client)
        session = self._outbox.session(client)
        session.name = record.name
        session.examples = record.examples
        session.held_out = record.held_out
        session.machine = record.machine
        self.asks(client, record)

    def asks(self, client: int, record: CheckInRecord) -> None:
        """Record the fewest clients of a new model that the client requires from now on."""
        self._outbox.session(client).smallest_cohort = record.smallest_cohort
        self._asked[client] = record.smallest_cohort
        self._outbox.smallest_cohort = self.smallest

    @property
    def smallest(self) -> int:
        """Minimum number of clients of a new model: the maximum of the clients' requirements."""
        return max(self._asked.values(), default=1)

    def reports(self, client: int, said: UploadRequest) -> None:
        """Record the metrics of a client's newest training."""
        if said.metrics:
            self._reported[client] = dict(list(said.metrics.items())[:MOST_REPORTED])

    def facts(self, now: float) -> Mapping[str, Any]:
        """Return facts on the clients, their presence and their machines, for the report."""
        others = sorted(
            {
                difference
                for machine in self._machines.values()
                for difference in differences(machine, self._mine)
            }
        )
        return {
            "bits": "close" if others else "same",
            "differs": others,
            "there": self.presence.spans(now),
            "cohort": [self._who(client) for client in sorted(self._machines)],
            **({"smallest_cohort": self.smallest} if self.smallest > 1 else {}),
            **({"reported": sorted(self._reported.items())} if self._reported else {}),
        }

    def _who(self, client: int) -> dict[str, Any]:
        session = self._outbox.session(client)
        machine = self._machines[client]
        return {
            "client": client,
            "name": session.name,
            # A client whose updates stay with it reports 1, whatever its number of examples.
            "examples": None if self._holds else session.examples,
            "held_out": session.held_out,
            "machine": None if machine is None else msgspec.to_builtins(machine),
            "differs": differences(machine, self._mine),
        }

    def state(self) -> dict[str, Any]:
        """Return the state for checkpoints."""
        return {
            "clients": [
                [
                    session.number,
                    session.name,
                    session.examples,
                    session.held_out,
                    session.available,
                ]
                for session in self._outbox.everybody()
            ],
            "machines": [
                [client, None if machine is None else msgspec.to_builtins(machine)]
                for client, machine in self._machines.items()
            ],
            "presence": self.presence.state(),
            "asked": dict(self._asked),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state; states of earlier versions lack some keys."""
        for number, name, examples, held_out, available in state["clients"]:
            session = self._outbox.session(number)
            session.name = name
            session.examples = examples
            session.held_out = held_out
            session.available = available
            if held_out:
                self.measures.add(number)
        for client, machine in state.get("machines", ()):
            self._machines[client] = msgspec.convert(machine, Machine | None)
            self._outbox.session(client).machine = self._machines[client]
        for client, asked in state.get("asked", {}).items():
            self.asks(client, CheckInRecord("", 0, 0, smallest_cohort=asked))
        if "presence" in state:
            self.presence.restore(state["presence"])


def differences(machine: Machine | None, mine: Machine) -> list[str]:
    """Describe how a client's machine computes differently from the server's."""
    if machine is None:
        return ["a training loop of its own"]
    found = []
    for name in ("torch", "capability", "engine", "threads"):
        theirs = getattr(machine, name)
        ours = getattr(mine, name)
        if theirs != ours:
            found.append(f"{name} {theirs}, not {ours}")
    return found
