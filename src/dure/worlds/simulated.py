"""A federation in one process, under a virtual clock: devices that are fast or slow, there or away,
honest or not.

Events are kept in a queue, in order of time and, at the same time, of their making:

    an assignment goes out     now + download + computing + upload: its update arrives
    its client leaves, or drops out, before that                    it has failed, at that moment
    the coordinator's `wake`   it is told that time has passed

How long a client takes follows from its device and from what it was asked, not from what it
computes; so what clients compute is computed when the coordinator combines it, many clients at
once, and what is never used is never computed. Idle clients are nothing but their number.
Everything is a function of the seed: the same run has the same events.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

from dure.contracts.strategy import Kind, Place, World
from dure.errors import TooFewClientsError
from dure.fleet.conditions import Conditions
from dure.protocol.carrier import Assign, Clients, Combine, Coordinator, Flight, Order, Refuse, Work
from dure.randomness.seeds import derive
from dure.worlds.here import refuse_under_torchrun, run_here

Value = TypeVar("Value")

DROPPED, LEFT, AWAY = "dropped out", "went offline", "offline"


@dataclass(frozen=True)
class Simulated(Conditions, World):
    """Simulated clients; how many there are is the strategy's to say."""

    name: ClassVar[str] = "simulated"
    kind: ClassVar[Kind] = "clients"

    def __post_init__(self) -> None:
        refuse_under_torchrun("a simulated federation")
        super().__post_init__()

    @property
    def conditions(self) -> Conditions:
        return self

    def describe(self) -> str:
        return ", ".join(["simulated clients", *self.told()])

    def run(
        self, program: Callable[[Place], Value], report: Callable[[dict[str, Any]], None]
    ) -> Value:
        def here(place: Place) -> Value:
            place.conditions = self
            place.carrier = lambda clients, seed: Simulation(self, clients, seed)
            return program(place)

        return run_here(here, report, "server", self.kind, is_worker=False)


class Underway(NamedTuple):
    """An assignment on its way. ends: when its update arrives, or it fails for `reason`."""

    client: int
    round: int
    began: float
    ends: float
    reason: str | None
    work: Work
    down: int
    transfer: float
    compute: float


