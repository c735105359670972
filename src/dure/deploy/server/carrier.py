"""Carrier of a deployed federation: from the journal to the coordinator, and to the outbox.

    journal -> event -> coordinator -> actions -> outbox      until the coordinator can combine

Handlers write clients' messages to the journal. The carrier, in the main thread, applies the events
of the journal in order, each with its logged time. The coordinator's state is therefore a function
of the journal: after a restart the same code applies the events after the checkpoint again, with
the same bits. Only inputs are logged; the content of the outbox follows from the coordinator's
actions. `events.py` lists the kinds of events.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from torch import Tensor

from dure.contracts.learner import StepInterrupted
from dure.deploy.clock import FederationClock
from dure.deploy.journal import Event, Journal
from dure.deploy.server.blob_cache import BlobCache
from dure.deploy.server.cohort import CheckInRecord, FederationCohort
from dure.deploy.server.durable_once import DurableOnce, steps
from dure.deploy.server.events import JournalEvents
from dure.deploy.server.model_digests import ModelDigests
from dure.deploy.server.model_streams import ModelStreams
from dure.deploy.server.network_evaluation import NetworkEvaluation
from dure.deploy.server.outbox import ClientOutbox
from dure.deploy.server.protocol_steps import ProtocolSteps
from dure.deploy.server.server_metrics import ServerMetrics
from dure.deploy.tree_files import TreeFiles
from dure.deploy.updates import Updates
from dure.errors import DamagedUpdateError, RunFolderError
from dure.fleet.budget import TransferBudget
from dure.machine.memory import trim_heap
from dure.protocol.carrier import (
    Action,
    Assign,
    AssignmentRecord,
    Combine,
    CoordinatorProtocol,
    Draft,
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
)
from dure.record.disk import write_atomically
from dure.record.seal import checksum
from dure.record.untrusted_files import contents
from dure.wire.layout import FederationSpec
from dure.wire.requests import (
    Machine,
    RequestError,
    Train,
    UpdateOutcome,
    UploadRequest,
    from_json,
)
from dure.wire.tensors import size_of

COHORT = "cohort.json"
"""File in the run folder: numbers of examples of the clients at the start of the first round."""

ONCE = "once"
"""Folder in the run folder: files of results that are computed once."""

FOLLOWS = b"follows"
"""Body of "begin" in journals in which every event serves as a tick that is due."""

TOO_LONG = "it took too long"
"""Outcome of an assignment that has timed out, in a run without rounds."""

SPENT = "it has used up what it may transfer"


class NetworkAssignment(NamedTuple):
    """Assignment in progress.

    `began` is a time on the federation's clock; `down` is the number of bytes downloaded.
    """

    client: int
    round: int
    began: float
    down: int


class ReceivedUpdate(NamedTuple):
    """Received update; `said` is the announcement of its upload."""

    client: int
    round: int
    said: UploadRequest


class FederationStores(NamedTuple):
    """Files, queues and caches that the carrier shares with the handlers of requests.

    Args:
        folder: Run folder.
        journal: Journal of the run.
        clock: Federation's clock.
        updates: Files of the clients' updates.
        outbox: Outbox of messages to clients.
        cache: Cache of the streams that clients download.
        models: Recorded digests, with which models are compared.
        once: Folder of the results computed once.
    """

    folder: Path
    journal: Journal
    clock: FederationClock
    updates: Updates
    outbox: ClientOutbox
    cache: BlobCache
    models: ModelDigests
    once: Path


class ServingSettings(NamedTuple):
    """Settings of a served federation.

    Args:
        start_with: Number of available clients that the first round waits for.
        answer_timeout: Timeout in seconds of a round, or of an assignment without rounds, if the
            strategy sets no deadline.
        measure_seconds: Timeout of an evaluation by clients.
        record: Whether to keep all updates and events for a replay.
        exchange_seconds: Timeout of a step of a protocol.
    """

    start_with: int
    answer_timeout: float
    measure_seconds: float
    record: bool
    exchange_seconds: float = 60.0


class NetworkCarrier:
    """Carrier between a coordinator and clients over a network.

    Args:
        federation: Description of the federation.
        stores: Files, queues and caches of the run.
        settings: Timeouts, and whether to record.
        machine: Properties of the server's machine.
        budget: Transfer quotas of the clients.
        interrupted: Function that returns whether the user wants the server to stop.
        tell: Listener for messages to the user.
        server_metrics: Metrics and log of the server.
    """

    checked = False
    patient = True
    clock_is = "wall_seconds"
    reads: type[JournalEvents] = JournalEvents
    """Class that reads the journal."""

    def __init__(
        self,
        *,
        federation: FederationSpec,
        stores: FederationStores,
        settings: ServingSettings,
        machine: Machine,
        budget: TransferBudget,
        interrupted: Callable[[], bool],
        tell: Callable[[str], None],
        server_metrics: ServerMetrics | None = None,
    ) -> None:
        self.federation = federation
        self.folder = stores.folder
        self.journal = journal = stores.journal
        self.files = stores.updates
        self.outbox = outbox = stores.outbox
        self.sending = ModelStreams(federation, outbox, stores.cache, stores.updates)
        self.machine = machine
        self.start_with = settings.start_with
        self.answer_timeout: float | None = settings.answer_timeout
        self.record = settings.record
        self.budget = budget
        self._up = 0
        """Bytes of an update."""
        self.interrupted = interrupted
        self.tell = tell
        self.server_metrics = server_metrics or ServerMetrics()
        self.events = self.reads(journal, stores.clock, outbox, self._sweep)
        self.cohort = FederationCohort(outbox, machine, federation.holds)
        self.measuring = NetworkEvaluation(
            self.events,
            journal,
            outbox,
            settings.measure_seconds,
            interrupted,
            self.server_metrics,
        )
        self.making = DurableOnce(self.events, journal, TreeFiles(stores.once), not self.record)
        self.exchanging = ProtocolSteps(
            self.events,
            outbox,
            self.files,
            self.making,
            settings.exchange_seconds,
            interrupted,
            self.server_metrics,
        )
        self.models = stores.models
        self.flown: list[AssignmentRecord] = []
        self._begun = False
        self._kept_to = 1
        """Minimum number of clients of a new model that the coordinator guarantees."""
        self._follows = False
        """Whether every event serves as a tick; in journals of earlier versions only ticks do."""
        self._again: list[int] = []
        """Assignment ids of a checkpoint, whose assignments must return to the outbox."""
        self._restored: list[ReceivedUpdate] = []
        """Updates of a checkpoint, whose files must still be checked."""
        self._underway: dict[int, NetworkAssignment] = {}
        self._arrived: dict[int, ReceivedUpdate] = {}
        self._unsettled: dict[int, int] = {}
        """Client of each assignment whose outcome has not been reported."""
        self._over: list[int] = []
        """Assignment ids whose files the next checkpoint makes obsolete."""
        self._covered: list[int] = []
        self._newest: tuple[int, Sequence[Tensor], Sequence[Tensor]] | None = None
        self._models_digest: str | None = None
        """SHA-256 of the file of model digests, once the run has ended."""

    @property
    def now(self) -> float:
        """Time of the newest event, on the federation's clock."""
        return self.events.now

    # Interface of a carrier

    def join(self) -> JoinMessage:
        """Wait until enough clients are available for the first round.

        `carry` applies their events in the first round.
        """
        cohort = self.folder / COHORT
        if cohort.exists():
            return JoinMessage(_examples_in(cohort))
        if any((self.folder / "checkpoint").glob("[0-9]*")):
            raise RunFolderError(
                f"{cohort} is missing, but there is a checkpoint of a started run: restore it "
                "from a copy"
            )
        present: dict[int, int] = {}
        begun = False
        while not begun:
            event = self.events.next(math.inf)
            if event is None:
                if self.interrupted():
                    raise KeyboardInterrupt
                continue
            self.events.aside.append(event)
            if event.kind == "check_in":
                with self._row(event):
                    record = from_json(event.body, CheckInRecord)
                present[event.client] = record.examples
                self.cohort.met(event.client, record)
                self.tell(self._who_is_there(len(present)))
            elif event.kind == "asks":
                with self._row(event):
                    self.cohort.asks(event.client, from_json(event.body, CheckInRecord))
            elif event.kind == "leave":
                present.pop(event.client, None)
            begun = event.kind == "begin"
            # In a replay of the journal, the journal has the event itself.
            needed = max(self.start_with, self.cohort.smallest)
            if len(present) >= needed and not begun and not self.journal.behind:
                self.journal.write("begin", body=FOLLOWS)
        sizes = [present.get(client, 0) for client in range(self.federation.clients)]
        # A checkpoint deletes earlier events, and every checkpoint needs these numbers.
        write_atomically(cohort, _cohort_written(sizes))
        # Returns the memory that making the model took.
        trim_heap()
        return JoinMessage(sizes)

    def _who_is_there(self, present: int) -> str:
        asked = self.cohort.smallest
        if asked <= self.start_with:
            return f"{present} of {self.start_with} clients are connected"
        return f"{present} of {asked} clients are connected; one of them requires {asked}"

    def carry(self, coordinator: CoordinatorProtocol) -> Combine:
        """Apply events until the coordinator can make a new model. Raises Interrupted."""
        # A server that was interrupted while making a model continues with the same updates.
        if coordinator.combining:
            return Combine(coordinator.combining)
        self._lay_again(coordinator)
        self._let_go(coordinator)
        self.server_metrics.round_begins()
        ticked = False
        while True:
            self.server_metrics.pulse(self.outbox, "training")
            aside = self.events.aside
            if not aside and not ticked and self._due(coordinator):
                ticked = True
                actions = self._tick(coordinator)
            else:
                event = aside.popleft() if aside else self.events.next(self._wake(coordinator))
                if event is None:
                    if self.interrupted():
                        raise StepInterrupted
                    continue
                ticked = False
                with self._row(event):
                    actions = self._apply(coordinator, event)
            combine = self._do(coordinator, actions)
            if combine is not None:
                return combine

    def _lay_again(self, coordinator: CoordinatorProtocol) -> None:
        """Refill the outbox after a checkpoint was read."""
        again = self._again
        self._again = []
        # Updates from before the checkpoint, which are combined after it.
        for arrived in self._restored:
            self._check_file(arrived)
        self._restored = []
        for ticket in again:
            if coordinator.waits_for(ticket):
                self._hand(coordinator, coordinator.assignment(ticket))

    def updates(self, coordinator: CoordinatorProtocol, tickets: Sequence[int]) -> Iterator[Update]:
        """Yield the clients' updates from their files, in order."""
        for ticket in tickets:
            arrived = self._arrived.pop(ticket)
            self._unsettled[ticket] = arrived.client
            self._over.append(ticket)
            asked = coordinator.assignment(ticket)
            began = time.perf_counter()
            # No local reference: its memory is freed before the next update is read.
            yield self._read(arrived, asked, coordinator)
            # The consumer has taken the update when it requests the next.
            self.server_metrics.fold_seconds.observe(time.perf_counter() - began)

    def _read(
        self, arrived: ReceivedUpdate, asked: Assignment, coordinator: CoordinatorProtocol
    ) -> Update:
        with self._blames(arrived):
            return self.sending.update(arrived.said, asked, coordinator)

    def hold(self, coordinator: CoordinatorProtocol, tickets: Sequence[int]) -> None:
        """Do nothing: the assignments state that updates stay at their clients.

        `settle` reports the outcomes; until then a checkpoint lists the updates as received.
        """

    def exchange(self, says: Sequence[ProtocolStep]) -> Iterator[ProtocolAnswer]:
        return self.exchanging.with_clients(says)

    def once(self, what: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return a result computed once, after it is in the run folder and named in the journal.

        Raises RunFolderError if the file of an earlier result is missing or damaged.
        """
        tree, made = self.making.get(what, make)
        self.flown += steps(made, self._newest[0] if self._newest else 0, self.now)
        return tree

    @property
    def draft(self) -> Draft:
        return self.making.draft

    def settle(self, settled: UpdateOutcomes) -> None:
        """Report outcomes of updates to the clients, until the clients confirm them."""
        reasons = dict(zip(settled.dropped, settled.reasons, strict=False))
        for ticket in settled.kept:
            self._settle(ticket, UpdateOutcome(ticket, True))
        for ticket in settled.dropped:
            self._settle(ticket, UpdateOutcome(ticket, False, reasons.get(ticket, "")))
        self.making.model_made()
        if self.events.live:
            self.server_metrics.round_made()
        # Frees memory before the next checkpoint and the next round.
        self.sending.forget_unwanted()

    def made(self, number: int, weights: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        # The previous model was sent to no client, and so was not hashed.
        if self._newest is not None and self._newest[0] not in self.models.met:
            self.models.note(self._newest[0], "made", self.sending.digest(*self._newest[1:]))
        self._newest = (number, weights, buffers)

    def ended(self, reason: str) -> None:
        """Report to the clients that the run has ended, and its last model.

        An interruption is not reported: the run may resume later.
        """
        if reason == "interrupt":
            self._models_digest = self.models.sha256()
            return
        if self._newest is not None:
            self.outbox.final = self.sending.measured(*self._newest)
            self.models.note(self._newest[0], "made", self.outbox.final.tensors)
        self._models_digest = self.models.sha256()
        self.outbox.end("the run is over")

    def measure(self, measure: EvaluationRequest) -> EvaluationResults:
        """Have the available clients with held-out examples evaluate a model, until a timeout.

        Other events wait meanwhile. Clients that time out are left out.
        """
        # Also if all clients are away: the decision to wait must follow from the journal.
        if not self.cohort.measures:
            return EvaluationResults([], {})
        request = self.sending.measured(measure.round, measure.weights, measure.buffers)
        return self.measuring.by_clients(request)

    def losses(
        self, clients: Sequence[int], weights: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> list[float]:
        raise ValueError("clients over a network are not asked for losses before a round")

    def kept(self) -> PersonalisedMean:
        """Return an empty message: personalised values never leave their clients."""
        return PersonalisedMean(())

    def answers_left(self, different: bool) -> float:
        if self.budget.limit is None:
            return math.inf
        often = [self.budget.left(client) for client in range(self.federation.clients)]
        if different:
            return sum(1 for times in often if times)
        return sum(often) + len(self._underway) + len(self._arrived)

    def facts(self) -> Mapping[str, Any]:
        """Return facts about the clients' machines and about bitwise equality, for the report."""
        out = [list(one) for one in self.budget.out.items()]
        return {
            "engine": self.machine.engine,
            "why": "clients on a network train with it",
            "chunk": 0,
            "threads": self.machine.threads,
            **self._bits(),
            **({"models_sha256": self._models_digest} if self._models_digest else {}),
            **({"out_of_transfers": out} if out else {}),
        }

    def _bits(self) -> dict[str, Any]:
        """Return facts on the clients, and whether models equal a simulation's bit for bit."""
        found = dict(self.cohort.facts(self.now))
        if self.models.differ:
            again = f"the resumed server computed model {self.models.differ[0]} with other bits"
            found |= {"bits": "close", "differs": [*found["differs"], again]}
        return found

    def saved(self) -> None:
        """Delete the files and events that the stored checkpoint makes obsolete."""
        self.models.sync()
        if not self.record:
            self.files.delete(self._covered)
            self.journal.forget_before(self.events.applied - len(self.events.aside))
        self._covered = []
        self.making.saved()
        # Returns the memory that writing the checkpoint took.
        trim_heap()
        self.server_metrics.saved()

    # Events

    def _sweep(self) -> None:
        """Delete files of updates that are no longer used, or that a kill has left.

        Raises RunFolderError if the journal has lost rows: the rows are synced before the digest of
        the model made of them is written.
        """
        made = self._newest[0] if self._newest is not None else 0
        if self.models.newest > made:
            raise RunFolderError(
                f"{self.journal.path} is damaged: it ends at model {made}, but model "
                f"{self.models.newest} was made: restore the file and its log from a copy"
            )
        self.making.sweep()
        if self.federation.holds:
            # Remains of answers that a kill has interrupted; deleted even if the run is recorded.
            self.files.keep_only([])
        elif not self.record:
            self.files.keep_only({*self._arrived, *self._underway, *self._over})

    @contextmanager
    def _row(self, event: Event) -> Iterator[None]:
        """Context manager: report an invalid row of the journal.

        The row may be from an earlier process or another program. Raises RunFolderError.
        """
        try:
            yield
        except (RequestError, IndexError) as error:
            raise RunFolderError(
                f"{self.journal.path} is damaged: row {event.seq} is not a {event.kind!r} that "
                f"this server has written ({error}): restore it from a copy"
            ) from error

    def _apply(self, coordinator: CoordinatorProtocol, event: Event) -> list[Action]:
        """Pass an event to the coordinator, and return the actions."""
        ticket = event.ticket
        match event.kind:
            case "check_in":
                record = from_json(event.body, CheckInRecord)
                self.cohort.met(event.client, record)
                self.cohort.presence.came(event.client, event.at)
                coordinator.arrive(event.client, record.examples)
                self._keep_to_cohort(coordinator)
                return coordinator.tick(self.now) if self._begun else []
            case "asks":
                with self._row(event):
                    self.cohort.asks(event.client, from_json(event.body, CheckInRecord))
                self._keep_to_cohort(coordinator)
                return []
            case "begin":
                self._begun = self.outbox.begun = True
                self._follows = event.body == FOLLOWS
                return coordinator.tick(self.now)
            case "leave":
                coordinator.leave(event.client)
                self.cohort.presence.went(event.client, event.at)
                return []
            case "tick":
                return self._tick(coordinator)
            case "missing":
                self.cohort.presence.went(event.client, event.at)
                return coordinator.missing(ticket, self.now)
            case "back":
                self.cohort.presence.came(event.client, event.at)
                return coordinator.back(ticket, self.now)
            case "failed":
                reason = event.body.decode(errors="replace") or "it failed"
                self._give_up(ticket, reason)
                return coordinator.failed(ticket, reason, self.now)
            case "update":
                return self._arrive(coordinator, event)
            # For example "measured", after the evaluation has ended.
            case _:
                return []

    def _keep_to_cohort(self, coordinator: CoordinatorProtocol) -> None:
        """Have the coordinator guarantee the largest cohort that any client requires."""
        if self.cohort.smallest != self._kept_to:
            self._kept_to = self.cohort.smallest
            coordinator.require_clients(self._kept_to)

    def _arrive(self, coordinator: CoordinatorProtocol, event: Event) -> list[Action]:
        """Pass a received update to the coordinator."""
        ticket = event.ticket
        said = from_json(event.body, UploadRequest)
        holds = self.federation.holds
        if self.events.live and holds:
            self.server_metrics.holds(event.client, ticket)
        elif self.events.live:
            self.server_metrics.came(event.client, said)
        self.outbox.done(event.client, ticket)
        self.cohort.reports(event.client, said)
        under = self._underway.get(ticket)
        arrived = ReceivedUpdate(event.client, under.round if under else -1, said)
        self._arrived[ticket] = arrived
        actions = coordinator.update(ticket, self.now)
        whys = [one.reason for one in actions if isinstance(one, Refuse) and one.ticket == ticket]
        if not whys:
            self._check_file(arrived)
        self._land(ticket, "late" if whys else "accepted", said.bytes, "; ".join(whys))
        return actions

    def _check_file(self, arrived: ReceivedUpdate) -> None:
        """Check that the file of an update has the digest that its client sent.

        During the replay of the journal after a restart no client is served: damage ends the server
        before any client trains. Raises DamagedUpdateError.
        """
        if not self.federation.holds and arrived.said.failure is None:
            with self._blames(arrived):
                self.files.check(arrived.said.ticket, arrived.said.digest)

    @contextmanager
    def _blames(self, arrived: ReceivedUpdate) -> Iterator[None]:
        """Context manager: add the client and the round to an error about damage."""
        try:
            yield
        except DamagedUpdateError as error:
            name = self.outbox.session(arrived.client).name
            raise DamagedUpdateError(
                f"{error}: the file is the update of client {arrived.client} ({name!r}) in round "
                f"{arrived.round + 1}, on which later models depend: restore it from a copy, or "
                "continue from a backup of the run"
            ) from error

    def _expire(self, coordinator: CoordinatorProtocol) -> list[Action]:
        """Let assignments time out, in a run without rounds."""
        actions: list[Action] = []
        for ticket in list(self._underway):
            deadline = self._deadline(coordinator, ticket)
            if deadline is not None and self.now >= deadline and not coordinator.synchronous:
                self._give_up(ticket, TOO_LONG)
                actions += coordinator.expired(ticket, self.now)
                # Its client is notified, and is free for other work.
                coordinator.failed(ticket, TOO_LONG, self.now)
        return actions

    def _tick(self, coordinator: CoordinatorProtocol) -> list[Action]:
        return [*self._expire(coordinator), *coordinator.tick(self.now)]

    def _due(self, coordinator: CoordinatorProtocol) -> bool:
        """Return whether the time of the newest event requires a tick.

        The next round begins at the time of the last update of the round before. The update's row
        therefore serves as the tick, without a row and a sync for the tick.
        """
        return self._follows and self._wake(coordinator) <= self.now

    def _wake(self, coordinator: CoordinatorProtocol) -> float:
        """Return the time at which a tick is required."""
        if coordinator.synchronous:
            return coordinator.wake
        ends = [self._deadline(coordinator, ticket) for ticket in self._underway]
        return min([coordinator.wake, *(end for end in ends if end is not None)])

    def _deadline(self, coordinator: CoordinatorProtocol, ticket: int) -> float | None:
        return coordinator.assignment(ticket).deadline if coordinator.waits_for(ticket) else None

    def _let_go(self, coordinator: CoordinatorProtocol) -> None:
        """Notify clients that still work for a round which has ended; they are free again."""
        for ticket in list(self._underway):
            if not coordinator.waits_for(ticket):
                self._give_up(ticket, "late")
                coordinator.failed(ticket, "the round is over", self.now)

    def _give_up(self, ticket: int, outcome: str) -> None:
        """End an assignment without an update, and drop its partial upload."""
        under = self._underway.get(ticket)
        self._land(ticket, outcome, 0)
        self._over.append(ticket)
        if under is not None:
            self.outbox.done(under.client, ticket)

    def _land(self, ticket: int, outcome: str, up: int, why: str = "") -> None:
        """Record the end of an assignment, for the report."""
        under = self._underway.pop(ticket, None)
        if under is None:
            return
        # An update that arrived in time is accepted or refused when it is added to the mean.
        if self.events.live and outcome != "accepted":
            self.server_metrics.came_of(under.client, ticket, *_in_short(outcome, why))
        said = self._arrived[ticket].said if ticket in self._arrived else None
        # An update that stays at its client is sent later, as part of sums.
        holds = self.federation.holds and said is not None
        if not up and not holds:
            self.budget.give_back(under.client, self._up)
        whole = self.now - under.began
        compute = min(max(said.seconds, 0.0), whole) if said is not None else 0.0
        # The computing time would reveal the number of examples.
        compute = whole if holds else compute
        self.flown.append(
            AssignmentRecord(
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

    def _do(self, coordinator: CoordinatorProtocol, actions: Sequence[Action]) -> Combine | None:
        """Carry out the coordinator's actions, and return the `Combine` among them, if any."""
        combine = None
        # A client that cannot be asked is replaced at once, by further actions.
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

    def _assign(self, coordinator: CoordinatorProtocol, asked: Assignment) -> list[Action]:
        """Assign work to its client, if the client's transfer quota allows it."""
        sent = self.sending.sent(coordinator, asked)
        self._up = size_of(sent.forms)
        if not self.budget.take(asked.client, sent.size, self._up):
            return coordinator.failed(asked.ticket, SPENT, self.now)
        self._hand(coordinator, asked)
        self._underway[asked.ticket] = NetworkAssignment(
            asked.client, asked.round, self.now, sent.size
        )
        if self.events.live:
            self.server_metrics.assigned(asked.client, asked.ticket, asked.round, sent.size)
        return []

    def _hand(self, coordinator: CoordinatorProtocol, asked: Assignment) -> None:
        """Put an assignment into the outbox."""
        sent = self.sending.sent(coordinator, asked)
        self.models.note(asked.round, "sent", sent.digest)
        train = Train(
            ticket=asked.ticket,
            round=asked.round,
            turn=asked.turn,
            tensors=sent.digest,
            bytes=sent.size,
            holds=self.federation.holds,
            smallest_cohort=self._kept_to,
        )
        self.outbox.assign(asked.client, train, asked.deadline, sent.forms)
        self.outbox.newest = sent.digest

    def _refuse(self, refused: Refuse) -> None:
        """Report that an update does not count, and mark its file as obsolete."""
        arrived = self._arrived.pop(refused.ticket, None)
        if arrived is not None:
            self._over.append(refused.ticket)
            self.outbox.tell(arrived.client, UpdateOutcome(refused.ticket, False, refused.reason))

    def _settle(self, ticket: int, outcome: UpdateOutcome) -> None:
        client = self._unsettled.pop(ticket, None)
        held = self._arrived.pop(ticket, None)
        if held is not None:
            client = held.client
            self._over.append(ticket)
        if client is None:
            return
        self.outbox.tell(client, outcome)
        if self.events.live:
            became = "accepted" if outcome.kept else "refused"
            self.server_metrics.came_of(client, ticket, became, outcome.reason)

    # Checkpoints

    def state(self) -> dict[str, Any]:
        self._covered = list(self._over)
        self._over = []
        return {
            **self.events.state(),
            **self.cohort.state(),
            "begun": self._begun,
            "kept_to": self._kept_to,
            "follows": self._follows,
            "once": self.making.state(),
            # From a round during which the server was interrupted; otherwise empty.
            "flown": [list(one) for one in self.flown],
            "budget": self.budget.state(),
            "underway": {ticket: list(one) for ticket, one in self._underway.items()},
            "arrived": {
                ticket: [one.client, one.round, msgspec.to_builtins(one.said)]
                for ticket, one in self._arrived.items()
            },
            "outcomes": {
                session.number: [
                    msgspec.to_builtins(one) for one in list(session.outcomes.values())
                ]
                for session in self.outbox.everybody()
                if session.outcomes
            },
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state; the journal's later events follow."""
        self.events.restore(state)
        self.cohort.restore(state)
        self._underway = {
            ticket: NetworkAssignment(*one) for ticket, one in state["underway"].items()
        }
        self._arrived = {
            ticket: ReceivedUpdate(client, round, msgspec.convert(said, UploadRequest))
            for ticket, (client, round, said) in state["arrived"].items()
        }
        self._begun = self.outbox.begun = state["begun"]
        # The coordinator's own state has the same number.
        self._kept_to = state.get("kept_to", 1)
        # In a journal of an earlier version only ticks are ticks.
        self._follows = state.get("follows", False)
        self.budget.restore(state["budget"])
        # Checkpoints of dure up to 0.1 have neither key.
        if "once" in state:
            self.making.restore(state["once"])
        self.flown = [AssignmentRecord(*one) for one in state.get("flown", ())]
        for client, outcomes in state["outcomes"].items():
            for one in outcomes:
                self.outbox.tell(client, msgspec.convert(one, UpdateOutcome))
        self._again = list(self._underway)
        self._restored = list(self._arrived.values())


def _in_short(outcome: str, why: str) -> tuple[str, str]:
    """Return (outcome in a word, reason) of an assignment without a counting update."""
    if outcome == "late":
        return "late", why
    return ("expired", outcome) if outcome == TOO_LONG else ("failed", outcome)


def _examples_in(cohort: Path) -> list[int]:
    """Return the clients' numbers of examples at the start of the first round.

    The upper bound keeps the sum exact in floating point. A file of dure up to 0.1 is a plain list
    without a checksum. Raises RunFolderError for a damaged file.
    """
    try:
        content = contents(cohort)
        written = msgspec.json.decode(content, type=list[_Examples] | _Cohort)
    except (OSError, ValueError, RecursionError) as error:
        raise RunFolderError(f"cannot read {cohort}: {error}") from error
    found = written if isinstance(written, list) else written.examples
    if not found:
        raise RunFolderError(f"{cohort} is damaged: it lists no clients")
    if not isinstance(written, list) and content != _cohort_written(found):
        raise RunFolderError(
            f"{cohort} is damaged: its checksum does not match its content: restore it from a copy"
        )
    return found


def _cohort_written(sizes: Sequence[int]) -> bytes:
    said = checksum(msgspec.json.encode(sizes))
    return msgspec.json.encode({"checksum": said, "examples": sizes})


_Examples = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class _Cohort(msgspec.Struct):
    checksum: str
    examples: list[_Examples]
