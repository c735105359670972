"""The carrier of a deployed federation: from the journal to the coordinator, and to the desk.

    journal -> event -> coordinator -> actions -> desk        until the coordinator can combine

Handlers write what clients say to the journal. Here, in the main thread, its events are applied in
their order, one by one, each with the time at which it was logged. So the coordinator's state is a
function of the journal: after a restart the events behind the checkpoint are applied again by the
same code, and give the same bits. What is not an input is not logged: what is on the desk follows
from the coordinator's actions.

    check_in    a client is there, with so many examples    begin      enough are there
    leave       it has gone, and had nothing to do          tick       time has passed
    missing     it has gone while at work                   update     its update lies here
    back        and is there again                          failed     its own code raised
    measured    what it says of a model                     all_measured   no other is waited for
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from dure.contracts.strategy import Interrupted
from dure.fleet.budget import Budget
from dure.machine.memory import give_back
from dure.protocol.carrier import Action, Assign, Combine, Coordinator, Flight
from dure.protocol.measured import together
from dure.protocol.messages import (
    Assignment,
    Join,
    Kept,
    Measure,
    Measured,
    Refuse,
    Settled,
    Update,
)
from dure.record.disk import write_atomically
from dure.wire.layout import Federation
from dure.wire.requests import (
    Machine,
    MeasuredThis,
    Outcome,
    Reserve,
    Said,
    Train,
    from_json,
)
from dure.wire.tensors import size_of
from dure.worlds.network.clock import Clock
from dure.worlds.network.journal import Event, Journal
from dure.worlds.network.server.desk import Desk
from dure.worlds.network.server.presence import Presence
from dure.worlds.network.server.sending import Sending
from dure.worlds.network.server.shelf import Shelf
from dure.worlds.network.server.watching import Watching
from dure.worlds.network.updates import Updates

COHORT = "cohort.json"
"""In the run folder: the examples of each client at the beginning of the first round."""

BACK_OFF = 5.0
"""Seconds for which the clock stands after a restart: as long as clients wait to try again."""

TOO_LONG = "it took too long"
"""What becomes of a ticket whose time is up, where there are no rounds."""

SPENT = "it has used up what it may transfer"

MOST_REPORTED = 50
"""Numbers of a client's own that are kept."""

LOOK = 0.25
"""Seconds after which a waiting server looks whether its user wants it to stop."""


class Here(Said, frozen=True):
    """The body of a check-in, as it is logged."""

    name: str
    examples: int
    held_out: int
    machine: Machine | None = None


class Underway(NamedTuple):
    """An assignment that was handed out. began: by the federation's clock; down: its bytes."""

    client: int
    round: int
    began: float
    down: int


class Arrived(NamedTuple):
    """An update that lies here, by what was said when it was reserved."""

    client: int
    round: int
    said: Reserve


