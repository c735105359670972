"""The coordinator: the server of a federation as a state machine, without I/O, threads or clock.

The coordinator takes events with their times and returns actions. A driver (a simulation, a
network) carries the messages:

    arrive(client)  check_in(client, now)   a client is available; for drivers that know
    leave(client)                           a client without an assignment has left
    update(ticket, now)                     a client's update has arrived, and is with the driver
    failed(ticket, reason, now)             there will be no update
    missing(ticket, now)                    the client stopped responding, and may come back
    back(ticket, now)                       the client is back, and continues with the same ticket
    expired(ticket, now)                    the assignment's time is over; without rounds only
    tick(now)                               time has passed; `wake` is the time of the next call

    -> Assign(assignment)    Refuse(ticket, client, reason)    Combine(tickets)

A ticket is the id of an assignment. After `Combine` the driver passes the named updates to `fold`,
one after another in the order of the tickets, and calls `finish`, which makes the new global model
(`dure.federated.server.combining`). The tickets are in order of client, so the model depends on the
contents of updates and not on their order of arrival. Until `finish` the updates still belong to
the driver: a state taken between two `fold`s equals the state before the first, and a driver that
resumes from it folds all updates of `combining` again.

The coordinator asks another client in place of a missing client, and counts the first answers. The
driver has two duties. It calls `expired` for an assignment without a round when the assignment's
deadline is over, and `failed` for an assignment whose client restarts from scratch. A client gets
no other assignment until its assignment was answered or has failed, even if that assignment is not
open any more.

With independent sampling of each client (`Selection.samples_independently`), a client that does not
answer is not replaced, and a round waits for all clients that were asked. So a client's presence in
a round depends only on its own sampling and on the client itself.

No model is made of updates of fewer than `fewest` clients, a bound that a driver raises as clients
require it (`require_clients`): no round starts with fewer available clients, a round with fewer
answers at its deadline restarts, and the number is checked once more after refusals, before the
updates are combined (`dure.federated.server.smallest_cohort`).

The pacing decides which clients are asked and when updates are combined
(`dure.federated.server.pacing`). A coordinator restored from a `state` of any moment continues with
the same bits.

Source: K. Bonawitz et al., "Towards Federated Learning at Scale: System Design", MLSys 2019;
McMahan et al. 2017.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dure.errors import TooFewClientsError
from dure.federated.algorithm import Algorithm
from dure.federated.server.combining import (
    MOST_EMPTY_MODELS,
    RoundResult,
    SummedUpdates,
    UpdateCombiner,
)
from dure.federated.server.global_model import GlobalModel
from dure.federated.server.known_losses import KnownLosses
from dure.federated.server.pacing import Pacing
from dure.federated.server.sampling import Candidates, ranked_first
from dure.protocol.carrier import Action, Assign, Combine
from dure.protocol.messages import Assignment, Refuse, Update, nbytes
from dure.randomness.seeds import derive

RETRY = 60.0
"""Seconds until the next attempt if no client was available."""

ATTEMPTS = 10_000
"""Unsuccessful attempts to start a round, or to find a client, after which the server fails."""

WARNED_ATTEMPTS = frozenset(10**power for power in range(1, 16))
"""Numbers of unsuccessful attempts at which a patient coordinator warns."""


class OpenAssignment(NamedTuple):
    """An assignment that is in no model yet, and the state of its update.

    newest: number of the newest model at the time of the assignment; the assignment's own model may
    be older. The tensors besides the weights are of that time. missing: the client stopped
    responding, and another client has its place.
    """

    assignment: Assignment
    newest: int
    reported: bool = False
    missing: bool = False


class OutgoingModel(NamedTuple):
    """Tensors for the next clients. nbytes: of all tensors together."""

    number: int
    weights: list[Tensor]
    buffers: list[Tensor]
    extra: Sequence[Tensor]
    nbytes: int


@dataclass
class Coordinator:
    """State of the server.

    Args:
        model: the global model.
        pacing: policy of requests and models.
        algorithm: its server hooks are called.
        sizes: examples of each client, as far as the server knows them.
        seed: of the run.
        most_counted: largest weight of an example in the loss.
        answer_timeout: timeout of a round in seconds, if the pacing names no deadline, or of an
            assignment without rounds; None for no timeout.
        patient: whether the coordinator warns instead of failing.
        tell: called with a warning of a patient coordinator, after 10, 100, ... unsuccessful
            attempts and after every `MOST_EMPTY_MODELS` models without accepted updates.
        sample_clients: returns the sampled clients of a round, given its number; called once per
            round if the pacing samples clients independently.
        losses: known losses of clients, for a pacing that ranks clients by loss.
        present: clients that have checked in; None if all clients count as reachable.
        wake: time of the next call of `tick`.
        tickets: number of assignments so far.
        open: assignments that are in no model yet, by ticket.
        busy: ticket of each working client.
        deadline: end of the round; inf without a deadline.
        began: whether a round is running.
        fewest: fewest clients of a new model.

    Raises:
        ValueError: `answer_timeout` is not positive, or the pacing needs `sample_clients`.
    """

    model: GlobalModel
    pacing: Pacing
    algorithm: Algorithm
    sizes: Sequence[int]
    seed: int
    most_counted: float = math.inf
    answer_timeout: float | None = None
    patient: bool = False
    tell: Callable[[str], None] = lambda sentence: None
    sample_clients: Callable[[int], Sequence[int]] | None = None
    losses: KnownLosses = field(default_factory=KnownLosses)
    present: set[int] | None = None
    wake: float = math.inf
    tickets: int = 0
    open: dict[int, OpenAssignment] = field(default_factory=dict)
    busy: dict[int, int] = field(default_factory=dict)
    deadline: float = math.inf
    began: bool = False
    fewest: int = 1
    excluded: dict[int, str] = field(default_factory=dict)
    """Clients that get no more assignments, with the reason."""
    sitting_out: set[int] = field(default_factory=set)
    """Clients that get no assignments until the model changes (`sit_out`)."""
    _attempt: int = 0
    """Number of restarts of the round, or of searches without an available client."""
    _position: int = 0
    """Position of the next candidate in the order of clients."""
    _probes: int = 0
    """Candidates checked without success since a client may have become available."""
    _asked: int = 0
    """Clients asked for the next model, without failed and missing clients."""
    _reports: int = 0
    """Updates that have arrived and are not combined."""
    _answered: set[int] = field(default_factory=set)
    """With rounds: clients whose updates have arrived."""
    _answers: dict[int, int] = field(default_factory=dict)
    """Without rounds: number of answers of each client."""
    _order: Candidates | None = None
    _chosen: list[int] = field(default_factory=list)
    """Sampled clients of this round, until they are asked."""
    _nobody_until: float = -math.inf
    """Earliest end of a round with sampled clients but without answers."""
    _past: list[tuple[list[Tensor], list[Tensor]]] = field(default_factory=list)
    """Models for stale assignments, the newest last; empty without simulated staleness."""

    _resized: bool = False
    """Whether a client has reported another size than at the start."""
    _told_few: bool = False
    """Whether the warning about too few clients for a round was given."""

    def __post_init__(self) -> None:
        if self.answer_timeout is not None and not self.answer_timeout > 0:
            raise ValueError(
                f"answer_timeout is {self.answer_timeout}, but it has to be more than 0 seconds"
            )
        self.updates = UpdateCombiner(
            self.model, self.algorithm, self.sizes, self.seed, self.most_counted
        )
        pacing = self.pacing
        self.synchronous = pacing.synchronous
        self.oldest = pacing.oldest
        self._varies = pacing.varies
        if pacing.samples_independently and self.sample_clients is None:
            raise ValueError("this pacing needs a selection by coins")
        self._answer_timeout = pacing.deadline
        if math.isinf(self._answer_timeout) and self.answer_timeout is not None:
            self._answer_timeout = self.answer_timeout
        self._draw = pacing.order
        self._count()

    def _count(self) -> None:
        """Compute the numbers of clients to ask and of answers for the next model."""
        clients = len(self.sizes)
        self.asks = self.pacing.asked(self.seed, self.round, clients)
        self.needs = self.pacing.needed(self.seed, self.round, clients)
        self.minimum = max(self.pacing.minimum, self.fewest)
        # A round for which no client was sampled stays empty.
        if self.needs:
            self.needs = max(self.needs, self.fewest)
        if self.synchronous:
            self.asks = max(self.asks, self.needs)

    @property
    def round(self) -> int:
        """Number of the global model."""
        return self.model.number

    @property
    def unsuccessful_attempts(self) -> int:
        """Unsuccessful attempts in a row to start a round or to find a client."""
        return self._attempt

    # Events

    def check_in(self, client: int, now: float, examples: int | None = None) -> list[Action]:
        """Note that a client is available, and return the actions, such as a new assignment.

        Drivers that do not know availability never call it. examples: present number of examples,
        if the client reports the number. An assignment of the client stays unchanged.
        """
        self.arrive(client, examples)
        return self.tick(now)

    def arrive(self, client: int, examples: int | None = None) -> None:
        """Note that a client is available, without assignments until the next `tick`.

        So a driver may delay the first round until enough clients are available. Raises ValueError
        for a client without examples.
        """
        if examples is not None:
            self._resize(client, examples)
        # The first check-in shows that this driver knows availability. From then on only clients
        # that have checked in are asked.
        if self.present is None:
            self.present = set()
        self.present.add(client)
        self._probes = 0
        if self.synchronous:  # newly available clients come in the round's order again
            self._position = 0

    def require_clients(self, fewest: int) -> None:
        """Make no model of fewer clients from now on; applies to updates that wait already too."""
        self.fewest = self.updates.fewest = fewest
        self._count()

    def _resize(self, client: int, examples: int) -> None:
        """Set the number of examples of a client."""
        if examples < 1:
            raise ValueError(f"a client has {examples} examples, but it needs at least 1")
        if examples == self.sizes[client]:
            return
        if not self._resized:  # the given list belongs to the caller
            self._share(list(self.sizes))
        # `_share` has made it a list.
        self.sizes[client] = examples  # type: ignore[index]
        # Orders that depend on sizes are drawn again, as after `restore`.
        self._order = None

    def _share(self, sizes: list[int]) -> None:
        """Use a list of sizes owned by the coordinator, which bounds updates too."""
        self.sizes = self.updates.sizes = sizes
        self._resized = True

    def leave(self, client: int) -> None:
        """Note that a client without an assignment has left."""
        if self.present is not None:
            self.present.discard(client)

    def update(self, ticket: int, now: float) -> list[Action]:
        """Note that an update has arrived.

        An update that nobody asked for, that arrives twice, or that arrives too late is refused. A
        round is over as soon as its updates are being combined.
        """
        known = self.open.get(ticket)
        if known is None:
            return [self._late(ticket)]
        if known.missing:  # an answer takes a place again, like all answers
            known = self._return(known)
        client = known.assignment.client
        if known.reported:
            return [Refuse(ticket, client, "it was sent already")]
        if self.synchronous and self.updates.tickets:
            # Between `Combine` and `finish` the updates of the round are fixed: this update is
            # late.
            del self.open[ticket]
            return [self._late(ticket)]
        # Overwriting a key preserves its place, so `open` stays in order of tickets, on which
        # `_take` relies.
        self.open[ticket] = known._replace(reported=True)
        self._reports += 1
        self.busy.pop(client, None)
        if self.synchronous:
            self._answered.add(client)
        else:
            self._attempt = 0
            self._answers[client] = self._answers.get(client, 0) + 1
        combined = self._combine(now)
        if combined:
            return combined
        if not self.synchronous and self._asked == self._reports:
            self._probes = 0  # the last working client has answered
        return self._fill(now) if self._asked < self.asks or not self.synchronous else []

    def failed(self, ticket: int, reason: str, now: float) -> list[Action]:
        """Note that a client will not answer: it was away, dropped out, or reported a failure.

        Another client is asked instead. A client that has answered cannot fail any more: its update
        is with the driver.
        """
        known = self.open.get(ticket)
        if known is None:
            # Called for its side effect: the client, busy until now for a finished round, is free
            # again.
            self._late(ticket)
            return []
        # A connection may be lost after the answer has arrived; the answer stays valid.
        if known.reported:
            return []
        del self.open[ticket]
        self.busy.pop(known.assignment.client, None)
        self._gone(known)
        return self._replace(known, now)

    def missing(self, ticket: int, now: float) -> list[Action]:
        """Note that the client of an open assignment stopped responding; it may come back.

        Another client is asked in its place. The assignment stays open: an answer that arrives
        while answers are still needed counts. An assignment that is not open, is answered, or is
        missing already does not change.
        """
        known = self.open.get(ticket)
        if known is None or known.reported or known.missing:
            return []
        # Overwriting a key preserves its place.
        self.open[ticket] = known._replace(missing=True)
        self._gone(known)
        return self._replace(known, now)

    def back(self, ticket: int, now: float) -> list[Action]:
        """Note that a missing client is back and continues its assignment.

        No other client is asked. The client that was asked in its place continues too. An
        assignment that is not open or not missing does not change.
        """
        known = self.open.get(ticket)
        if known is not None and known.missing:
            self._return(known)
        return []

    def expired(self, ticket: int, now: float) -> list[Action]:
        """Note that an assignment has timed out, if no deadline of a round ends it.

        Another client is asked, and a later answer is refused as too late. Until then, or until
        `failed`, the client is busy. An assignment that is not open or is answered does not change.
        """
        known = self.open.get(ticket)
        if known is None or known.reported:
            return []
        del self.open[ticket]
        return self._replace(known, now)

    def _gone(self, known: OpenAssignment) -> None:
        """Require the client of an assignment to check in before the next request."""
        if self.present is not None:
            self.present.discard(known.assignment.client)

    def _replace(self, known: OpenAssignment, now: float) -> list[Action]:
        """Ask another client in place of a client; a missing client was replaced already."""
        if not known.missing:
            self._asked -= 1
        return [*self._fill(now), *self._combine(now)]

    def _return(self, known: OpenAssignment) -> OpenAssignment:
        """Give a missing client a place again, possibly beyond the intended number."""
        assignment = known.assignment
        known = self.open[assignment.ticket] = known._replace(missing=False)
        self._asked += 1
        if self.present is not None:
            self.present.add(assignment.client)
        return known

    def tick(self, now: float) -> list[Action]:
        """Advance to time `now`: start or end a round, and fill free places."""
        # While updates are combined there is no new model to send.
        if self.updates.tickets:
            return []
        if now >= self.wake:
            # Clients may have become available with time, so the search may start again.
            self.wake = self.deadline
            self._probes = 0
        if not self.began:
            if self._waits_for_more(now):
                return []
            # Without available clients sampling is wasted. A driver announces new clients at once.
            if self.pacing.samples_independently and self.present is not None and not self.present:
                self.wake = now + RETRY
                return []
            self._begin(now)
        return [*self._fill(now), *self._combine(now)]

    def _waits_for_more(self, now: float) -> bool:
        """Return whether the round waits for more available clients; warn the first time."""
        if self.fewest == 1 or self.present is None or not self.synchronous:
            return False
        there = sum(1 for client in self.present if not self._is_out(client))
        if there >= self.fewest:
            self._told_few = False
            return False
        if not self._told_few:
            self._told_few = True
            self.tell(
                f"round {self.round + 1} cannot start: {there} clients are connected, but a "
                f"client of the run requires at least {self.fewest} in a new model"
            )
        self.wake = now + RETRY
        return True

    def exclude(self, client: int, reason: str) -> None:
        """Stop asking the client."""
        self.excluded.setdefault(client, reason)

    def sit_out(self, clients: Iterable[int]) -> None:
        """Pause these clients until the model changes: they contribute to a single sum of it."""
        self.sitting_out.update(clients)

    @property
    def assignable_clients(self) -> int:
        """Number of clients that may be asked for this model."""
        return len(self.sizes) - len(self.sitting_out.union(self.excluded))

    def _is_out(self, client: int) -> bool:
        return client in self.excluded or client in self.sitting_out

    # The new model

    @property
    def combining(self) -> list[int]:
        """Return the tickets of the last `Combine`, until `finish`.

        A restored driver folds their updates again.
        """
        return list(self.updates.tickets)

    def fold(
        self, update: Update, finite: bool = False, computed: bool = False
    ) -> list[Tensor] | None:
        """Take the next update of the last `Combine`.

        Returns the update's weights as the rule gets them. An invalid update is left out, with its
        reason in the result, and the return value is None.

        finite: whether the driver knows that all numbers are finite. computed: whether the driver
        knows that the update is the unmodified result of local training in this process, which
        needs no checks.

        Raises ValueError for an update that `Combine` has not named, or that was folded already.
        """
        taken = self.updates.fold(update, finite, computed)
        if taken is not None and self.pacing.ranked is not None:
            self.losses.told[update.client] = update.loss
        return taken

    def fold_sum(self, summed: SummedUpdates) -> None:
        """Take the mean of several of these updates, from a secure sum."""
        self.updates.fold_sum(summed)

    def lost(self, ticket: int, reason: str) -> None:
        """Note that an update is in no sum."""
        self.updates.lost(ticket, reason)

    def finish(self, now: float) -> RoundResult:
        """Make the new model.

        If the updates are too few for the rule, the model stays, and the updates are refused.

        Raises TooFewClientsError if all updates have been refused too many times in a row.
        """
        combined = self.updates.tickets
        before = self.model.weights
        result = self.updates.finish()
        if self.sitting_out and not all(map(torch.equal, before, self.model.weights)):
            self.sitting_out.clear()
        for ticket in combined:
            del self.open[ticket]
        self._attempt = 0
        self._probes = 0
        if self.synchronous:
            # These refusals are not sent: a round ends as soon as enough clients have reported, so
            # no reported update is left.
            self._close("the round is over")
        elif self.oldest is not None:
            # A list of references: models are replaced and never changed in place, so an old model
            # costs only its own memory.
            models = [*self._past, (self.model.weights, self.model.buffers)]
            self._past = models[-self.oldest - 1 :]
        # The model has its next number by now, which seeds these draws.
        if self._varies:
            self._count()
        # So that the driver calls `tick` at once, which starts the next round or fills places.
        self.wake = now
        # Last, because the call may raise: the state is by then the state of a finished round.
        vain = self.updates.unsuccessful_models
        if (
            vain >= MOST_EMPTY_MODELS
            and result.refused
            and (vain % MOST_EMPTY_MODELS == 0 or not self.patient)
        ):
            self._in_vain(self.updates.complaint(result))
        return result

    # Requests

    def _begin(self, now: float) -> None:
        """Start a round, or another attempt; asynchronous pacing starts once."""
        self.began = True
        self._position = 0
        self._asked = 0
        self._probes = 0
        self._order = None
        if self.synchronous:
            self.deadline = now + self._answer_timeout
            self.wake = self.deadline
            if self.pacing.samples_independently:
                assert self.sample_clients is not None
                self._chosen = list(self.sample_clients(self.model.number))
                self._nobody_until = now + RETRY if self._chosen else now
        elif self.oldest is not None and not self._past:
            self._past = [(self.model.weights, self.model.buffers)]

    def _fill(self, now: float) -> list[Action]:
        """Ask as many clients as the pacing wants at work."""
        if not self.began or self.updates.tickets:
            return []
        if self.pacing.samples_independently:
            return self._ask_chosen(now)
        # In a round `_asked` counts all asked clients that did not fail: answered clients keep
        # their place.
        places = self.asks - self._asked
        if not self.synchronous:  # without rounds answered clients are not at work any more
            places += self._reports
        if places <= 0:
            return []
        actions: list[Action] = []
        # All clients that are asked now share the tensors of these assignments.
        sent = self._newest()
        while len(actions) < places:
            client = self._next()
            if client is None:
                break
            actions.append(Assign(self._assign(client, sent, now)))
        return actions

    def _ask_chosen(self, now: float) -> list[Action]:
        """Ask the sampled clients that are available, once, at the start of the round."""
        # Clients that become available later are not asked: the round's duration depends on others.
        chosen, self._chosen = self._chosen, []
        there = [
            client
            for client in chosen
            if client not in self.busy
            and not self._is_out(client)
            and (self.present is None or client in self.present)
        ]
        sent = self._newest() if there else None
        return [Assign(self._assign(client, sent, now)) for client in there if sent is not None]

    def _next(self) -> int | None:
        """Return the next client in order that is not busy and, if known, available."""
        count = len(self.sizes)
        if len(self.busy) >= count:
            return None
        if self._order is None:
            self._order = self._drawn_order()
        # In a round each place of the order comes once; without rounds the order is endless.
        # `_probes` ends the search once every client has been checked without success. A check-in,
        # `wake` and a new model reset the number, because a client may have become available.
        while self._probes < count and not (self.synchronous and self._position >= count):
            client = self._order(self._position)
            self._position += 1
            self._probes += 1
            # Clients that still work for a finished round are busy too: otherwise they would train
            # twice at the same time.
            free = client not in self.busy and client not in self._answered
            free = free and (self.fewest == 1 or self._leaves_room(client))
            free = free and not self._is_out(client)
            if free and (self.present is None or client in self.present):
                return client
        return None

    def _leaves_room(self, client: int) -> bool:
        """Return whether the next model can still have enough clients if this client is asked.

        Without rounds a client may answer several times for the same model.
        """
        if self.synchronous:
            return True
        there = {one.assignment.client for one in self.open.values()}
        if client not in there:
            return True
        return self.needs - len(self.open) > max(0, self.fewest - len(there))

    def _drawn_order(self) -> Candidates:
        turn = self.seed, self.model.number, self._attempt
        order = self._draw(*turn, self.sizes, self.asks)
        if self.pacing.ranked is None:
            return order
        return ranked_first(
            self.pacing.ranked(*turn, self.sizes, self.losses), order, len(self.sizes)
        )

    def _newest(self) -> OutgoingModel:
        model = self.model
        extra = self.algorithm.down()
        size = model.nbytes + (nbytes(extra) if extra else 0)
        return OutgoingModel(model.number, model.weights, model.buffers, extra, size)

    def _drawn(self, sent: OutgoingModel) -> OutgoingModel:
        """Return an older model instead of the newest, drawn at random: simulated staleness."""
        assert self.oldest is not None
        drawn = derive(self.seed, "staleness", self.tickets) % (self.oldest + 1)
        # At first there are fewer old models than may be drawn; the oldest model stands in for the
        # missing models.
        old = min(drawn, len(self._past) - 1)
        weights, buffers = self._past[-1 - old]
        return sent._replace(number=sent.number - old, weights=weights, buffers=buffers)

    def _assign(self, client: int, sent: OutgoingModel, now: float) -> Assignment:
        if self._past:
            sent = self._drawn(sent)
        # Tickets count up and are never reused, so that an old answer matches no new assignment.
        ticket = self.tickets
        assignment = Assignment(
            ticket=ticket,
            client=client,
            round=sent.number,
            turn=sent.number if self.synchronous else self._answers.get(client, 0),
            weights=sent.weights,
            buffers=sent.buffers,
            nbytes=sent.nbytes,
            extra=sent.extra,
            deadline=self._ends(now),
        )
        self.open[ticket] = OpenAssignment(assignment, newest=self.round)
        self.busy[client] = ticket
        self.tickets += 1
        self._asked += 1
        return assignment

    def _ends(self, now: float) -> float | None:
        """Return the deadline of an answer to a request of now: of its round, or by the timeout."""
        ends = self.deadline if self.synchronous else now + self._answer_timeout
        return ends if math.isfinite(ends) else None

    def assignment(self, ticket: int) -> Assignment:
        """Return the open assignment with this ticket."""
        return self.open[ticket].assignment

    def expects(self, asked: Assignment) -> Sequence[Tensor]:
        """Return tensors with the shapes and dtypes of a valid answer's extras."""
        return self.algorithm.expects(asked)

    def waits_for(self, ticket: int) -> bool:
        """Return whether an update with this ticket would count.

        No later update counts once a round is being combined.
        """
        if self.synchronous and self.updates.tickets:
            return False
        return ticket in self.open and not self.open[ticket].reported

    # Ending a round

    def _combine(self, now: float) -> list[Action]:
        """Return the action `Combine` if there are enough updates for a new model.

        A round that cannot get enough updates restarts.
        """
        if not self.began or self.updates.tickets:
            return []
        if self.pacing.samples_independently:
            return self._combine_chosen(now)
        reported = self._reports
        needed = self.needs
        # Every open assignment has reported, so no update comes unless another client is asked.
        idle = reported == len(self.open)
        if not self.synchronous:
            enough = self._enough(needed)
            return self._take(enough) if enough else self._wait(now, idle)
        over = now >= self.deadline
        # No client is at work any more, and no other client could be asked.
        stuck = idle and (self._asked < needed or needed == 0)
        if reported >= needed:
            return self._take(needed)
        if (over or stuck) and reported >= self.minimum:
            return self._take(needed)
        # The deadline has passed with fewer than the minimum: the updates so far are refused.
        if over:
            return self._again(now)
        return self._wait(now, idle) if stuck else []

    def _enough(self, needed: int) -> int:
        """Return the number of earliest updates that make a model of enough clients; 0 for none."""
        if self._reports < needed:
            return 0
        if self.fewest == 1:
            return needed
        clients: set[int] = set()
        reported = [one.assignment for one in self.open.values() if one.reported]
        for count, one in enumerate(reported, start=1):
            clients.add(one.client)
            if count >= needed and len(clients) >= self.fewest:
                return count
        return 0

    def _combine_chosen(self, now: float) -> list[Action]:
        """Return `Combine` once all asked clients have answered or failed, or at the deadline."""
        # The round waits for missing clients: otherwise a client's presence would depend on the
        # speed of others.
        if self._reports < len(self.open) and now < self.deadline:
            return []
        # If clients are away for hours, empty rounds must not follow one another at once.
        if not self._reports and now < min(self._nobody_until, self.deadline):
            self.wake = min(self._nobody_until, self.deadline)
            return []
        return self._take(self._reports)

    def _take(self, most: int) -> list[Action]:
        """Combine the reported updates, at most `most` of them, the earliest tickets first.

        The updates are then combined in order of client.
        """
        reported = [one.assignment for one in self.open.values() if one.reported][:most]
        self._reports -= len(reported)
        # Without rounds working clients continue for the next model; only the combined clients are
        # done.
        if not self.synchronous:
            self._asked -= len(reported)
        reported.sort(key=_client_and_ticket)
        self.updates.begin({one.ticket: one for one in reported})
        return [Combine(self.combining)]

    def _wait(self, now: float, idle: bool) -> list[Action]:
        """Schedule another attempt, because no client could be asked.

        If no client is at work either (`idle`), the attempt counts as unsuccessful. Raises
        TooFewClientsError after too many unsuccessful attempts.
        """
        if not idle:
            # Some places stay empty because no client was found for them: search again later,
            # though an answer may arrive before that.
            if self._probes >= len(self.sizes):
                self.wake = min(self.wake, now + RETRY)
            return []
        # With no client at work only time can help. The bound ends a run whose clients never
        # return.
        answered = "no client"
        if self._reports:
            answered = f"only {self._reports} of at least {self.minimum} clients"
        self._count_attempt(
            f"{answered} answered in {{}} attempts to continue with round {self.round + 1}: check "
            "the availability of the clients, or require fewer"
        )
        self.wake = min(self.deadline, now + RETRY)
        if self.synchronous:  # clients that were away may be available then
            self._position = 0
            self._order = None
        return []

    def _again(self, now: float) -> list[Action]:
        """Restart a round that has too few answers at its deadline, with other clients."""
        self._count_attempt(
            f"round {self.round + 1} ended {{}} times with fewer than {self.minimum} updates at "
            "its deadline: give it more time, select more clients, or set a smaller minimum"
        )
        refused = self._close("the round was begun again")
        if self._waits_for_more(now):
            return refused
        self._begin(now)
        return [*refused, *self._fill(now)]

    def _count_attempt(self, sentence: str) -> None:
        """Count another unsuccessful attempt; `sentence` has a placeholder for the number."""
        self._attempt += 1
        if not self.patient and self._attempt > ATTEMPTS:
            self._in_vain(sentence.format(f"{ATTEMPTS:,}"))
        if self.patient and self._attempt in WARNED_ATTEMPTS:
            self._in_vain(sentence.format(f"{self._attempt:,}"))

    def _in_vain(self, sentence: str) -> None:
        """Raise TooFewClientsError, or warn if the coordinator is patient."""
        if not self.patient:
            raise TooFewClientsError(sentence)
        self.tell(sentence)

    def _close(self, reason: str) -> list[Action]:
        """Discard the open assignments of a round.

        Working clients stay busy until they answer, and their answers are then refused.
        """
        refused: list[Action] = [
            Refuse(ticket, one.assignment.client, reason)
            for ticket, one in self.open.items()
            if one.reported
        ]
        self.open.clear()
        self._answered.clear()
        self.began = False
        self.deadline = math.inf
        self._reports = 0
        return refused

    def _late(self, ticket: int) -> Refuse:
        """Return the refusal of an answer to an assignment that is not open any more."""
        # Assignments of finished rounds are remembered only by the busy state of their client.
        client = next((client for client, held in self.busy.items() if held == ticket), -1)
        if client < 0:
            return Refuse(ticket, client, "nobody asked for it, or it was sent already")
        del self.busy[client]
        return Refuse(ticket, client, "it came too late")

    # Checkpoints

    def state(self) -> dict[str, Any]:
        """Return the state without folded updates, as a tree for checkpoints.

        Models of open assignments are written once each.
        """
        # All assignments of a model share its tensors, in memory and so in the file.
        places: dict[tuple[int, int], int] = {}
        models: dict[int, list[list[Tensor]]] = {}
        opened = []
        for one in self.open.values():
            sent = one.assignment
            place = places.setdefault((sent.round, one.newest), len(places))
            models[place] = [list(sent.weights), list(sent.buffers), list(sent.extra)]
            opened.append({**_written(one), "model": place})
        return {
            "model": self.model.state(),
            "algorithm": self.algorithm.state(),
            "models": models,
            "open": opened,
            "past": [[list(weights), list(buffers)] for weights, buffers in self._past],
            "busy": dict(self.busy),
            "present": None if self.present is None else sorted(self.present),
            "answered": sorted(self._answered),
            "answers": dict(sorted(self._answers.items())),
            "combining": self.combining,
            "began": self.began,
            "wake": self.wake,
            "deadline": self.deadline,
            "tickets": self.tickets,
            "attempt": self._attempt,
            "vain": self.updates.unsuccessful_models,
            "position": self._position,
            "probes": self._probes,
            "asked": self._asked,
            "reports": self._reports,
            "chosen": list(self._chosen),
            "nobody_until": self._nobody_until,
            "sizes": list(self.sizes) if self._resized else None,
            "losses": dict(sorted(self.losses.told.items())),
            "fewest": self.fewest,
            "excluded": dict(sorted(self.excluded.items())),
            "sitting_out": sorted(self.sitting_out),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`, taken between two models or at any event in between."""
        self.model.restore(state["model"])
        self.algorithm.restore(state["algorithm"])
        self.open = {one["ticket"]: _read(one, state["models"]) for one in state["open"]}
        self._past = [(weights, buffers) for weights, buffers in state["past"]]
        self.busy = dict(state["busy"])
        self.present = None if state["present"] is None else set(state["present"])
        self._answered = set(state["answered"])
        self._answers = dict(state["answers"])
        self.began = state["began"]
        self.wake = state["wake"]
        self.deadline = state["deadline"]
        self.tickets = state["tickets"]
        self.updates.unsuccessful_models = state["vain"]
        self._attempt = state["attempt"]
        self._position = state["position"]
        self._probes = state["probes"]
        self._asked = state["asked"]
        self._reports = state["reports"]
        # Checkpoints of dure up to 0.1 have none of these.
        self.fewest = self.updates.fewest = state.get("fewest", 1)
        self._chosen = list(state.get("chosen", ()))
        self._nobody_until = state.get("nobody_until", -math.inf)
        self.losses.told = dict(state.get("losses", {}))
        self.excluded = dict(state.get("excluded", {}))
        self.sitting_out = set(state.get("sitting_out", ()))
        sizes = state.get("sizes")
        if sizes is not None:
            self._share(list(sizes))
        # Drawn again on demand: a function of the seed, the model's number and the attempt.
        self._order = None
        self._count()
        # A state from the middle of combining resumes at its start: no update counts as folded.
        self.updates.begin({ticket: self.assignment(ticket) for ticket in state["combining"]})


def _client_and_ticket(assignment: Assignment) -> tuple[int, int]:
    return assignment.client, assignment.ticket


def _written(one: OpenAssignment) -> dict[str, Any]:
    """Return an open assignment without its model, as a tree."""
    sent = one.assignment
    return {
        "ticket": sent.ticket,
        "client": sent.client,
        "round": sent.round,
        "turn": sent.turn,
        "deadline": sent.deadline,
        "newest": one.newest,
        "reported": one.reported,
        "missing": one.missing,
    }


def _read(written: dict[str, Any], models: dict[int, list[list[Tensor]]]) -> OpenAssignment:
    # Checkpoints of dure up to 0.1 have models by their numbers.
    weights, buffers, extra = models[written.get("model", written["round"])]
    assignment = Assignment(
        ticket=written["ticket"],
        client=written["client"],
        round=written["round"],
        turn=written["turn"],
        weights=weights,
        buffers=buffers,
        nbytes=nbytes(weights) + nbytes(buffers) + nbytes(extra),
        extra=extra,
        deadline=written["deadline"],
    )
    newest = written.get("newest", written["round"])
    return OpenAssignment(assignment, newest, written["reported"], written.get("missing", False))
