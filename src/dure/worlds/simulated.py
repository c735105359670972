"""Simulated federation: all clients in a process, under a virtual clock.

Devices are fast or slow, available or away, honest or malicious. Events are in a queue, ordered by
time and, at the same time, by creation:

    an assignment is sent      now + download + computing + upload: its update arrives
    its client leaves, or drops out, before that                    it has failed, at that moment
    the server's link is finite     download and upload queue there (`fleet.server_link`)
    the coordinator's `wake`   a tick

The time of a client depends on its device and on its assignment, not on its results. Updates are
therefore computed when the coordinator combines them, many clients at once, and an unused update is
never computed. An idle client costs nothing but its number. Everything is a function of the seed:
the same run has the same events.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, TypeVar

from torch import Tensor

from dure.contracts.world import RankContext
from dure.errors import TooFewClientsError
from dure.fleet.budget import TransferBudget
from dure.fleet.conditions import ClientWorld, Conditions
from dure.fleet.server_link import ServerLink
from dure.machine.devices import CPU, as_current, device_of
from dure.protocol.carrier import (
    STEP,
    Action,
    AssignmentCost,
    AssignmentRecord,
    ClientOrder,
    Clients,
    Combine,
    CoordinatorProtocol,
)
from dure.protocol.messages import (
    Assignment,
    EvaluationRequest,
    EvaluationResults,
    JoinMessage,
    PersonalisedMean,
    ProtocolAnswer,
    ProtocolStep,
    Refuse,
    Update,
    UpdateOutcomes,
    nbytes,
)
from dure.protocol.server_context import ServerContext
from dure.randomness.seeds import derive
from dure.worlds.in_process import run_in_process
from dure.worlds.launcher_environment import refuse_under_torchrun

Value = TypeVar("Value")

DROPPED = "dropped out"
LEFT = "went offline"
AWAY = "offline"
SPENT = "its transfers are used up"

NUMBER = 8
"""Bytes of a loss in a client's answer."""

STEPS = 4
"""Number of protocol steps that share the probability of dropping out."""

MOST_TRIPS = 10_000
"""Maximum cached durations of assignments, because the same assignments recur."""


@dataclass(frozen=True)
class Simulated(Conditions, ClientWorld):
    """Simulated clients; the strategy sets their number."""

    name: ClassVar[str] = "simulated"

    def __post_init__(self) -> None:
        refuse_under_torchrun("a simulated federation")
        super().__post_init__()

    @property
    def conditions(self) -> Conditions:
        return self

    def describe(self) -> str:
        return ", ".join(["simulated clients", *self.told()])

    @property
    def computes_on(self) -> tuple[str, ...]:
        return () if self.device is None else (self.device,)

    def run(
        self, program: Callable[[RankContext], Value], report: Callable[[dict[str, Any]], None]
    ) -> Value:
        device = CPU if self.device is None else device_of(self.device)

        def here(context: RankContext) -> Value:
            server = ServerContext.of(context, self)
            # The program makes the clients, and gets a carrier to them.
            server.carrier = lambda clients, seed: FederationSimulation(self, clients, seed)
            return program(server)

        with as_current(device):
            return run_in_process(here, report, "server", self.kind, (device,), is_worker=False)