class NetworkCarrier:
    """Joins a coordinator with clients that are elsewhere.

    start_with: how many clients have to be there before the first round. lasts: seconds that a
    round, or a ticket where there are no rounds, may take where the strategy names none.
    measure_seconds: how long clients may take to measure a model. interrupted: whether the user
    wants the server to stop.
    """

    checked = False
    patient = True
    clock_is = "wall_seconds"

    def __init__(
        self,
        *,
        federation: Federation,
        folder: Path,
        journal: Journal,
        clock: Clock,
        updates: Updates,
        desk: Desk,
        shelf: Shelf,
        machine: Machine,
        start_with: int,
        lasts: float,
        measure_seconds: float,
        record: bool,
        budget: Budget,
        interrupted: Callable[[], bool],
        tell: Callable[[str], None],
        watching: Watching | None = None,
    ) -> None:
        self.federation = federation
        self.folder = folder
        self.journal = journal
        self.clock = clock
        self.files = updates
        self.desk = desk
        self.sending = Sending(federation, desk, shelf, updates)
        self.machine = machine
        self.start_with = start_with
        self.lasts: float | None = lasts
        self.measure_seconds = measure_seconds
        self.record = record
        self.budget = budget
        self._up = 0
        """Bytes of an update."""
        self.interrupted = interrupted
        self.tell = tell
        self.watching = watching or Watching()
        self.now = 0.0
        self.flown: list[Flight] = []
        self._applied = 0
        """The last event that was taken from the journal."""
        self._waiting: deque[Event] = deque()
        """Events that came while clients measured, and are still to be applied."""
        self._begun = False
        self._again: list[int] = []
        """Tickets of a checkpoint, whose assignments are to be put on the desk again."""
        self._underway: dict[int, Underway] = {}
        self._arrived: dict[int, Arrived] = {}
        self._unsettled: dict[int, int] = {}
        """The client of each ticket whose outcome is still to be told."""
        self._over: list[int] = []
        """Tickets of which nothing more is made, and whose files a checkpoint makes useless."""
        self._covered: list[int] = []
        self._newest: tuple[int, Sequence[Tensor], Sequence[Tensor]] | None = None
        self._machines: dict[int, Machine | None] = {}
        self._presence = Presence()
        self._measure: set[int] = set()
        """Clients that hold something out, by what the journal says of them."""
        self._reported: dict[int, dict[str, float]] = {}
        """What clients have said of their newest training, by client."""

    # What the server asks of a carrier

    def join(self) -> Join:
        """Waits until enough clients are there for the first round.

        Their events are applied when the first round is carried out.
        """
        cohort = self.folder / COHORT
        if cohort.exists():
            return Join(msgspec.json.decode(cohort.read_bytes(), type=list[int]))
        present: dict[int, int] = {}
        begun = False
        while not begun:
            event = self._next(math.inf)
            if event is None:
                if self.interrupted():
                    raise KeyboardInterrupt
                continue
            self._waiting.append(event)
            if event.kind == "check_in":
                here = from_json(event.body, Here)
                present[event.client] = here.examples
                self._met(event.client, here)
                self.tell(f"{len(present)} of {self.start_with} clients are there")
            elif event.kind == "leave":
                present.pop(event.client, None)
            begun = event.kind == "begin"
            # Where it is gone through again, the journal says itself when that was.
            if len(present) >= self.start_with and not begun and not self.journal.behind:
                self.journal.write("begin")
        sizes = [present.get(client, 0) for client in range(self.federation.clients)]
        # Events up to a checkpoint are forgotten; this is needed with every checkpoint.
        write_atomically(cohort, msgspec.json.encode(sizes))
        # What making the model took.
        give_back()
        return Join(sizes)

    def carry(self, coordinator: Coordinator) -> Combine:
        """Applies events until the coordinator can make a new model. Raises Interrupted."""
        self._lay_again(coordinator)
        self._let_go(coordinator)
        self.watching.round_begins()
        while True:
            self.watching.pulse(self.desk, "training")
            event = (
                self._waiting.popleft() if self._waiting else self._next(self._wake(coordinator))
            )
            if event is None:
                if self.interrupted():
                    raise Interrupted
                continue
            combine = self._do(coordinator, self._apply(coordinator, event))
            if combine is not None:
                return combine

    def _lay_again(self, coordinator: Coordinator) -> None:
        """After a checkpoint was read: puts on the desk what was there then."""
        again, self._again = self._again, []
        for ticket in again:
            if coordinator.waits_for(ticket):
                self._hand(coordinator, coordinator.assignment(ticket))

    def updates(self, coordinator: Coordinator, tickets: Sequence[int]) -> Iterator[Update]:
        """What clients have sent, from its file, one after another."""
        for ticket in tickets:
            arrived = self._arrived.pop(ticket)
            self._unsettled[ticket] = arrived.client
            self._over.append(ticket)
            asked = coordinator.assignment(ticket)
            began = time.perf_counter()
            # Not held here: its memory goes before the next one comes.
            yield self.sending.update(arrived.said, asked, coordinator)
            # It has been taken when the next one is asked for.
            self.watching.fold_seconds.observe(time.perf_counter() - began)

    def settle(self, settled: Settled) -> None:
        """Clients hear what became of their updates, until they have confirmed it."""
        reasons = dict(zip(settled.dropped, settled.reasons, strict=False))
        for ticket in settled.kept:
            self._settle(ticket, Outcome(ticket, True))
        for ticket in settled.dropped:
            self._settle(ticket, Outcome(ticket, False, reasons.get(ticket, "")))
        if self._live:
            self.watching.round_made()
        # Before there is memory for the next checkpoint and the next round.
        self.sending.forget_unwanted()

    def made(self, number: int, weights: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        self._newest = (number, weights, buffers)

    def ended(self, reason: str) -> None:
        """Clients hear that the run is over, and where its last model is.

        Not of an interruption: the run may go on later.
        """
        if reason == "interrupt":
            return
        if self._newest is not None:
            self.desk.final = self.sending.measured(*self._newest)
        self.desk.end("the run is over")

    def measure(self, measure: Measure) -> Measured:
        """Asks all who are there and hold something out; who does not answer in time is left out.

        Other events wait meanwhile.
        """
        # Also where all of them are away: whether anybody is waited for has to follow from the log.
        if not self._measure:
            return Measured([], {})
        asked = [seat for seat in self.desk.everybody() if seat.here and seat.held_out]
        request = self.sending.measured(measure.round, measure.weights, measure.buffers)
        answers: dict[int, MeasuredThis] = {}
        for seat in asked:
            self.desk.ask_measure(seat.number, request)
        until = time.monotonic() + self.measure_seconds
        ended = said_so = False
        while not ended:
            waits = [s for s in asked if s.here and s.number not in answers]
            # Only what is logged counts: the end is an event too.
            late = time.monotonic() > until or self.interrupted()
            self.watching.pulse(self.desk, "measuring")
            if not self.journal.behind and (late or not waits) and not said_so:
                self.journal.write("all_measured")
                said_so = True  # once: the next measurement would take another for its own
            event = self._next(math.inf)
            if event is None:
                continue
            if event.kind == "measured":
                said = from_json(event.body, MeasuredThis)
                if said.round == measure.round:
                    answers[event.client] = said
                    self.desk.ask_measure(event.client, None)
            elif event.kind == "all_measured":
                ended = True
            else:
                self._waiting.append(event)
        for seat in asked:
            self.desk.ask_measure(seat.number, None)
        return together([_measured(client, said) for client, said in answers.items()])

    def kept(self) -> Kept:
        """Nothing: what belongs to a client never leaves it."""
        return Kept(())

    def answers_left(self, different: bool) -> float:
        if self.budget.limit is None:
            return math.inf
        often = [self.budget.left(client) for client in range(self.federation.clients)]
        if different:
            return sum(1 for times in often if times)
        return sum(often) + len(self._underway) + len(self._arrived)

    def facts(self) -> Mapping[str, Any]:
        """How clients compute, and whether that is how this machine would."""
        others = sorted(
            {
                difference
                for machine in self._machines.values()
                for difference in differences(machine, self.machine)
            }
        )
        out = [list(one) for one in self.budget.out.items()]
        return {
            "engine": self.machine.engine,
            "why": "clients on a network train with it",
            "chunk": 0,
            "threads": self.machine.threads,
            "bits": "close" if others else "same",
            "differs": others,
            "there": self._presence.spans(self.now),
            "cohort": [self._who(client) for client in sorted(self._machines)],
            **({"out_of_transfers": out} if out else {}),
            **({"reported": sorted(self._reported.items())} if self._reported else {}),
        }

    def _who(self, client: int) -> dict[str, Any]:
        """What is known of a client, for the report."""
        seat = self.desk.seat(client)
        machine = self._machines[client]
        return {
            "client": client,
            "name": seat.name,
            "examples": seat.examples,
            "held_out": seat.held_out,
            "machine": None if machine is None else msgspec.to_builtins(machine),
            "differs": differences(machine, self.machine),
        }

    def saved(self) -> None:
        """A checkpoint with the newest `state` is on the disk: what it contains can go."""
        if not self.record:
            self.files.delete(self._covered)
            self.journal.forget_before(self._applied - len(self._waiting))
        self._covered = []
        # What writing it took.
        give_back()
        self.watching.saved()

    @property
    def _live(self) -> bool:
        """Whether this happens now, and was not gone through before a restart."""
        return not self.journal.behind

    # Events

    def _next(self, wake: float) -> Event | None:
        """The next event; None where none came for a moment."""
        if self.journal.behind:
            event = self.journal.next(LOOK)
        else:
            # All that was logged before a restart has been gone through: clients may come.
            if not self.desk.open.is_set():
                # Deadlines wait until clients have noticed that the server is back.
                self.clock.hold(BACK_OFF if self.journal.resumed else 0.0)
                self.desk.begin(BACK_OFF)
                self._sweep()
            left = wake - self.clock.now()
            if left <= 0:
                # Logged, since what it brings about can be seen: who is asked.
                self.journal.write("tick")
                left = LOOK
            event = self.journal.next(min(left, LOOK))
        if event is None:
            return None
        self.now = event.at
        self._applied = event.seq
        if not self.desk.open.is_set():
            self._see(event)
        return event

    def _see(self, event: Event) -> None:
        """Who is there after an event of an earlier life of the server: its handlers knew that."""
        seat = self.desk.seat(event.client) if event.client >= 0 else None
        if seat is None:
            return
        if event.kind in ("check_in", "back", "update", "measured"):
            seat.here, seat.missing = True, False
        elif event.kind in ("leave", "missing", "failed"):
            seat.here, seat.missing = False, event.kind == "missing"

    def _sweep(self) -> None:
        """Removes updates of which nothing more is to be made, and which a kill has left here."""
        if not self.record:
            self.files.keep_only({*self._arrived, *self._underway, *self._over})

    def _apply(self, coordinator: Coordinator, event: Event) -> list[Action]:
        """Tells the coordinator of an event."""
        ticket = event.ticket
        match event.kind:
            case "check_in":
                here = from_json(event.body, Here)
                self._met(event.client, here)
                self._presence.came(event.client, event.at)
                coordinator.arrive(event.client, here.examples)
                return coordinator.tick(self.now) if self._begun else []
            case "begin":
                self._begun = True
                return coordinator.tick(self.now)
            case "leave":
                coordinator.leave(event.client)
                self._presence.went(event.client, event.at)
                return []
            case "tick":
                return [*self._expire(coordinator), *coordinator.tick(self.now)]
            case "missing":
                self._presence.went(event.client, event.at)
                return coordinator.missing(ticket, self.now)
            case "back":
                self._presence.came(event.client, event.at)
                return coordinator.back(ticket, self.now)
            case "failed":
                reason = event.body.decode(errors="replace") or "it failed"
                self._give_up(ticket, reason)
                return coordinator.failed(ticket, reason, self.now)
            case "update":
                return self._arrive(coordinator, event)
            # Of a measurement that was over before this came.
            case _:
                return []

    def _arrive(self, coordinator: Coordinator, event: Event) -> list[Action]:
        """An update lies here."""
        ticket = event.ticket
        said = from_json(event.body, Reserve)
        if self._live:
            self.watching.came(event.client, said)
        self.desk.done(event.client, ticket)
        if said.metrics:
            self._reported[event.client] = dict(list(said.metrics.items())[:MOST_REPORTED])
        under = self._underway.get(ticket)
        self._arrived[ticket] = Arrived(event.client, under.round if under else -1, said)
        actions = coordinator.update(ticket, self.now)
        whys = [one.reason for one in actions if isinstance(one, Refuse) and one.ticket == ticket]
        self._land(ticket, "late" if whys else "accepted", said.bytes, "; ".join(whys))
        return actions

    def _expire(self, coordinator: Coordinator) -> list[Action]:
        """Tickets whose time is up, where no round ends them."""
        actions: list[Action] = []
        for ticket in list(self._underway):
            deadline = self._deadline(coordinator, ticket)
            if deadline is not None and self.now >= deadline and not coordinator.synchronous:
                self._give_up(ticket, TOO_LONG)
                actions += coordinator.expired(ticket, self.now)
                # Its client is told so, and is free again.
                coordinator.failed(ticket, TOO_LONG, self.now)
        return actions

    def _wake(self, coordinator: Coordinator) -> float:
        """When time alone has something to do."""
        if coordinator.synchronous:
            return coordinator.wake
        ends = [self._deadline(coordinator, ticket) for ticket in self._underway]
        return min([coordinator.wake, *(end for end in ends if end is not None)])

    def _deadline(self, coordinator: Coordinator, ticket: int) -> float | None:
        return coordinator.assignment(ticket).deadline if coordinator.waits_for(ticket) else None

    def _let_go(self, coordinator: Coordinator) -> None:
        """Those who still work for a round that is over are told so, and are free again."""
        for ticket in list(self._underway):
            if not coordinator.waits_for(ticket):
                self._give_up(ticket, "late")
                coordinator.failed(ticket, "the round is over", self.now)

    def _give_up(self, ticket: int, outcome: str) -> None:
        """Nothing more is waited for, and what has come of an update is of no use."""
        under = self._underway.get(ticket)
        self._land(ticket, outcome, 0)
        self._over.append(ticket)
        if under is not None:
            self.desk.done(under.client, ticket)

    def _land(self, ticket: int, outcome: str, up: int, why: str = "") -> None:
        """What became of an assignment, for the report."""
        under = self._underway.pop(ticket, None)
        if under is None:
            return
        # What came in time is accepted or refused only where it is folded.
        if self._live and outcome != "accepted":
            self.watching.came_of(under.client, ticket, *_in_short(outcome, why))
        said = self._arrived[ticket].said if ticket in self._arrived else None
        if not up:
            self.budget.give_back(under.client, self._up)
        whole = self.now - under.began
        compute = min(said.seconds, whole) if said is not None else 0.0
        self.flown.append(
            Flight(
                client=under.client,
                round=under.round,
                began=under.began,
                ended=self.now,
                outcome=outcome,
                down=under.down,
                up=up,
                transfer_seconds=whole - compute if said is not None else 0.0,
                compute_seconds=compute,
            )
        )

    # Actions

    def _do(self, coordinator: Coordinator, actions: Sequence[Action]) -> Combine | None:
        """Does what the coordinator wants done."""
        combine = None
        # Whoever cannot be asked is replaced at once, by more actions.
        waiting = deque(actions)
        while waiting:
            action = waiting.popleft()
            if isinstance(action, Combine):
                combine = action
            elif isinstance(action, Assign):
                waiting.extend(self._assign(coordinator, action.assignment))
            else:
                self._refuse(action)
        return combine

    def _assign(self, coordinator: Coordinator, asked: Assignment) -> list[Action]:
        """An assignment goes to its client, if that may transfer it."""
        sent = self.sending.sent(coordinator, asked)
        self._up = size_of(sent.forms)
        if not self.budget.take(asked.client, sent.size, self._up):
            return coordinator.failed(asked.ticket, SPENT, self.now)
        self._hand(coordinator, asked)
        self._underway[asked.ticket] = Underway(asked.client, asked.round, self.now, sent.size)
        if self._live:
            self.watching.assigned(asked.client, asked.ticket, asked.round, sent.size)
        return []

    def _hand(self, coordinator: Coordinator, asked: Assignment) -> None:
        """Puts an assignment on the desk."""
        sent = self.sending.sent(coordinator, asked)
        train = Train(asked.ticket, asked.round, asked.turn, sent.digest, sent.size)
        self.desk.assign(asked.client, train, asked.deadline, sent.forms)
        self.desk.newest = sent.digest

    def _refuse(self, refused: Refuse) -> None:
        """An update does not count, and lies here for nothing."""
        arrived = self._arrived.pop(refused.ticket, None)
        if arrived is not None:
            self._over.append(refused.ticket)
            self.desk.tell(arrived.client, Outcome(refused.ticket, False, refused.reason))

    def _settle(self, ticket: int, outcome: Outcome) -> None:
        client = self._unsettled.pop(ticket, None)
        if client is None:
            return
        self.desk.tell(client, outcome)
        if self._live:
            became = "accepted" if outcome.kept else "refused"
            self.watching.came_of(client, ticket, became, outcome.reason)

    def _met(self, client: int, here: Here) -> None:
        self._machines[client] = here.machine
        if here.held_out:
            self._measure.add(client)
        else:
            self._measure.discard(client)
        seat = self.desk.seat(client)
        seat.name = here.name
        seat.examples = here.examples
        seat.held_out = here.held_out
        seat.machine = here.machine

    # Checkpoints

    def state(self) -> dict[str, Any]:
        self._covered = list(self._over)
        self._over = []
        return {
            "now": self.now,
            "applied": self._applied,
            "begun": self._begun,
            "budget": self.budget.state(),
            # Checkpoints have texts and no bytes; any byte is a letter of this alphabet.
            "waiting": [[*event[:-1], event.body.decode("latin-1")] for event in self._waiting],
            "underway": {ticket: list(one) for ticket, one in self._underway.items()},
            "arrived": {
                ticket: [one.client, one.round, msgspec.to_builtins(one.said)]
                for ticket, one in self._arrived.items()
            },
            "outcomes": {
                seat.number: [msgspec.to_builtins(one) for one in list(seat.outcomes.values())]
                for seat in self.desk.everybody()
                if seat.outcomes
            },
            "clients": [
                [seat.number, seat.name, seat.examples, seat.held_out, seat.here]
                for seat in self.desk.everybody()
            ],
            "machines": [
                [client, None if machine is None else msgspec.to_builtins(machine)]
                for client, machine in self._machines.items()
            ],
            "presence": self._presence.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from there: the journal's events after it come next."""
        self.now = state["now"]
        self._applied = state["applied"]
        self._waiting = deque(
            Event._make([*event, body.encode("latin-1")]) for *event, body in state["waiting"]
        )
        self._underway = {ticket: Underway(*one) for ticket, one in state["underway"].items()}
        self._arrived = {
            ticket: Arrived(client, round, msgspec.convert(said, Reserve))
            for ticket, (client, round, said) in state["arrived"].items()
        }
        self._begun = state["begun"]
        self.budget.restore(state["budget"])
        for number, name, examples, held_out, here in state["clients"]:
            seat = self.desk.seat(number)
            seat.name = name
            seat.examples = examples
            seat.held_out = held_out
            seat.here = here
            if held_out:
                self._measure.add(number)
        for client, machine in state.get("machines", ()):
            self._machines[client] = msgspec.convert(machine, Machine | None)
            self.desk.seat(client).machine = self._machines[client]
        if "presence" in state:
            self._presence.restore(state["presence"])
        for client, outcomes in state["outcomes"].items():
            for one in outcomes:
                self.desk.tell(client, msgspec.convert(one, Outcome))
        self._again = list(self._underway)
        self.journal.read_from(self._applied)


def _in_short(outcome: str, why: str) -> tuple[str, str]:
    """(what became of an assignment in a word, and why), where there is no update that counts."""
    if outcome == "late":
        return "late", why
    return ("expired", outcome) if outcome == TOO_LONG else ("failed", outcome)


def differences(machine: Machine | None, mine: Machine) -> list[str]:
    """In what a client's machine computes differently from the server's, in words."""
    if machine is None:
        return ["a training loop of its own"]
    found = []
    for name in ("torch", "capability", "engine", "threads"):
        theirs, ours = getattr(machine, name), getattr(mine, name)
        if theirs != ours:
            found.append(f"{name} {theirs}, not {ours}")
    return found


def _measured(client: int, said: MeasuredThis) -> Measured:
    """What one client says, as a message of one."""
    values = {name: [_number(value)] for name, value in said.values.items()}
    sums = {name: [list(map(_number, row))] for name, row in said.sums.items()}
    examples = {name: [count] for name, count in said.examples.items()}
    failures = {client: said.failure} if said.failure else {}
    return Measured([client], values, examples, sums, dict(said.forms), failures)


def _number(value: float | None) -> float:
    return math.nan if value is None else value