class Simulation:
    """The clock and the queue."""

    def __init__(self, conditions: Conditions, clients: Clients, seed: int) -> None:
        self.conditions, self.clients, self.seed = conditions, clients, seed
        self.now = 0.0
        self.flown: list[Flight] = []
        self._queue: list[tuple[float, int, int]] = []
        self._made = 0
        self._underway: dict[int, Underway] = {}
        self._arrived: dict[int, Underway] = {}
        self._gone: set[int] = set()
        """Those who were found to be away for good; who is not asked is not looked for."""

    def carry(self, coordinator: Coordinator) -> Combine:
        """Lets time pass until the coordinator can make a new model.

        Raises TooFewClientsError where it never can, since all clients are away for good.
        """
        combine = self._do(coordinator, coordinator.tick(self.now))
        while combine is None:
            combine = self._next(coordinator)
        return combine

    def updates(self, coordinator: Coordinator, tickets: Sequence[int]) -> Iterator[Any]:
        """What the clients computed: now, as the coordinator takes it."""
        orders = [self._order(coordinator, ticket, self._arrived.pop(ticket)) for ticket in tickets]
        soon = sorted(
            (flight.ends, ticket)
            for ticket, flight in self._underway.items()
            if flight.reason is None
        )
        ahead = [
            self._order(coordinator, ticket, self._underway[ticket])
            for _, ticket in soon
            if coordinator.waits_for(ticket)
        ]
        return self.clients.train(orders, ahead)

    @staticmethod
    def _order(coordinator: Coordinator, ticket: int, flight: Underway) -> Order:
        return Order(coordinator.assignment(ticket), flight.began, flight.work)

    def _next(self, coordinator: Coordinator) -> Combine | None:
        """The next event."""
        if not self._underway and len(self._gone) == len(self.clients.sizes):
            raise TooFewClientsError(
                f"no client will be there again after {self.now:g} seconds: by the availability "
                f"{self.conditions.availability} all have left for the last time"
            )
        soonest = self._queue[0][0] if self._queue else math.inf
        if coordinator.wake < soonest:
            self.now = max(self.now, coordinator.wake)
            return self._do(coordinator, coordinator.tick(self.now))
        assert self._queue, "a coordinator that waits for nobody says when it wants to be told"
        self.now, _, ticket = heapq.heappop(self._queue)
        flight = self._underway.pop(ticket)
        if flight.reason is not None:
            actions = coordinator.failed(ticket, flight.reason, self.now)
            self._land(flight, flight.reason, 0)
        else:
            self._arrived[ticket] = flight
            actions = coordinator.update(ticket, self.now)
            late = any(isinstance(action, Refuse) and action.ticket == ticket for action in actions)
            if late:
                del self._arrived[ticket]
            self._land(flight, "late" if late else "accepted", flight.work.up)
        return self._do(coordinator, actions)

    def _do(self, coordinator: Coordinator, actions: list[Any]) -> Combine | None:
        """Does what the coordinator wants done now."""
        combine = None
        waiting = list(reversed(actions))
        while waiting:
            action = waiting.pop()
            if isinstance(action, Combine):
                combine = action
            elif isinstance(action, Refuse):
                self._arrived.pop(action.ticket, None)
            elif isinstance(action, Assign):
                waiting.extend(reversed(self._send(coordinator, action.assignment)))
        return combine

    def _send(self, coordinator: Coordinator, assignment: Any) -> list[Any]:
        """An assignment goes out; what the coordinator says where its client is not there."""
        client, now, known = assignment.client, self.now, self.conditions
        there = known.availability.next(client, now, self.seed)
        if there > now:
            if math.isinf(there):
                self._gone.add(client)
            return coordinator.failed(assignment.ticket, AWAY, now)
        device = known.devices.of(client, self.seed)
        work = self.clients.work(assignment, now)
        down, compute, up = device.seconds(work.examples, assignment.nbytes, work.up)
        deadline = assignment.deadline
        if deadline is not None and self.clients.partial and now + down + compute + up > deadline:
            left = (deadline - now - down - up) * device.examples_per_second
            work = self.clients.work(assignment, now, left)
            down, compute, up = device.seconds(work.examples, assignment.nbytes, work.up)
        ends, reason = now + down + compute + up, None
        leaves = known.availability.until(client, now, self.seed)
        if leaves < ends:
            ends, reason = leaves, LEFT
        elif known.drop_out and self._drawn("drop out", assignment.ticket) < known.drop_out:
            ends, reason = (
                now + self._drawn("dropped out when", assignment.ticket) * (ends - now),
                DROPPED,
            )
        self._underway[assignment.ticket] = Underway(
            *(
                client,
                assignment.round,
                now,
                ends,
                reason,
                work,
                assignment.nbytes,
                down + up,
                compute,
            )
        )
        heapq.heappush(self._queue, (ends, self._made, assignment.ticket))
        self._made += 1
        return []

    def _drawn(self, purpose: str, ticket: int) -> float:
        return derive(self.seed, purpose, ticket) / 2**63

    def _land(self, flight: Underway, outcome: str, up: int) -> None:
        share = (
            1.0
            if flight.reason is None
            else (flight.ends - flight.began) / max(flight.transfer + flight.compute, 1e-300)
        )
        self.flown.append(
            Flight(
                *(flight.client, flight.round, flight.began, flight.ends, outcome, flight.down, up),
                *(share * flight.transfer, share * flight.compute),
            )
        )

    def mark(self) -> Callable[[], None]:
        kept = (
            self.now,
            self._made,
            list(self.flown),
            list(self._queue),
            dict(self._underway),
            dict(self._arrived),
        )

        def back() -> None:
            self._gone = set()
            self.now, self._made, self.flown, self._queue, self._underway, self._arrived = kept

        return back

    def state(self) -> dict[str, Any]:
        return {
            "now": self.now,
            "made": self._made,
            "queue": [list(event) for event in self._queue],
            "underway": _written(self._underway),
            "arrived": _written(self._arrived),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.now, self._made = state["now"], state["made"]
        self._queue = [(ends, made, ticket) for ends, made, ticket in state["queue"]]
        self._underway, self._arrived = _read(state["underway"]), _read(state["arrived"])
        self._gone = set()


def _written(flights: dict[int, Underway]) -> list[list[Any]]:
    return [
        [
            ticket,
            f.client,
            f.round,
            f.began,
            f.ends,
            f.reason,
            list(f.work),
            f.down,
            f.transfer,
            f.compute,
        ]
        for ticket, f in flights.items()
    ]


def _read(rows: list[list[Any]]) -> dict[int, Underway]:
    flights = {}
    for ticket, client, number, began, ends, reason, work, down, transfer, compute in rows:
        flights[ticket] = Underway(
            client, number, began, ends, reason, Work(*work), down, transfer, compute
        )
    return flights