class SimulatedAssignment(NamedTuple):
    """Assignment in progress.

    Args:
        client: Number of the client.
        round: Number of the global model.
        began: Time at which the assignment was sent.
        ends: Time at which its update arrives, or it fails for `reason`; with a finite link of the
            server, first the time at which the update has left its client.
        reason: Reason of a failure; None for an update.
        work: Cost of the assignment.
        down: Bytes downloaded.
        transfer: Total seconds of transfers by its device.
        compute: Total seconds of computing by its device.
        lasts: Seconds until the update has left its client.
        left: Whether the update is in the server's link.
    """

    client: int
    round: int
    began: float
    ends: float
    reason: str | None
    work: AssignmentCost
    down: int
    transfer: float
    compute: float
    lasts: float
    left: bool = False

    def landed(self, outcome: str, up: int) -> AssignmentRecord:
        """Return the record of the ended assignment.

        A failed assignment took its share of the time.
        """
        share = 1.0
        if self.reason is not None:
            # A device with infinite speed takes no time: 0 / 0 must be 0 here.
            share = (self.ends - self.began) / max(self.lasts, 1e-300)
        return AssignmentRecord(
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


class FederationSimulation:
    """Virtual clock, event queue and carrier of a simulated federation.

    The carrier passes messages between coordinator and clients by reference.
    """

    def __init__(self, conditions: Conditions, clients: Clients, seed: int) -> None:
        self.conditions = conditions
        self.clients = clients
        self.seed = seed
        self.checked = clients.checked
        # The simulation knows which clients are away, and when they return, if ever.
        self.answer_timeout: float | None = None
        self.patient = False
        self.clock_is = "virtual_seconds"
        self.now = 0.0
        self.flown: list[AssignmentRecord] = []
        self._count = len(clients.join().sizes)
        self._queue: list[tuple[float, int, int]] = []
        """(time, number in order of creation, assignment id)."""
        self._made = 0
        self._underway: dict[int, SimulatedAssignment] = {}
        self._arrived: dict[int, SimulatedAssignment] = {}
        self.budget = TransferBudget(conditions.bytes_each)
        self.link = ServerLink(conditions.server_mbit)
        self._gone: set[int] = set()
        """Clients found to be away for good; clients that are not asked are not checked."""
        self._seconds = lru_cache(maxsize=MOST_TRIPS)(self._trip)

    def _trip(self, client: int, examples: int, down: int, up: int) -> tuple[float, float, float]:
        """Return the seconds of download, computing and upload."""
        return self.conditions.devices.of(client, self.seed).seconds(examples, down, up)

    # Interface of a carrier

    def join(self) -> JoinMessage:
        return self.clients.join()

    def carry(self, coordinator: CoordinatorProtocol) -> Combine:
        """Advance the clock until the coordinator can make a new model.

        Raises TooFewClientsError if that is impossible, because all clients are away for good.
        """
        combine = self._do(coordinator, coordinator.tick(self.now))
        while combine is None:
            actions = self._next(coordinator)
            if actions:
                combine = self._do(coordinator, actions)
        return combine

    def updates(self, coordinator: CoordinatorProtocol, tickets: Sequence[int]) -> Iterator[Update]:
        """Yield the clients' updates, computed now in the order of the coordinator's requests."""
        orders = []
        for ticket in tickets:
            flight = self._arrived.pop(ticket)
            orders.append(ClientOrder(coordinator.assignment(ticket), flight.began, flight.work))
        return self.clients.train(orders, self._ahead(coordinator) if self._underway else [])

    def _ahead(self, coordinator: CoordinatorProtocol) -> list[ClientOrder]:
        """Return orders in progress whose updates will count, in order of arrival."""
        # Without assignments that fail, because their updates are never sent.
        soon = sorted(
            (flight.ends, ticket)
            for ticket, flight in self._underway.items()
            if flight.reason is None
        )
        orders = []
        for _, ticket in soon:
            if coordinator.waits_for(ticket):
                flight = self._underway[ticket]
                orders.append(
                    ClientOrder(coordinator.assignment(ticket), flight.began, flight.work)
                )
        return orders

    def hold(self, coordinator: CoordinatorProtocol, tickets: Sequence[int]) -> None:
        """Have the clients compute their updates, and leave the updates there."""
        for update in self.updates(coordinator, tickets):
            self.clients.hold(update, coordinator.assignment(update.ticket))

    def exchange(self, says: Sequence[ProtocolStep]) -> Iterator[ProtocolAnswer]:
        """Yield the clients' answers; a step lasts until the last answer has arrived.

        A client may be away or drop out. In each step a client drops out with 1 / `STEPS` of the
        probability of an assignment.
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
            self.flown.append(
                AssignmentRecord(say.client, -1, began, ended, STEP, down, up, seconds, 0.0)
            )
            left.append((ended, up))
            yield answer
        self._enter(left)

    def _enter(self, left: Sequence[tuple[float, int]]) -> None:
        """Advance the clock until all answers have passed the server's link."""
        for when, size in sorted(left):
            self.now = max(self.now, self.link.enters(when, size))

    def _is_lost(self, say: ProtocolStep) -> bool:
        """Return whether a client is away or drops out at a step of a protocol."""
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
        """Call `make`: a resumed simulation computes the same bits again."""
        return make()

    @property
    def draft(self) -> None:
        """None, because `make` reproduces its result bit for bit."""
        return None

    def settle(self, settled: UpdateOutcomes) -> None:
        self.clients.settle(settled)

    def made(self, number: int, weights: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """Do nothing: no client stores models."""

    def ended(self, reason: str) -> None:
        """Do nothing: no client needs a notice."""

    def measure(self, measure: EvaluationRequest) -> EvaluationResults:
        return self.clients.measure(measure)

    def losses(
        self, clients: Sequence[int], weights: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> list[float]:
        """Return the losses of available clients; the clock advances to the slowest answer."""
        began = self.now
        down = nbytes(weights) + nbytes(buffers)
        there = [one for one in clients if self._is_there(one, began)]
        told = self.clients.losses(there, weights, buffers, began)
        found = {client: loss for client, (loss, _) in zip(there, told, strict=True)}
        left = []
        for client, (_, examples) in zip(there, told, strict=True):
            # A forward pass costs a third of a step.
            third = -(-examples // 3)
            fetch, compute, tell = self._seconds(client, third, down, NUMBER)
            ended = self.link.leaves(began, down) + fetch + compute + tell
            left.append((ended, NUMBER))
            self.now = max(self.now, ended)
            self.flown.append(
                AssignmentRecord(
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

    def kept(self) -> PersonalisedMean:
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

    def _next(self, coordinator: CoordinatorProtocol) -> list[Action]:
        """Advance the clock to the next event, and return the coordinator's actions."""
        # A client is known to be gone only once asked: the condition holds after all have been
        # asked unsuccessfully.
        if not self._underway and len(self._gone) == self._count:
            if self.budget.out or self.budget.most > (self.budget.limit or math.inf):
                raise TooFewClientsError(
                    f"clients may transfer {self.budget.limit:,} bytes each, but an update needs "
                    f"up to {self.budget.most:,}: give a larger transfer_budget"
                )
            raise TooFewClientsError(
                f"no client is available after {self.now:g} seconds: by the availability "
                f"{self.conditions.availability} all have left for the last time"
            )
        # Not "<=": an update that arrives exactly at a deadline comes first, and counts.
        if not self._queue or coordinator.wake < self._queue[0][0]:
            assert coordinator.wake < math.inf, (
                "a coordinator that waits for nobody says when it wants to be told"
            )
            # A `wake` in the past means now; the clock never runs backwards.
            self.now = max(self.now, coordinator.wake)
            return coordinator.tick(self.now)
        self.now, _, ticket = heapq.heappop(self._queue)
        flight = self._underway.pop(ticket)
        if self.link.finite and flight.reason is None and not flight.left:
            ends = self.link.enters(self.now, flight.work.up)
            self._underway[ticket] = flight._replace(ends=ends, left=True)
            self._note(ends, ticket)
            return []
        # Nothing was uploaded, so only the download counts.
        if flight.reason is not None:
            self.budget.give_back(flight.client, flight.work.up)
            actions = coordinator.failed(ticket, flight.reason, self.now)
            self.flown.append(flight.landed(flight.reason, up=0))
            return actions
        # From now on the update counts as received, until it is combined or refused.
        self._arrived[ticket] = flight
        actions = coordinator.update(ticket, self.now)
        outcome = "accepted"
        if actions and _refused(ticket, actions):
            outcome = "late"
            del self._arrived[ticket]
        self.flown.append(flight.landed(outcome, flight.work.up))
        return actions

    def _do(self, coordinator: CoordinatorProtocol, actions: list[Action]) -> Combine | None:
        """Carry out the coordinator's actions."""
        combine = None
        # A stack instead of recursion: if no client is available, each failure brings another
        # assignment, as many as there are clients.
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
        """Send an assignment; return the reason of a failure if its client is not available."""
        known = self.conditions
        now = self.now
        client = assignment.client
        leaves = math.inf
        if not known.availability.always:
            there = known.availability.next(client, now, self.seed)
            if there > now:
                # Away for good. When all clients are, no event remains and the run ends with an
                # error.
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
        # Start of the download, which waits for its turn in the server's link.
        gone = self.link.leaves(now, size)
        through = self.link.seconds(work.up)
        if (
            deadline is not None
            and self.clients.partial
            and gone + down + compute + up + through > deadline
        ):
            # Limit the work to the time between download and upload; at least one step, so the
            # update may still be late.
            left = deadline - gone - down - up - through
            speed = known.devices.of(client, self.seed).examples_per_second / slowness
            work = self.clients.work(assignment, now, left * speed)
            down, compute, up = self._seconds(client, work.examples, size, work.up)
            compute *= slowness
        ends = gone + down + compute + up
        lasts = ends - now if self.link.finite else down + up + compute
        reason = None
        if leaves < ends:
            # Leaving is a fact of the availability, and precedes the probability of dropping out.
            ends = leaves
            reason = LEFT
        elif known.drop_out and self._drawn("drop out", assignment.ticket) < known.drop_out:
            ends = now + self._drawn("dropped out when", assignment.ticket) * (ends - now)
            reason = DROPPED
        self._underway[assignment.ticket] = SimulatedAssignment(
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
        """Add an event of an assignment to the queue."""
        # Events at the same time are in order of creation, so that the order is total.
        heapq.heappush(self._queue, (when, self._made, ticket))
        self._made += 1

    def _drawn(self, purpose: str, ticket: int) -> float:
        return derive(self.seed, purpose, ticket) / 2**63

    # Checkpoints

    def saved(self) -> None:
        """Do nothing: no older data exist that a stored checkpoint makes obsolete."""

    def state(self) -> dict[str, Any]:
        """Return the state of the clock and queue, and separately the clients' state."""
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
        # Checkpoints of dure up to 0.1 lack these keys.
        if "budget" in state:
            self.budget.restore(state["budget"])
        if "link" in state:
            self.link.restore(state["link"])
        self.clients.restore(state["clients"])


def _refused(ticket: int, actions: Sequence[Action]) -> bool:
    return any(isinstance(action, Refuse) and action.ticket == ticket for action in actions)


def _written(flights: dict[int, SimulatedAssignment]) -> dict[int, dict[str, Any]]:
    return {
        ticket: {**flight._asdict(), "work": flight.work._asdict()}
        for ticket, flight in flights.items()
    }


def _read(written: dict[int, dict[str, Any]]) -> dict[int, SimulatedAssignment]:
    return {ticket: _underway(one) for ticket, one in written.items()}


def _underway(one: Mapping[str, Any]) -> SimulatedAssignment:
    # Checkpoints of dure up to 0.1 lack the server's link.
    lasts = one.get("lasts", one["transfer"] + one["compute"])
    return SimulatedAssignment(**{**one, "lasts": lasts, "work": AssignmentCost(**one["work"])})
