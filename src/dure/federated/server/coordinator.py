"""The coordinator: the server of a federation as a state machine, without I/O, threads or clock.

It is told what happened, and when, and answers with what is to be done; whoever drives it (a
simulation, a network) carries the messages:

    check_in(client, now)  leave(client)        who is there, where they say so themselves
    update(ticket, now)                         a client's answer has arrived, and lies with the driver
    failed(ticket, reason, now)                 there will be none
    tick(now)                                   time has passed; `wake` says when it wants to be told

    -> Assign(assignment)    Refuse(ticket, client, reason)    Combine(tickets)

After `Combine` the driver gives it those updates, one after another in the order of the tickets, by
`fold`, and calls `finish`, which makes the new global model. So a mean needs the memory of one
model, however many clients there are, and the model depends on what clients sent and not on who was
faster: tickets are in order of client. Until `finish` the updates are still the driver's: a state
taken between two `fold`s is that before the first, and who goes on from it gives all of `combining`
again.

When it asks whom and when it combines is its pacing's to say (`dure.federated.server.pacing`); what
it makes of updates is the model's and the algorithm's. `state` and `restore` at any point go on
with the same bits.

Source: K. Bonawitz et al., "Towards Federated Learning at Scale: System Design", MLSys 2019;
McMahan et al. 2017.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from dure.errors import TooFewClientsError, TooFewUpdatesError
from dure.federated.algorithm import Algorithm
from dure.federated.server.global_model import GlobalModel
from dure.federated.server.pacing import Pacing, Rounds
from dure.federated.server.sampling import Candidates
from dure.federated.server.unfit import unfit
from dure.protocol.carrier import Action, Assign, Combine, Refuse
from dure.protocol.messages import Assignment, Update
from dure.randomness.permutation import Permutation
from dure.randomness.seeds import derive

RETRY = 60.0
"""Seconds until it asks again where nobody was there."""

ATTEMPTS = 10_000
"""Times that it tries to begin a round, or to find a client, before it gives up."""

VAIN = 100
"""Models in a row that may be made of nothing, since every update was refused, before it gives
up."""


class Result(NamedTuple):
    """What a new model was made of. loss: mean over the samples, None of none; refused: by `fold`,
    ticket to reason."""

    loss: float | None
    samples: int
    clients: list[int]
    staleness: list[int]
    refused: dict[int, str]


class Open(NamedTuple):
    """A ticket of which no model has been made yet, and whether its update has arrived."""

    assignment: Assignment
    reported: bool = False


@dataclass
class Coordinator:
    """The server's state. sizes: examples of each client, as far as the server knows them.

    present: who has checked in; None takes all for reachable until `failed` says otherwise.
    """

    model: GlobalModel
    pacing: Pacing
    algorithm: Algorithm
    sizes: Sequence[int]
    seed: int
    present: set[int] | None = None
    wake: float = math.inf
    tickets: int = 0
    open: dict[int, Open] = field(default_factory=dict)
    busy: dict[int, int] = field(default_factory=dict)
    deadline: float = math.inf
    began: bool = False
    _attempt: int = 0
    _vain: int = 0
    _position: int = 0
    _asked: int = 0
    _reports: int = 0
    _answered: set[int] = field(default_factory=set)
    _answers: dict[int, int] = field(default_factory=dict)
    _news: list[int] = field(default_factory=list)
    _combining: list[int] = field(default_factory=list)
    _awaited: set[int] = field(default_factory=set)
    _probes: int = 0
    _found: tuple[int, int, int] = (-1, 0, 0)
    _order: Candidates | None = None
    _latest: Assignment | None = None
    _folded: list[tuple[int, int, float, int]] = field(default_factory=list)
    _refused: dict[int, str] = field(default_factory=dict)
    _past: list[tuple[list[Tensor], list[Tensor]]] = field(default_factory=list)

    @property
    def round(self) -> int:
        """The number of the global model."""
        return self.model.number

    # What it is told

    def check_in(self, client: int, now: float) -> list[Action]:
        """A client is there. For drivers that know; others never call it."""
        if self.present is None:
            self.present = set()
        self.present.add(client)
        self._probes = 0
        if (
            self.pacing.synchronous
        ):  # the round's order is gone through again for those who were not there before
            self._position = 0
        return self.tick(now)

    def leave(self, client: int) -> None:
        """A client without a ticket has gone again."""
        if self.present is not None:
            self.present.discard(client)

    def update(self, ticket: int, now: float) -> list[Action]:
        """An update has arrived. It is refused if nobody asked for it, if it came twice, or if it
        came too late: when a round is combined already, it is over."""
        known = self.open.get(ticket)
        if known is None:
            return [self._late(ticket)]
        if known.reported:
            return [Refuse(ticket, known.assignment.client, "it was sent already")]
        if self.pacing.synchronous and self._combining:
            del self.open[ticket]
            return [self._late(ticket)]
        self.open[ticket] = Open(known.assignment, reported=True)
        self._reports += 1
        client = known.assignment.client
        self.busy.pop(client, None)
        if self.pacing.synchronous:
            self._answered.add(client)
        else:
            self._attempt = 0
            self._answers[client] = self._answers.get(client, 0) + 1
            self._news.append(client)
        combined = self._combine(now)
        if not (
            self.pacing.synchronous or combined or self.busy
        ):  # it was the last one at work: all are asked anew
            self._probes = 0
        return [*combined, *self._fill(now)]

    def failed(self, ticket: int, reason: str, now: float) -> list[Action]:
        """A client will not answer: it was not there, dropped out, or could not do it. Another is
        asked instead. Who has answered cannot fail any more: its update lies with the driver."""
        known = self.open.get(ticket)
        if known is None:
            self._late(ticket)
            return []
        if known.reported:
            return []
        del self.open[ticket]
        self.busy.pop(known.assignment.client, None)
        if self.present is not None:
            self.present.discard(known.assignment.client)
        self._asked -= 1
        return [*self._fill(now), *self._combine(now)]

    def tick(self, now: float) -> list[Action]:
        """Time has passed: a round begins or ends at its deadline, free places are filled."""
        if self._combining:
            return []
        if now >= self.wake:
            self.wake, self._probes = self.deadline, 0
        if not self.began:
            self._begin(now)
        return [*self._fill(now), *self._combine(now)]

    # The new model

    @property
    def combining(self) -> list[int]:
        """The tickets that the last `Combine` named, until `finish`; a restored driver folds their
        updates anew."""
        return list(self._combining)

    def fold(self, update: Update, finite: bool = False) -> None:
        """Takes the next update of those that `Combine` named. One that cannot be right is left
        out, with its reason in the result. finite: the driver knows that all its numbers are.

        Raises ValueError for an update that `Combine` has not named, or that was given already.
        """
        if update.ticket not in self._awaited:
            raise ValueError(
                f"nobody waits for the update with ticket {update.ticket}, or it was folded already"
            )
        self._awaited.remove(update.ticket)
        known = self.open[update.ticket].assignment
        reason = unfit(update, known, finite, self.model.aggregator.collects)
        if reason is not None:
            self._refused[update.ticket] = reason
            return
        staleness = self.model.number - known.round
        scale, weight = self.algorithm.share(update, staleness)
        start = known.weights if self.algorithm.mixes_models else None
        self.model.fold(update, scale, weight, start)
        self._folded.append((update.client, update.samples, update.loss, staleness))

    def finish(self, now: float) -> Result:
        """Makes the new model. Where the updates are too few for the rule, the model stays, and
        they are refused.

        Raises TooFewClientsError where all have been refused too many times in a row.
        """
        try:
            extra = self.model.finish(self.seed)
        except TooFewUpdatesError as error:
            self._refused |= {ticket: str(error) for ticket in self._combining}
            self._folded, extra = [], []
            self.model.skip()
        self.algorithm.absorb(extra, len(self._folded))
        samples = sum(one[1] for one in self._folded)
        loss = sum(one[1] * one[2] for one in self._folded) / samples if samples else None
        clients, staleness = [one[0] for one in self._folded], [one[3] for one in self._folded]
        result = Result(loss, samples, clients, staleness, self._refused)
        self._vain = 0 if self._folded else self._vain + bool(self._refused)
        for ticket in self._combining:
            del self.open[ticket]
        self._combining, self._news = [], []
        self._begin_anew()
        self._attempt, self._probes = 0, 0
        if isinstance(self.pacing, Rounds):
            self._close("the round is over")
        elif self.pacing.stale is not None:
            self._past = [*self._past, (self.model.weights, self.model.buffers)][
                -self.pacing.stale - 1 :
            ]
        self.wake = now
        if self._vain >= VAIN:
            reason = next(iter(result.refused.values()))
            raise TooFewClientsError(
                f"in {VAIN} rounds in a row every update was refused: {reason}"
            )
        return result

    def _begin_anew(self) -> None:
        """Forgets what was folded: all that is combined is waited for."""
        self._awaited, self._folded, self._refused = set(self._combining), [], {}
        self.model.forget()

    # Asking

    def _begin(self, now: float) -> None:
        """A round, or an attempt at one, begins; asynchronous pacing begins once."""
        self.began, self._position, self._asked, self._probes, self._order = True, 0, 0, 0, None
        if isinstance(self.pacing, Rounds):
            self.deadline = now + self.pacing.selection.deadline
            self.wake = self.deadline
        elif self.pacing.stale is not None and not self._past:
            self._past = [(self.model.weights, self.model.buffers)]

    def _fill(self, now: float) -> list[Action]:
        """Asks as many clients as the pacing wants at work."""
        if not self.began or self._combining:
            return []
        actions: list[Action] = []
        asked, _ = self._wanted()
        while self._asked - (0 if self.pacing.synchronous else self._reports) < asked:
            client = self._next()
            if client is None:
                break
            actions.append(self._assign(client))
        return actions

    def _wanted(self) -> tuple[int, int]:
        """How many clients are asked for this model, and how many answers make the next: found out
        once a model."""
        if self._found[0] != self.round:
            count = len(self.sizes)
            asked, needed = (
                find(self.seed, self.round, count)
                for find in (self.pacing.asked, self.pacing.needed)
            )
            self._found = self.round, asked, needed
        return self._found[1:]

    def _next(self) -> int | None:
        """The next client in order who is not busy and, where that is known, there."""
        count = len(self.sizes)
        if len(self.busy) >= count:
            return None
        while self._probes < count and not (self.pacing.synchronous and self._position >= count):
            client = self._at(self._position)
            self._position += 1
            self._probes += 1
            free = client not in self.busy and client not in self._answered
            if free and (self.present is None or client in self.present):
                return client
        return None

    def _at(self, position: int) -> int:
        """The client at a position of the order: of the round, or of an endless one."""
        count = len(self.sizes)
        if isinstance(self.pacing, Rounds):
            if self._order is None:
                asked, _ = self._wanted()
                self._order = self.pacing.selection.order(
                    self.seed, self.round, self._attempt, self.sizes, asked
                )
            return self._order(position)
        epoch, position = divmod(position, count)
        if self._order is None or position == 0:
            self._order = Permutation(count, derive(self.seed, "candidates", epoch)).__getitem__
        return self._order(position)

    def _assign(self, client: int) -> Assign:
        number, weights, buffers = self.model.number, self.model.weights, self.model.buffers
        if self._past and not isinstance(self.pacing, Rounds) and self.pacing.stale is not None:
            drawn = derive(self.seed, "staleness", self.tickets) % (self.pacing.stale + 1)
            old = min(drawn, len(self._past) - 1)
            number, (weights, buffers) = number - old, self._past[-1 - old]
        deadline = self.deadline if math.isfinite(self.deadline) else None
        ticket = self.tickets
        extra, latest = self.algorithm.down(), self._latest
        alike = latest is not None and latest.weights is weights and latest.extra is extra
        nbytes = latest.nbytes if latest is not None and alike else 0
        turn = number if self.pacing.synchronous else self._answers.get(client, 0)
        self._latest = Assignment(
            ticket, client, number, weights, buffers, extra, deadline, nbytes, turn
        )
        self.open[ticket] = Open(self._latest)
        self.busy[client] = ticket
        self.tickets += 1
        self._asked += 1
        return Assign(self._latest)

    def assignment(self, ticket: int) -> Assignment:
        """What a client with an open ticket was sent."""
        return self.open[ticket].assignment

    def waits_for(self, ticket: int) -> bool:
        """Whether an update with this ticket would count: when a round is combined, no later one
        does."""
        if self.pacing.synchronous and self._combining:
            return False
        return ticket in self.open and not self.open[ticket].reported

    # Ending

    def _combine(self, now: float) -> list[Action]:
        """The answer `Combine` if there is enough for a new model; a round that cannot come to that
        begins again."""
        if not self.began or self._combining:
            return []
        reported = self._reports
        _, needed = self._wanted()
        if not isinstance(self.pacing, Rounds):
            if reported >= needed:
                return self._take(needed)
            return self._wait(now, reported == len(self.open))
        over = now >= self.deadline
        stuck = reported == len(self.open) and (self._asked < needed or needed == 0)
        if (
            reported >= needed > 0
            or needed == 0
            or ((over or stuck) and reported >= self.pacing.selection.minimum)
        ):
            return self._take(needed)
        if over:
            return self._again(now)
        if stuck:
            return self._wait(now, True)
        return []

    def _take(self, most: int) -> list[Action]:
        """Combines what has been reported, at most so many, the earliest tickets first; then in
        order of client."""
        reported = [ticket for ticket, one in self.open.items() if one.reported][:most]
        self._reports -= len(reported)
        self._combining = sorted(
            reported, key=lambda ticket: (self.open[ticket].assignment.client, ticket)
        )
        self._awaited = set(self._combining)
        if not self.pacing.synchronous:
            self._asked -= len(reported)
        return [Combine(list(self._combining))]

    def _wait(self, now: float, idle: bool) -> list[Action]:
        """Nobody is at work and nobody could be asked: it tries again later. Raises
        TooFewClientsError at last."""
        if not idle:
            self.wake = (
                min(self.wake, now + RETRY) if self._probes >= len(self.sizes) else self.wake
            )
            return []
        self._attempt += 1
        if self._attempt > ATTEMPTS:
            answered = (
                f"only {self._reports} of at least {self._minimum} clients"
                if self._reports
                else "no client"
            )
            raise TooFewClientsError(
                f"{answered} answered in {ATTEMPTS:,} attempts to go on with round "
                f"{self.round + 1}: "
                "look at the availability of the clients, or ask for fewer"
            )
        self.wake = min(self.deadline, now + RETRY)
        if isinstance(self.pacing, Rounds):  # those who were not there may be there then
            self._position, self._order = 0, None
        return []

    def _again(self, now: float) -> list[Action]:
        """At the deadline too few have answered: another attempt, with others."""
        self._attempt += 1
        if self._attempt > ATTEMPTS:
            minimum = self._minimum
            raise TooFewClientsError(
                f"round {self.round + 1} ended {ATTEMPTS:,} times with fewer than {minimum} "
                f"updates at its deadline: "
                "give it more time, ask more clients, or take a smaller minimum"
            )
        refused = self._close("the round was begun again")
        self._begin(now)
        return [*refused, *self._fill(now)]

    @property
    def _minimum(self) -> int:
        return (
            self.pacing.selection.minimum if isinstance(self.pacing, Rounds) else self.pacing.size
        )

    def _close(self, reason: str) -> list[Action]:
        """Forgets the open tickets of a round; clients at work stay busy until they answer, and are
        then refused."""
        refused: list[Action] = [
            Refuse(ticket, one.assignment.client, reason)
            for ticket, one in self.open.items()
            if one.reported
        ]
        self.open.clear()
        self._answered.clear()
        self.began, self.deadline, self._reports = False, math.inf, 0
        return refused

    def _late(self, ticket: int) -> Refuse:
        """An answer to a ticket that is not open any more."""
        client = next((client for client, held in self.busy.items() if held == ticket), -1)
        if client < 0:
            return Refuse(ticket, client, "nobody asked for it, or it was sent already")
        del self.busy[client]
        return Refuse(ticket, client, "it came too late")

    # Checkpoints

    def mark(self) -> Callable[[], None]:
        """A way back to this moment between two models, as long as the next one is not made: cheap
        enough to be taken before each of them."""
        kept = {
            name: copy(one) if isinstance(one, dict | list | set) else one
            for name, one in vars(self).items()
            if name != "_answers"
        }

        def back() -> None:
            for client in self._news[
                len(kept["_news"]) :
            ]:  # the counts of all clients are too many to be copied
                self._answers[client] -= 1
                if not self._answers[client]:
                    del self._answers[client]
            for name, value in kept.items():
                setattr(self, name, value)
            self.model.forget()

        return back

    def state(self) -> dict[str, Any]:
        """Everything but what was folded, as a tree for checkpoints. Models that clients hold are
        written once each."""
        handed_out = [(one.assignment, one.reported) for one in self.open.values()]
        models = {
            one.round: [list(one.weights), list(one.buffers), list(one.extra)]
            for one, _ in handed_out
        }
        return {
            "model": self.model.state(),
            "algorithm": self.algorithm.state(),
            "models": dict(sorted(models.items())),
            "open": [
                [one.ticket, one.client, one.round, one.deadline, one.turn, reported]
                for one, reported in handed_out
            ],
            "past": [[list(weights), list(buffers)] for weights, buffers in self._past],
            "busy": [[client, ticket] for client, ticket in self.busy.items()],
            "present": None if self.present is None else sorted(self.present),
            "times": [self.wake, self.deadline],
            "answered": sorted(self._answered),
            "answers": [[client, count] for client, count in sorted(self._answers.items())],
            "counts": [
                *(
                    self.tickets,
                    self._attempt,
                    self._vain,
                    self._position,
                    self._asked,
                    self._reports,
                    self._probes,
                )
            ],
            "began": self.began,
            "combining": list(self._combining),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from `state`, between two models or at any event in between."""
        self.model.restore(state["model"])
        self.algorithm.restore(state["algorithm"])
        models = state["models"]
        self.open = {}
        for ticket, client, number, deadline, turn, reported in state["open"]:
            weights, buffers, extra = models[number]
            sent = Assignment(ticket, client, number, weights, buffers, extra, deadline, turn=turn)
            self.open[ticket] = Open(sent, reported)
        self._past = [(weights, buffers) for weights, buffers in state["past"]]
        self.busy = dict(state["busy"])
        self.present = None if state["present"] is None else set(state["present"])
        self.wake, self.deadline = state["times"]
        self.tickets, self._attempt, self._vain, self._position, *rest = state["counts"]
        self._asked, self._reports, self._probes = rest
        self._answered, self._answers = set(state["answered"]), dict(state["answers"])
        self.began, self._combining, self._order = state["began"], list(state["combining"]), None
        self._begin_anew()
