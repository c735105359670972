"""The coordinator: the server of a federation as a state machine, without I/O, threads or clock.

It is told what happened, and when, and answers with what is to be done. Who drives it (a
simulation, a network) carries the messages:

    arrive(client)  check_in(client, now)   who is there, where they say so themselves
    leave(client)                           and who has gone without having been asked
    update(ticket, now)                     a client's answer has arrived, and lies with the driver
    failed(ticket, reason, now)             there will be none
    missing(ticket, now)                    its client has fallen silent, and may come back
    back(ticket, now)                       it has come back, and goes on with the same ticket
    expired(ticket, now)                    its time is up, where no round's deadline ends it
    tick(now)                               time has passed; `wake` says when it wants to be told

    -> Assign(assignment)    Refuse(ticket, client, reason)    Combine(tickets)

After `Combine` the driver gives it those updates, one after another in the order of the tickets, by
`fold`, and calls `finish`, which makes the new global model (`dure.federated.server.combining`).
The tickets are in order of client, so the model depends on what clients sent and not on who was
faster. Until `finish` the updates are still the driver's: a state taken between two `fold`s is that
before the first, and a driver that goes on from it gives all of `combining` again.

The place of a missing client is given to another, and whoever answers first counts. What the driver
has to see to: it tells `expired` of a ticket without a round when the assignment's deadline is
over, and `failed` of a ticket whose client begins afresh. Until its ticket was answered or has
failed, also one that is not open any more, a client is asked nothing else.

Where each client has a coin of its own (`Selection.tosses`), the place of nobody is given to
another, and a round waits for all who were asked: so whether a client is in it depends on its coin,
and on itself.

No model is made of updates of fewer than `fewest` clients, which a driver raises as clients ask for
it (`keep_to`): no round begins while fewer are there, one that has fewer at its deadline begins
again, and what is left after refusals is counted once more before it is combined
(`dure.federated.server.smallest_cohort`).

Its pacing says when it asks whom and when it combines (`dure.federated.server.pacing`). `state` and
`restore` at any point go on with the same bits.

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
from dure.federated.server.combining import VAIN, Combining, Result, Summed
from dure.federated.server.global_model import GlobalModel
from dure.federated.server.known_losses import KnownLosses
from dure.federated.server.pacing import Pacing
from dure.federated.server.sampling import Candidates, before
from dure.protocol.carrier import Action, Assign, Combine
from dure.protocol.messages import Assignment, Refuse, Update, nbytes
from dure.randomness.seeds import derive

RETRY = 60.0
"""Seconds until it asks again where nobody was there."""

ATTEMPTS = 10_000
"""Times that it tries to begin a round, or to find a client, before it gives up."""

TOLD = frozenset(10**power for power in range(1, 16))
"""Attempts in vain after which one that does not give up tells of them."""


class Open(NamedTuple):
    """A ticket of which no model has been made yet, and whether its update has arrived.

    newest: the number of the newest model when it was handed out, which an older one may have been.
    What is sent besides the weights is of that moment. missing: its client has fallen silent, and
    its place is another's.
    """

    assignment: Assignment
    newest: int
    reported: bool = False
    missing: bool = False


class Sent(NamedTuple):
    """What is sent to the next client. nbytes: of all its tensors."""

    number: int
    weights: list[Tensor]
    buffers: list[Tensor]
    extra: Sequence[Tensor]
    nbytes: int


@dataclass
class Coordinator:
    """The server's state.

    sizes: examples of each client, as far as the server knows them. most_counted: what the loss
    counts in an example, at the most. lasts: seconds that a round takes at the most where the
    pacing names no deadline, and a ticket where there are no rounds; None for no end. patient: it
    never gives up, but tells. tell: gets a sentence then, after 10, 100, ... attempts in vain and
    after every `VAIN` models of nothing. losses: of clients, where the pacing looks at them. toss:
    gives the clients whose coins say that they are in a
    round, by its number; called once a round, where the pacing tosses. present: who has checked in;
    None takes all for reachable. wake: when it wants to be told that time has passed. tickets: how
    many were given out. open: those of which no model has been made. busy: the ticket of each
    client at work. deadline: when the round ends, inf where nothing ends it. began: whether a round
    is under way. fewest: clients of which a new model is made, at least.

    Raises ValueError where `lasts` is no time.
    """

    model: GlobalModel
    pacing: Pacing
    algorithm: Algorithm
    sizes: Sequence[int]
    seed: int
    most_counted: float = math.inf
    lasts: float | None = None
    patient: bool = False
    tell: Callable[[str], None] = lambda sentence: None
    toss: Callable[[int], Sequence[int]] | None = None
    losses: KnownLosses = field(default_factory=KnownLosses)
    present: set[int] | None = None
    wake: float = math.inf
    tickets: int = 0
    open: dict[int, Open] = field(default_factory=dict)
    busy: dict[int, int] = field(default_factory=dict)
    deadline: float = math.inf
    began: bool = False
    fewest: int = 1
    excluded: dict[int, str] = field(default_factory=dict)
    """Clients that are asked no more, and why."""
    sitting_out: set[int] = field(default_factory=set)
    """Clients that are not asked until the model is another one (`sit_out`)."""
    _attempt: int = 0
    """Times that the round began again, or that nobody was found."""
    _position: int = 0
    """Where in the order of clients it looks for the next one."""
    _probes: int = 0
    """Clients that it has looked at in vain since somebody could have come."""
    _asked: int = 0
    """Clients that were asked for the next model, without those that failed or are missing."""
    _reports: int = 0
    """Updates that have arrived and are not combined."""
    _answered: set[int] = field(default_factory=set)
    """In rounds: the clients whose updates have arrived."""
    _answers: dict[int, int] = field(default_factory=dict)
    """Without rounds: how often each client has answered."""
    _order: Candidates | None = None
    _chosen: list[int] = field(default_factory=list)
    """Clients whose coins say that they are in this round, until they are asked."""
    _nobody_until: float = -math.inf
    """How long a round lasts for which somebody was chosen, and in which nobody answers."""
    _past: list[tuple[list[Tensor], list[Tensor]]] = field(default_factory=list)
    """The models that may still be handed out, the newest last; empty where that is the model."""

    _resized: bool = False
    """Whether a client has said another size than it had in the beginning."""
    _told_few: bool = False
    """Whether it has told that too few clients are there for a round."""

    def __post_init__(self) -> None:
        if self.lasts is not None and not self.lasts > 0:
            raise ValueError(
                f"lasts is {self.lasts}, but a client needs more than 0 seconds to answer"
            )
        self.updates = Combining(
            self.model, self.algorithm, self.sizes, self.seed, self.most_counted
        )
        pacing = self.pacing
        self.synchronous = pacing.synchronous
        self.oldest = pacing.oldest
        self._varies = pacing.varies
        if pacing.tosses and self.toss is None:
            raise ValueError("this pacing needs somebody who tosses coins")
        self._lasts = pacing.deadline
        if math.isinf(self._lasts) and self.lasts is not None:
            self._lasts = self.lasts
        self._draw = pacing.order
        self._count()

    def _count(self) -> None:
        """How many clients are asked for this model, and how many answers make the next."""
        clients = len(self.sizes)
        self.asks = self.pacing.asked(self.seed, self.round, clients)
        self.needs = self.pacing.needed(self.seed, self.round, clients)
        self.minimum = max(self.pacing.minimum, self.fewest)
        # A round for which nobody was drawn is one of nobody.
        if self.needs:
            self.needs = max(self.needs, self.fewest)
        if self.synchronous:
            self.asks = max(self.asks, self.needs)

    @property
    def round(self) -> int:
        """The number of the global model."""
        return self.model.number

    @property
    def vain_attempts(self) -> int:
        """Attempts in a row, up to now, in which no round came about and nobody was found."""
        return self._attempt

    # What it is told

    def check_in(self, client: int, now: float, examples: int | None = None) -> list[Action]:
        """A client is there, and may be asked at once. For drivers that know; others never call it.

        examples: how many it has now, where it says so. A ticket that it has stays as it is.
        """
        self.arrive(client, examples)
        return self.tick(now)

    def arrive(self, client: int, examples: int | None = None) -> None:
        """As `check_in`, but nobody is asked yet: the next `tick` does that.

        So that a driver may wait with the first round until enough are there. Raises ValueError for
        a client without examples.
        """
        if examples is not None:
            self._resize(client, examples)
        # The first check-in shows that this driver knows who is there. From then on only those who
        # have checked in are asked.
        if self.present is None:
            self.present = set()
        self.present.add(client)
        self._probes = 0
        if self.synchronous:  # those who were not there before come in the round's order again
            self._position = 0

    def keep_to(self, fewest: int) -> None:
        """From now on no model is made of updates of fewer clients; also of those that wait."""
        self.fewest = self.updates.fewest = fewest
        self._count()

    def _resize(self, client: int, examples: int) -> None:
        """A client has so many examples now."""
        if examples < 1:
            raise ValueError(f"a client of {examples} examples has nothing to learn from")
        if examples == self.sizes[client]:
            return
        if not self._resized:  # what was given belongs to others
            self._share(list(self.sizes))
        # `_share` has made it a list.
        self.sizes[client] = examples  # type: ignore[index]
        # Orders that follow sizes are drawn anew, as they are after `restore`.
        self._order = None

    def _share(self, sizes: list[int]) -> None:
        """Takes a list of its own, by which updates are bounded too."""
        self.sizes = self.updates.sizes = sizes
        self._resized = True

    def leave(self, client: int) -> None:
        """A client without a ticket has gone again."""
        if self.present is not None:
            self.present.discard(client)

    def update(self, ticket: int, now: float) -> list[Action]:
        """An update has arrived.

        It is refused if nobody asked for it, if it came twice, or if it came too late: when a round
        is combined already, it is over.
        """
        known = self.open.get(ticket)
        if known is None:
            return [self._late(ticket)]
        if known.missing:  # it takes a place again, like all who have answered
            known = self._return(known)
        client = known.assignment.client
        if known.reported:
            return [Refuse(ticket, client, "it was sent already")]
        if self.synchronous and self.updates.tickets:
            # Between `Combine` and `finish` the updates of the round are fixed: this one is too
            # late.
            del self.open[ticket]
            return [self._late(ticket)]
        # A key that is written again keeps its place, so `open` stays in order of tickets, on which
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
            self._probes = 0  # it was the last one at work: all are asked anew
        return self._fill(now) if self._asked < self.asks or not self.synchronous else []

    def failed(self, ticket: int, reason: str, now: float) -> list[Action]:
        """A client will not answer: it was not there, dropped out, or could not do it.

        Another is asked instead. A client that has answered cannot fail any more: its update lies
        with the driver.
        """
        known = self.open.get(ticket)
        if known is None:
            # Called for what it does: the client, busy until now for a round that is over, is free
            # again.
            self._late(ticket)
            return []
        # A connection may be lost after the answer has come; that changes nothing.
        if known.reported:
            return []
        del self.open[ticket]
        self.busy.pop(known.assignment.client, None)
        self._gone(known)
        return self._replace(known, now)

    def missing(self, ticket: int, now: float) -> list[Action]:
        """The client of an open ticket has fallen silent; it may come back.

        Another is asked in its place. The ticket stays open: where it answers while its answer is
        still needed, it counts. Nothing changes for a ticket that is not open, has its answer, or
        is missing already.
        """
        known = self.open.get(ticket)
        if known is None or known.reported or known.missing:
            return []
        # A key that is written again keeps its place.
        self.open[ticket] = known._replace(missing=True)
        self._gone(known)
        return self._replace(known, now)

    def back(self, ticket: int, now: float) -> list[Action]:
        """A missing client is there again and goes on with its ticket; nobody else is asked.

        Whoever was asked in its place works on as well. Nothing changes for a ticket that is not
        open or not missing.
        """
        known = self.open.get(ticket)
        if known is not None and known.missing:
            self._return(known)
        return []

    def expired(self, ticket: int, now: float) -> list[Action]:
        """The time of a ticket is up, where no deadline of a round ends it.

        Another is asked, and an answer that still comes is refused as too late. Until then, or
        until `failed`, its client is busy. Nothing changes for a ticket that is not open or has its
        answer.
        """
        known = self.open.get(ticket)
        if known is None or known.reported:
            return []
        del self.open[ticket]
        return self._replace(known, now)

    def _gone(self, known: Open) -> None:
        """The client of a ticket has to check in again before it is asked again."""
        if self.present is not None:
            self.present.discard(known.assignment.client)

    def _replace(self, known: Open, now: float) -> list[Action]:
        """Asks another in place of a client; that of a missing one is another's already."""
        if not known.missing:
            self._asked -= 1
        return [*self._fill(now), *self._combine(now)]

    def _return(self, known: Open) -> Open:
        """A missing client takes a place again, which may be one too many."""
        assignment = known.assignment
        known = self.open[assignment.ticket] = known._replace(missing=False)
        self._asked += 1
        if self.present is not None:
            self.present.add(assignment.client)
        return known

    def tick(self, now: float) -> list[Action]:
        """Time has passed: a round begins or ends at its deadline, free places are filled."""
        # While updates are combined there is no model yet that could be handed out.
        if self.updates.tickets:
            return []
        if now >= self.wake:
            # Time alone may have brought clients back, so the search may start again.
            self.wake = self.deadline
            self._probes = 0
        if not self.began:
            if self._waits_for_more(now):
                return []
            # Nobody is there: coins would be tossed for nothing. Whoever comes is told of at once.
            if self.pacing.tosses and self.present is not None and not self.present:
                self.wake = now + RETRY
                return []
            self._begin(now)
        return [*self._fill(now), *self._combine(now)]

    def _waits_for_more(self, now: float) -> bool:
        """Whether fewer clients are there than a round is to have; whoever comes is told of."""
        if self.fewest == 1 or self.present is None or not self.synchronous:
            return False
        there = sum(1 for client in self.present if not self._is_out(client))
        if there >= self.fewest:
            self._told_few = False
            return False
        if not self._told_few:
            self._told_few = True
            self.tell(
                f"round {self.round + 1} does not begin: {there} clients are there, "
                f"and a client of the run asks for at least {self.fewest} in a new model"
            )
        self.wake = now + RETRY
        return True

    def exclude(self, client: int, reason: str) -> None:
        """The client is asked no more."""
        self.excluded.setdefault(client, reason)

    def sit_out(self, clients: Iterable[int]) -> None:
        """These are not asked until the model is another one: they contribute to one sum of it."""
        self.sitting_out.update(clients)

    @property
    def able(self) -> int:
        """How many clients could be asked from this model."""
        return len(self.sizes) - len(self.sitting_out.union(self.excluded))

    def _is_out(self, client: int) -> bool:
        return client in self.excluded or client in self.sitting_out

    # The new model

    @property
    def combining(self) -> list[int]:
        """The tickets that the last `Combine` named, until `finish`.

        A restored driver folds their updates anew.
        """
        return list(self.updates.tickets)

    def fold(
        self, update: Update, finite: bool = False, computed: bool = False
    ) -> list[Tensor] | None:
        """Takes the next update of those that `Combine` named.

        Returns its weights as the rule gets them. One that cannot be right is left out, with its
        reason in the result, and gives None.

        finite: the driver knows that all its numbers are. computed: the driver knows that it is
        what was computed here of the assignment, so that nothing about it can be wrong.

        Raises ValueError for an update that `Combine` has not named, or that was given already.
        """
        taken = self.updates.fold(update, finite, computed)
        if taken is not None and self.pacing.ranked is not None:
            self.losses.told[update.client] = update.loss
        return taken

    def fold_sum(self, summed: Summed) -> None:
        """Takes the mean of several of these updates, which nobody has seen."""
        self.updates.fold_sum(summed)

    def lost(self, ticket: int, reason: str) -> None:
        """One of these updates is in no sum."""
        self.updates.lost(ticket, reason)

    def finish(self, now: float) -> Result:
        """Makes the new model.

        Where the updates are too few for the rule, the model stays, and they are refused.

        Raises TooFewClientsError where all have been refused too many times in a row.
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
            # Nobody is told of these refusals here: a round ends as soon as enough have reported,
            # so none is left that has reported.
            self._close("the round is over")
        elif self.oldest is not None:
            # A list of references: models are replaced and never changed, so an old one costs only
            # its own memory.
            models = [*self._past, (self.model.weights, self.model.buffers)]
            self._past = models[-self.oldest - 1 :]
        # The model has its next number by now, from which these are drawn.
        if self._varies:
            self._count()
        # So that the driver calls `tick` at once, which begins the next round or fills places.
        self.wake = now
        # Last, since it may raise: the state is by then that of a finished round.
        vain = self.updates.vain
        if vain >= VAIN and result.refused and (vain % VAIN == 0 or not self.patient):
            self._in_vain(self.updates.complaint(result))
        return result

    # Asking

    def _begin(self, now: float) -> None:
        """A round, or an attempt at one, begins; asynchronous pacing begins once."""
        self.began = True
        self._position = 0
        self._asked = 0
        self._probes = 0
        self._order = None
        if self.synchronous:
            self.deadline = now + self._lasts
            self.wake = self.deadline
            if self.pacing.tosses:
                assert self.toss is not None
                self._chosen = list(self.toss(self.model.number))
                self._nobody_until = now + RETRY if self._chosen else now
        elif self.oldest is not None and not self._past:
            self._past = [(self.model.weights, self.model.buffers)]

    def _fill(self, now: float) -> list[Action]:
        """Asks as many clients as the pacing wants at work."""
        if not self.began or self.updates.tickets:
            return []
        if self.pacing.tosses:
            return self._ask_chosen(now)
        # In a round `_asked` counts all who were asked and did not fail: those who have answered
        # keep their place.
        places = self.asks - self._asked
        if not self.synchronous:  # those who have answered are not at work any more
            places += self._reports
        if places <= 0:
            return []
        actions: list[Action] = []
        # One for all who are asked now: their assignments share its tensors.
        sent = self._newest()
        while len(actions) < places:
            client = self._next()
            if client is None:
                break
            actions.append(Assign(self._assign(client, sent, now)))
        return actions

    def _ask_chosen(self, now: float) -> list[Action]:
        """Asks those whose coins say so and who are there, once, at the beginning of the round."""
        # Who comes later is not asked: how long the round lasts depends on others.
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
        """The next client in order who is not busy and, where that is known, there."""
        count = len(self.sizes)
        if len(self.busy) >= count:
            return None
        if self._order is None:
            self._order = self._drawn_order()
        # In a round each place of the order comes once; without rounds the order has no end.
        # `_probes` ends the search once every client has been looked at in vain. It is set back
        # when somebody could have come: at a check-in, at `wake`, with a new model.
        while self._probes < count and not (self.synchronous and self._position >= count):
            client = self._order(self._position)
            self._position += 1
            self._probes += 1
            # Clients that still work for a round that is over are busy too: they would compute two
            # at once.
            free = client not in self.busy and client not in self._answered
            free = free and (self.fewest == 1 or self._leaves_room(client))
            free = free and not self._is_out(client)
            if free and (self.present is None or client in self.present):
                return client
        return None

    def _leaves_room(self, client: int) -> bool:
        """Whether, without rounds, as many clients can still be in the next model as it is to have
        if this one is asked: one may answer several times for it."""
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
        return before(self.pacing.ranked(*turn, self.sizes, self.losses), order, len(self.sizes))

    def _newest(self) -> Sent:
        model = self.model
        extra = self.algorithm.down()
        size = model.nbytes + (nbytes(extra) if extra else 0)
        return Sent(model.number, model.weights, model.buffers, extra, size)

    def _drawn(self, sent: Sent) -> Sent:
        """An older model instead of the newest, drawn at random: simulated staleness."""
        assert self.oldest is not None
        drawn = derive(self.seed, "staleness", self.tickets) % (self.oldest + 1)
        # At first there are fewer old models than may be drawn; the oldest one stands for those.
        old = min(drawn, len(self._past) - 1)
        weights, buffers = self._past[-1 - old]
        return sent._replace(number=sent.number - old, weights=weights, buffers=buffers)

    def _assign(self, client: int, sent: Sent, now: float) -> Assignment:
        if self._past:
            sent = self._drawn(sent)
        # Tickets count up and are never given again, so that an old answer fits no new question.
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
        self.open[ticket] = Open(assignment, newest=self.round)
        self.busy[client] = ticket
        self.tickets += 1
        self._asked += 1
        return assignment

    def _ends(self, now: float) -> float | None:
        """When an answer to what is asked now has to be there: with its round, if there are any."""
        ends = self.deadline if self.synchronous else now + self._lasts
        return ends if math.isfinite(ends) else None

    def assignment(self, ticket: int) -> Assignment:
        """What a client with an open ticket was sent."""
        return self.open[ticket].assignment

    def expects(self, asked: Assignment) -> Sequence[Tensor]:
        """What the extras of an answer look like."""
        return self.algorithm.expects(asked)

    def waits_for(self, ticket: int) -> bool:
        """Whether an update with this ticket would count.

        When a round is combined, no later one does.
        """
        if self.synchronous and self.updates.tickets:
            return False
        return ticket in self.open and not self.open[ticket].reported

    # Ending

    def _combine(self, now: float) -> list[Action]:
        """The answer `Combine` if there is enough for a new model.

        A round that cannot come to that begins again.
        """
        if not self.began or self.updates.tickets:
            return []
        if self.pacing.tosses:
            return self._combine_chosen(now)
        reported = self._reports
        needed = self.needs
        # Every open ticket has reported, so nothing more comes unless somebody else is asked.
        idle = reported == len(self.open)
        if not self.synchronous:
            enough = self._enough(needed)
            return self._take(enough) if enough else self._wait(now, idle)
        over = now >= self.deadline
        # Nobody is at work any more, and there was nobody else to be asked.
        stuck = idle and (self._asked < needed or needed == 0)
        if reported >= needed:
            return self._take(needed)
        if (over or stuck) and reported >= self.minimum:
            return self._take(needed)
        # The deadline has passed with fewer than the minimum: what has come is refused.
        if over:
            return self._again(now)
        return self._wait(now, idle) if stuck else []

    def _enough(self, needed: int) -> int:
        """How many of the earliest updates make a model, of enough clients; 0 for none yet."""
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
        """`Combine` once all who were asked have answered or failed, or at the deadline."""
        # Those who have fallen silent are waited for: else they would be in it or not as others
        # are slow.
        if self._reports < len(self.open) and now < self.deadline:
            return []
        # Where clients are away for hours, rounds of nobody are not to follow one another at once.
        if not self._reports and now < min(self._nobody_until, self.deadline):
            self.wake = min(self._nobody_until, self.deadline)
            return []
        return self._take(self._reports)

    def _take(self, most: int) -> list[Action]:
        """Combines what has been reported, at most so many, the earliest tickets first.

        The updates are then combined in order of client.
        """
        reported = [one.assignment for one in self.open.values() if one.reported][:most]
        self._reports -= len(reported)
        # Without rounds those who are at work go on for the next model; only the combined are done.
        if not self.synchronous:
            self._asked -= len(reported)
        reported.sort(key=_client_and_ticket)
        self.updates.begin({one.ticket: one for one in reported})
        return [Combine(self.combining)]

    def _wait(self, now: float, idle: bool) -> list[Action]:
        """Nobody could be asked: it tries again later.

        Where nobody is at work either (`idle`) it counts the attempts, and gives up at last. Raises
        TooFewClientsError then.
        """
        if not idle:
            # Some places stay empty since nobody was found for them: look again later, though an
            # answer may come before that.
            if self._probes >= len(self.sizes):
                self.wake = min(self.wake, now + RETRY)
            return []
        # With nobody at work only time can help. The bound ends a run whose clients never return.
        answered = "no client"
        if self._reports:
            answered = f"only {self._reports} of at least {self.minimum} clients"
        self._count_attempt(
            f"{answered} answered in {{}} attempts to go on with round {self.round + 1}: "
            "look at the availability of the clients, or ask for fewer"
        )
        self.wake = min(self.deadline, now + RETRY)
        if self.synchronous:  # those who were not there may be there then
            self._position = 0
            self._order = None
        return []

    def _again(self, now: float) -> list[Action]:
        """At the deadline too few have answered: another attempt, with others."""
        self._count_attempt(
            f"round {self.round + 1} ended {{}} times with fewer than "
            f"{self.minimum} updates at its deadline: "
            "give it more time, ask more clients, or take a smaller minimum"
        )
        refused = self._close("the round was begun again")
        if self._waits_for_more(now):
            return refused
        self._begin(now)
        return [*refused, *self._fill(now)]

    def _count_attempt(self, sentence: str) -> None:
        """One more attempt was in vain; `sentence` has a place for how many."""
        self._attempt += 1
        if not self.patient and self._attempt > ATTEMPTS:
            self._in_vain(sentence.format(f"{ATTEMPTS:,}"))
        if self.patient and self._attempt in TOLD:
            self._in_vain(sentence.format(f"{self._attempt:,}"))

    def _in_vain(self, sentence: str) -> None:
        """Gives up, or only tells, where it is patient."""
        if not self.patient:
            raise TooFewClientsError(sentence)
        self.tell(sentence)

    def _close(self, reason: str) -> list[Action]:
        """Forgets the open tickets of a round.

        Clients at work stay busy until they answer, and are then refused.
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
        """An answer to a ticket that is not open any more."""
        # Tickets of rounds that are over are remembered only as what keeps their client busy.
        client = next((client for client, held in self.busy.items() if held == ticket), -1)
        if client < 0:
            return Refuse(ticket, client, "nobody asked for it, or it was sent already")
        del self.busy[client]
        return Refuse(ticket, client, "it came too late")

    # Checkpoints

    def state(self) -> dict[str, Any]:
        """Everything but what was folded, as a tree for checkpoints.

        Models that clients hold are written once each.
        """
        # All assignments of one model share its tensors, in memory and so in the file.
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
            "vain": self.updates.vain,
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
        """Goes on from `state`, between two models or at any event in between."""
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
        self.updates.vain = state["vain"]
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
        # Drawn again when it is asked for: a function of the seed, the model's number and the
        # attempt.
        self._order = None
        self._count()
        # A state in the middle of combining goes on from its beginning: nothing counts as folded.
        self.updates.begin({ticket: self.assignment(ticket) for ticket in state["combining"]})


def _client_and_ticket(assignment: Assignment) -> tuple[int, int]:
    return assignment.client, assignment.ticket


def _written(one: Open) -> dict[str, Any]:
    """An open ticket, but for the model that was sent."""
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


def _read(written: dict[str, Any], models: dict[int, list[list[Tensor]]]) -> Open:
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
    return Open(assignment, newest, written["reported"], written.get("missing", False))
