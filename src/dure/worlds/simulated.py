"""A federation in one process, under a virtual clock.

Devices are fast or slow, there or away, honest or not.

Events are kept in a queue, in order of time and, at the same time, of their making:

    an assignment goes out     now + download + computing + upload: its update arrives
    its client leaves, or drops out, before that                    it has failed, at that moment
    the server's link is finite     download and upload wait their turn there (`fleet.server_link`)
    the coordinator's `wake`   it is told that time has passed

How long a client takes follows from its device and from what it was asked, not from what it
computes; so what clients compute is computed when the coordinator combines it, many clients at
once, and what is never used is never computed. Idle clients are nothing but their number.
Everything is a function of the seed: the same run has the same events.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, TypeVar

from torch import Tensor

from dure.contracts.strategy import Kind, Place, World
from dure.errors import TooFewClientsError
from dure.fleet.budget import Budget
from dure.fleet.conditions import Conditions
from dure.fleet.server_link import ServerLink
from dure.protocol.carrier import (
    STEP,
    Action,
    Clients,
    Combine,
    Coordinator,
    Flight,
    Order,
    Work,
)
from dure.protocol.messages import (
    Answer,
    Assignment,
    Join,
    Kept,
    Measure,
    Measured,
    Refuse,
    Say,
    Settled,
    Update,
    nbytes,
)
from dure.randomness.seeds import derive
from dure.worlds.here import run_here
from dure.worlds.launched import refuse_under_torchrun

Value = TypeVar("Value")

DROPPED = "dropped out"
LEFT = "went offline"
AWAY = "offline"
SPENT = "its transfers are used up"

NUMBER = 8
"""Bytes of a loss that a client answers."""

STEPS = 4
"""Steps of a protocol over which the chance of dropping out is spread."""

MOST_TRIPS = 10_000
"""How many times on the way and at work are remembered, as clients are asked the same again."""


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
            # The program makes the clients, and gets a carrier around them.
            place.carrier = lambda clients, seed: Simulation(self, clients, seed)
            return program(place)

        return run_here(here, report, "server", self.kind, is_worker=False)


class Underway(NamedTuple):
    """An assignment on its way.

    ends: when its update arrives, or it fails for `reason`; where the server's link is finite, at
    first when it has left its client. transfer, compute: the seconds that its device takes as a
    whole. lasts: those until it has left its client. left: whether it is in the server's link.
    """

    client: int
    round: int
    began: float
    ends: float
    reason: str | None
    work: Work
    down: int
    transfer: float
    compute: float
    lasts: float
    left: bool = False

    def landed(self, outcome: str, up: int) -> Flight:
        """What became of it in the end. An assignment that failed took its share of the time."""
        share = 1.0
        if self.reason is not None:
            # Devices with infinite speed take no time at all: 0 / 0 has to be 0 here.
            share = (self.ends - self.began) / max(self.lasts, 1e-300)
        return Flight(
            client=self.client,
            round=self.round,
            began=self.began,
            ended=self.ends,
            outcome=outcome,
            down=self.down,
            up=up,
            transfer_seconds=share * self.transfer,
            compute_seconds=share * self.compute,
            examples=share * self.work.examples,
        )


class Simulation:
    """The clock and the queue.

    It joins the two halves of a federation in one process, and hands messages over as they are.
    """

    def __init__(self, conditions: Conditions, clients: Clients, seed: int) -> None:
        self.conditions = conditions
        self.clients = clients
        self.seed = seed
        self.checked = clients.checked
        # Who is away is known here, and comes back by the clock or never.
        self.lasts: float | None = None
        self.patient = False
        self.clock_is = "virtual_seconds"
        self.now = 0.0
        self.flown: list[Flight] = []
        self._count = len(clients.join().sizes)
        self._queue: list[tuple[float, int, int]] = []
        """(when, which in the order of making, ticket)."""
        self._made = 0
        self._underway: dict[int, Underway] = {}
        self._arrived: dict[int, Underway] = {}
        self.budget = Budget(conditions.bytes_each)
        self.link = ServerLink(conditions.server_mbit)
        self._gone: set[int] = set()
        """Those who were found to be away for good; who is not asked is not looked for."""
        self._seconds = lru_cache(maxsize=MOST_TRIPS)(self._trip)

    def _trip(self, client: int, examples: int, down: int, up: int) -> tuple[float, float, float]:
        """Seconds of download, computing and upload."""
        return self.conditions.devices.of(client, self.seed).seconds(examples, down, up)

    # What the server asks of a carrier

    def join(self) -> Join:
        return self.clients.join()

    def carry(self, coordinator: Coordinator) -> Combine:
        """Lets time pass until the coordinator can make a new model.

        Raises TooFewClientsError where it never can, since all clients are away for good.
        """
        combine = self._do(coordinator, coordinator.tick(self.now))
        while combine is None:
            actions = self._next(coordinator)
            if actions:
                combine = self._do(coordinator, actions)
        return combine

    def updates(self, coordinator: Coordinator, tickets: Sequence[int]) -> Iterator[Update]:
        """What the clients computed: now, as the coordinator takes it."""
        orders = []
        for ticket in tickets:
            flight = self._arrived.pop(ticket)
            orders.append(Order(coordinator.assignment(ticket), flight.began, flight.work))
        return self.clients.train(orders, self._ahead(coordinator) if self._underway else [])

    def _ahead(self, coordinator: Coordinator) -> list[Order]:
        """What is on its way and will be asked for, in the order in which it arrives."""
        # Those that fail are left out, as they never send what they would have computed.
        soon = sorted(
            (flight.ends, ticket)
            for ticket, flight in self._underway.items()
            if flight.reason is None
        )
        orders = []
        for _, ticket in soon:
            if coordinator.waits_for(ticket):
                flight = self._underway[ticket]
                orders.append(Order(coordinator.assignment(ticket), flight.began, flight.work))
        return orders

    def hold(self, coordinator: Coordinator, tickets: Sequence[int]) -> None:
        """The clients compute their updates, and keep them."""
        for update in self.updates(coordinator, tickets):
            self.clients.hold(update, coordinator.assignment(update.ticket))

    def exchange(self, says: Sequence[Say]) -> Iterator[Answer]:
        """Clients answer, unless they have left or drop out; the step lasts until the last one has.

        As likely as a client drops out of an assignment it drops out of the steps that follow.
        """
        began = self.now
        left = []
        for say in says:
            if self._is_lost(say):
                continue
            answer = self.clients.answer(say)
            if answer is None:
                continue
            down = len(say.body)
            up = len(answer.body) + nbytes(answer.tensors)
            seconds = sum(self._seconds(say.client, 0, down, up))
            ended = self.link.leaves(began, down) + seconds
            self.now = max(self.now, ended)
            self.flown.append(Flight(say.client, -1, began, ended, STEP, down, up, seconds, 0.0))
            left.append((ended, up))
            yield answer
        self._enter(left)

    def _enter(self, left: Sequence[tuple[float, int]]) -> None:
        """Answers of so many bytes have left their clients: it lasts until all are in."""
        for when, size in sorted(left):
            self.now = max(self.now, self.link.enters(when, size))

    def _is_lost(self, say: Say) -> bool:
        """Whether a client is away at a step of a protocol, or drops out there."""
        known = self.conditions
        if not self._is_there(say.client, self.now):
            return True
        if not known.drop_out:
            return False
        drawn = derive(self.seed, f"drop out of step {say.stage}", say.ticket) / 2**63
        return drawn < known.drop_out / STEPS

    def _is_there(self, client: int, now: float) -> bool:
        there = self.conditions.availability
        return there.always or there.next(client, now, self.seed) <= now

    def once(self, what: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Made again after a resume: in a simulation that gives the same bits."""
        return make()

    @property
    def draft(self) -> None:
        """None: as above."""
        return None

    def settle(self, settled: Settled) -> None:
        self.clients.settle(settled)

    def made(self, number: int, weights: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """Nobody here keeps models."""

    def ended(self, reason: str) -> None:
        """Nobody here has to be told."""

    def measure(self, measure: Measure) -> Measured:
        return self.clients.measure(measure)

    def losses(
        self, clients: Sequence[int], weights: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> list[float]:
        """Those who are there answer; it lasts until the slowest has."""
        began = self.now
        down = nbytes(weights) + nbytes(buffers)
        there = [one for one in clients if self._is_there(one, began)]
        told = self.clients.losses(there, weights, buffers, began)
        found = {client: loss for client, (loss, _) in zip(there, told, strict=True)}
        left = []
        for client, (_, examples) in zip(there, told, strict=True):
            # Forward is a third of a step.
            third = -(-examples // 3)
            fetch, compute, tell = self._seconds(client, third, down, NUMBER)
            ended = self.link.leaves(began, down) + fetch + compute + tell
            left.append((ended, NUMBER))
            self.now = max(self.now, ended)
            self.flown.append(
                Flight(
                    client=client,
                    round=-1,
                    began=began,
                    ended=ended,
                    outcome=STEP,
                    down=down,
                    up=NUMBER,
                    transfer_seconds=fetch + tell,
                    compute_seconds=compute,
                    examples=third,
                )
            )
        self._enter(left)
        return [found.get(client, math.nan) for client in clients]

    def kept(self) -> Kept:
        return self.clients.kept()

    def answers_left(self, different: bool) -> float:
        if self.budget.limit is None:
            return math.inf
        often = [self.budget.left(client) for client in range(self._count)]
        if different:
            return sum(1 for times in often if times)
        coming = [one for one in self._underway.values() if one.reason is None]
        return sum(often) + len(coming) + len(self._arrived)

    def facts(self) -> Mapping[str, Any]:
        out = [list(one) for one in self.budget.out.items()]
        spent = {"out_of_transfers": out} if out else {}
        return {**self.clients.facts(), **spent, **self.link.facts()}

    # Events

    def _next(self, coordinator: Coordinator) -> list[Action]:
        """The next event, and what the coordinator wants done then."""
        # Only those who were asked are known to be gone: this holds once all have been asked in
        # vain.
        if not self._underway and len(self._gone) == self._count:
            if self.budget.out or self.budget.most > (self.budget.limit or math.inf):
                raise TooFewClientsError(
                    f"clients may transfer {self.budget.limit:,} bytes each, and an update takes "
                    f"up to {self.budget.most:,}: give a larger transfer_budget"
                )
            raise TooFewClientsError(
                f"no client will be there again after {self.now:g} seconds: by the availability "
                f"{self.conditions.availability} all have left for the last time"
            )
        # Not "<=": an update that arrives at the very moment of a deadline comes first, and counts.
        if not self._queue or coordinator.wake < self._queue[0][0]:
            assert coordinator.wake < math.inf, (
                "a coordinator that waits for nobody says when it wants to be told"
            )
            # A `wake` in the past means at once; the clock never runs back.
            self.now = max(self.now, coordinator.wake)
            return coordinator.tick(self.now)
        self.now, _, ticket = heapq.heappop(self._queue)
        flight = self._underway.pop(ticket)
        if self.link.finite and flight.reason is None and not flight.left:
            ends = self.link.enters(self.now, flight.work.up)
            self._underway[ticket] = flight._replace(ends=ends, left=True)
            self._note(ends, ticket)
            return []
        # Nothing came up, so only the way down is counted.
        if flight.reason is not None:
            self.budget.give_back(flight.client, flight.work.up)
            actions = coordinator.failed(ticket, flight.reason, self.now)
            self.flown.append(flight.landed(flight.reason, up=0))
            return actions
        # From now on the update counts as lying here, until it is combined or refused.
        self._arrived[ticket] = flight
        actions = coordinator.update(ticket, self.now)
        outcome = "accepted"
        if actions and _refused(ticket, actions):
            outcome = "late"
            del self._arrived[ticket]
        self.flown.append(flight.landed(outcome, flight.work.up))
        return actions

    def _do(self, coordinator: Coordinator, actions: list[Action]) -> Combine | None:
        """Does what the coordinator wants done now."""
        combine = None
        # A stack and no recursion: where nobody is there, each failure brings another assignment,
        # as many times as there are clients.
        waiting = list(reversed(actions))
        while waiting:
            action = waiting.pop()
            if isinstance(action, Combine):
                combine = action
            elif isinstance(action, Refuse):
                self._arrived.pop(action.ticket, None)
            else:
                failed = self._send(action.assignment)
                if failed is not None:
                    now = self.now
                    waiting += reversed(coordinator.failed(action.assignment.ticket, failed, now))
        return combine

    def _send(self, assignment: Assignment) -> str | None:
        """An assignment goes out; the reason where its client is not there."""
        known = self.conditions
        now = self.now
        client = assignment.client
        leaves = math.inf
        if not known.availability.always:
            there = known.availability.next(client, now, self.seed)
            if there > now:
                # Never again. When all are gone for good, no event can come and the run ends with
                # an error.
                if math.isinf(there):
                    self._gone.add(client)
                return AWAY
            leaves = known.availability.until(client, now, self.seed)
        size = assignment.nbytes
        work = self.clients.work(assignment, now)
        if not self.budget.take(client, size, work.up):
            self._gone.add(client)
            return SPENT
        down, compute, up = self._seconds(client, work.examples, size, work.up)
        slowness = known.devices.slowness(client, assignment.ticket, self.seed)
        compute *= slowness
        deadline = assignment.deadline
        # As `now` for its download, which waits its turn in the server's link.
        gone = self.link.leaves(now, size)
        through = self.link.seconds(work.up)
        if (
            deadline is not None
            and self.clients.partial
            and gone + down + compute + up + through > deadline
        ):
            # As much work as fits between download and upload; at least one step, so the update may
            # still be late.
            left = deadline - gone - down - up - through
            speed = known.devices.of(client, self.seed).examples_per_second / slowness
            work = self.clients.work(assignment, now, left * speed)
            down, compute, up = self._seconds(client, work.examples, size, work.up)
            compute *= slowness
        ends = gone + down + compute + up
        lasts = ends - now if self.link.finite else down + up + compute
        reason = None
        if leaves < ends:
            # Leaving is a fact of the availability and goes before the chance of dropping out.
            ends = leaves
            reason = LEFT
        elif known.drop_out and self._drawn("drop out", assignment.ticket) < known.drop_out:
            ends = now + self._drawn("dropped out when", assignment.ticket) * (ends - now)
            reason = DROPPED
        self._underway[assignment.ticket] = Underway(
            client=client,
            round=assignment.round,
            began=now,
            ends=ends,
            reason=reason,
            work=work,
            down=size,
            transfer=down + up,
            compute=compute,
            lasts=lasts,
        )
        self._note(ends, assignment.ticket)
        return None

    def _note(self, when: float, ticket: int) -> None:
        """Something happens to an assignment."""
        # Events at the same time come in the order in which they were made: the queue needs no
        # other rule.
        heapq.heappush(self._queue, (when, self._made, ticket))
        self._made += 1

    def _drawn(self, purpose: str, ticket: int) -> float:
        return derive(self.seed, purpose, ticket) / 2**63

    # Checkpoints

    def saved(self) -> None:
        """Nothing is kept for the case that a checkpoint fails."""

    def state(self) -> dict[str, Any]:
        """The clock's, and in a part of its own what the clients keep."""
        return {
            "now": self.now,
            "made": self._made,
            "queue": [list(event) for event in self._queue],
            "underway": _written(self._underway),
            "arrived": _written(self._arrived),
            "budget": self.budget.state(),
            "link": self.link.state(),
            "clients": self.clients.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.now = state["now"]
        self._made = state["made"]
        self._queue = [(ends, made, ticket) for ends, made, ticket in state["queue"]]
        self._underway = _read(state["underway"])
        self._arrived = _read(state["arrived"])
        self._gone = set()
        # Checkpoints of dure up to 0.1 do not have it.
        if "budget" in state:
            self.budget.restore(state["budget"])
        if "link" in state:
            self.link.restore(state["link"])
        self.clients.restore(state["clients"])


def _refused(ticket: int, actions: Sequence[Action]) -> bool:
    return any(isinstance(action, Refuse) and action.ticket == ticket for action in actions)


def _written(flights: dict[int, Underway]) -> dict[int, dict[str, Any]]:
    return {
        ticket: {**flight._asdict(), "work": flight.work._asdict()}
        for ticket, flight in flights.items()
    }


def _read(written: dict[int, dict[str, Any]]) -> dict[int, Underway]:
    return {ticket: _underway(one) for ticket, one in written.items()}


def _underway(one: Mapping[str, Any]) -> Underway:
    # Checkpoints of dure up to 0.1 know of no link of the server's.
    lasts = one.get("lasts", one["transfer"] + one["compute"])
    return Underway(**{**one, "lasts": lasts, "work": Work(**one["work"])})
