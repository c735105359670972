"""What a client does, again and again: hears, trains or measures, sends.

    next -> outcomes of its updates      what it keeps becomes valid, or is dropped
         -> measure this model           on what it holds out
         -> train from this model        fetch, train, write down, send
         -> answer a step of a protocol  on an update that stays here

Where updates stay with their clients, what is said is that one is ready, and the answers to the
protocol's steps. Keys of the protocol are in memory alone: a client that was started again is not
in it any more. Nothing else is said then of a client's examples: not how many there are, and no
measurement.

A client may be killed at any moment. What it keeps between rounds becomes valid when the server has
said that the update counts; an update that was computed is sent, and not computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from msgspec.structs import replace
from torch import Tensor

from dure.errors import PolicyError, described
from dure.protocol.messages import Answer, Form, Say
from dure.wire.requests import (
    VERSION,
    AnswerTo,
    CheckIn,
    Failed,
    Machine,
    MeasuredThis,
    MeasureThis,
    Outcome,
    Reserve,
    SayThis,
    Train,
    Trains,
    Welcome,
)
from dure.wire.tensors import digest_of, forms_of, size_of
from dure.worlds.network.client.failure import what_is_told
from dure.worlds.network.client.link import RefusedError, StoppedError
from dure.worlds.network.client.session import (
    LAST,
    GaveUpError,
    NotWantedError,
    Session,
    Watching,
    tensors_in,
)
from dure.worlds.network.wanted import forms_of as wanted_forms
from dure.worlds.network.wanted import named

NOT_WANTED = 410
"""Answered to what nobody waits for any more."""

UNFIT = 422
"""Answered to an update that cannot be what was asked for."""

MOST_WAIT = 60.0
"""Seconds between two attempts of a client whose own code raises again and again, at the most."""


class Answered(NamedTuple):
    """What a site has made of an assignment.

    reserve: the update without its tensors. memory: what the algorithm keeps if the update counts;
    None where it keeps nothing new. keep: whether the update is written down, to be sent or held
    again after a restart.
    """

    reserve: Reserve
    tensors: Mapping[str, Tensor]
    memory: Sequence[Tensor] | None
    keep: bool = True


class Site(Protocol):
    """What a site does with what it is told. The loop knows neither model nor algorithm.

    holds: whether its updates stay here, by what it knows of the run; whoever else says so.
    """

    name: str
    examples: int
    held_out: int
    wants: int | None
    folder: Path | None
    holds: bool

    @property
    def share_errors(self) -> bool:
        """Whether messages and lines of its own errors travel."""

    def trains(self) -> Trains | None:
        """What it would train; None for a training loop of its own."""

    def machine(self) -> Machine | None:
        """How it computes."""

    def begin(self, welcome: Welcome, memory: Sequence[Tensor] | None) -> None:
        """The run is this one; memory: what the algorithm had kept."""

    def train(
        self, train: Train, tensors: Mapping[str, Tensor], wanted: Callable[[], bool]
    ) -> Answered:
        """Trains from a model. Raises NotWantedError once the update is not `wanted` any more,
        which it asks now and then."""

    def hold(
        self,
        train: Train,
        tensors: Mapping[str, Tensor],
        reserve: Reserve,
        update: Mapping[str, Tensor],
    ) -> None:
        """An update that stays here, and that an earlier process of this client has computed from
        this model."""

    def answer(self, say: Say) -> Answer | None:
        """What it says to a step of a protocol; None where it is not in it any more. What it raises
        ends the protocol for this update."""

    def measure(self, measure: MeasureThis, tensors: Mapping[str, Tensor]) -> MeasuredThis:
        """Measures a model."""

    def settle(self, outcome: Outcome) -> None:
        """What became of an update."""

    def remember(self, memory: Sequence[Tensor] | None) -> None:
        """What the algorithm has kept is this."""


Event = Callable[[str, Mapping[str, object]], None]
"""Hears of what happens: ("training", {"round": 3, …})."""


class Loop:
    """A client at work until the run is over, or it is stopped.

    closed: seconds until the site works again, 0 while it does.
    """

    def __init__(
        self,
        session: Session,
        site: Site,
        event: Event,
        closed: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.session = session
        self.site = site
        self.event = event
        self.state = session.state
        self.closed = closed
        self._confirmed: list[int] = []
        self._failures = 0
        self._client = -1
        """Its number, once it has checked in."""
        self._left: set[int] = set()
        """Tickets on which the site's own code does not go on with the protocol."""
        self._earlier = set(self.state.pending())
        """Tickets that an earlier process of this client has worked for."""

    def run(self) -> str:
        """Until the run is over; why it is. Raises StoppedError and RefusedError."""
        self._check_in()
        self._confirmed = [] if self.state.temporary else self.state.confirmations()
        while True:
            self._wait_until_open()
            confirmed = list(self._confirmed)
            try:
                word = self.session.next(confirmed)
            except RefusedError as refused:
                # A server that was started anew without its run has to be told who calls.
                if refused.status != 409:
                    raise
                self._check_in()
                continue
            self._heard(confirmed)
            for outcome in word.outcomes:
                self._settle(outcome)
            if word.over is not None:
                self._keep_final(word.final)
                return word.over
            if word.say is not None:
                self._answer(word.say)
            if word.measure is not None:
                self._measure(word.measure)
            if word.train is not None:
                self._train(word.train)

    def _keep_final(self, final: MeasureThis | None) -> None:
        """A client that keeps the newest model gets the last one of the run."""
        if final is not None and not self.state.temporary:
            self.event("fetching", {"round": final.round, "bytes": final.bytes})
            try:
                self._fetched(final, LAST)
            # A server whose run is over does not wait long for those whose links break.
            except GaveUpError as error:
                why = f"{error.__cause__}; the last model is left there"
                self.event("waiting", {"why": why})

    def _wait_until_open(self) -> None:
        """Outside its hours the site does not call, and is away for the server."""
        seconds = self.closed()
        if seconds > 0:
            self.event("closed", {"seconds": seconds})
            if self.session.stop.wait(seconds):
                raise StoppedError

    def _check_in(self) -> None:
        site = self.site
        holds = self.holds
        welcome = self.session.check_in(
            CheckIn(
                version=VERSION,
                name=site.name,
                # One says that it is there.
                examples=1 if holds else site.examples,
                held_out=0 if holds else site.held_out,
                wants=site.wants,
                trains=site.trains(),
                machine=site.machine(),
            )
        )
        self._client = welcome.client
        self.event("checked in", {"client": welcome.client, "differs": welcome.differs})

    @property
    def holds(self) -> bool:
        """Whether updates stay here: where the server or the site says so."""
        return self.session.holds or self.site.holds

    # What became of updates

    def _settle(self, outcome: Outcome) -> None:
        self._left.discard(outcome.ticket)
        if not self.state.temporary:
            self.state.settle(outcome.ticket, outcome.kept)
        self.site.settle(outcome)
        # What that process has learned is on the disk alone.
        if outcome.ticket in self._earlier:
            self._earlier.remove(outcome.ticket)
            self.site.remember(self.state.memory())
        self._confirmed.append(outcome.ticket)
        self.event("settled", {"kept": outcome.kept, "reason": outcome.reason})

    def _heard(self, tickets: list[int]) -> None:
        """The server has heard that these are settled."""
        if tickets:
            self._confirmed = [one for one in self._confirmed if one not in tickets]
            if not self.state.temporary:
                self.state.confirmed(tickets)

    # Work

    def _measure(self, measure: MeasureThis) -> None:
        if self.holds:
            self.session.measured(MeasuredThis(measure.round, failure="measurements stay here"))
            return
        tensors = self._fetched(measure)
        if tensors is None:
            return
        self.event("measuring", {"round": measure.round})
        self.session.measured(self.site.measure(measure, tensors))

    def _train(self, train: Train) -> None:
        with self.session.working(train.ticket) as wanted:
            self.event("fetching", {"round": train.round, "bytes": train.bytes})
            found = self._ready(train)
            if found is not None and (train.holds or self.holds):
                found = self._held(train, *found)
            if found is None:
                answered = self._answered(train, wanted)
                if answered is None:
                    return
                found = answered.reserve, answered.tensors
            if train.holds or self.holds:
                self._holds(train, found[0])
                return
            self.event("sending", {"round": train.round, "bytes": found[0].bytes})
            try:
                sent = self.session.send(*found, wanted)
            except RefusedError as refused:
                if refused.status == UNFIT:
                    self._refused(train, refused)
                    return
                # The round ended while it was on its way.
                if refused.status != 410:
                    raise
                sent = False
            if sent:
                self.event("sent", {"round": train.round, "bytes": found[0].bytes})
            else:
                self._not_wanted(train, wanted)

    def _holds(self, train: Train, reserve: Reserve) -> None:
        """The server hears that an update is there, or that there is none; not why."""
        try:
            if reserve.failure is None:
                self.session.ready(train.ticket)
                self.event("ready", {"round": train.round})
            else:
                self._give_up(train, Failed(train.ticket, "NoUpdate"), reserve.failure)
        except RefusedError as refused:
            if refused.status != NOT_WANTED:
                raise

    def _held(
        self, train: Train, reserve: Reserve, update: Mapping[str, Tensor]
    ) -> tuple[Reserve, Mapping[str, Tensor]] | None:
        """The same, once the site has it; None where its model is gone."""
        tensors = self._fetched(train)
        if tensors is None:
            return None
        self.site.hold(train, tensors, reserve, update)
        return reserve, update

    def _answer(self, this: SayThis) -> None:
        """Answers a step of a protocol."""
        with self.session.working(this.ticket) as wanted:
            self.event("answering", {"ticket": this.ticket, "step": this.stage})
            said = AnswerTo(this.ticket, this.stage, this.asking)
            try:
                answer = self._says(this)
                if answer is not None:
                    said = replace(said, body=answer.body)
                    if not self._sends(this, answer, wanted):
                        return
            except _LeftError as left:
                said = replace(said, failure=left.kind)
            try:
                self.session.answered(said)
            except RefusedError as refused:
                # The step ended while it was on its way.
                if refused.status != NOT_WANTED:
                    raise

    def _says(self, this: SayThis) -> Answer | None:
        """What the site says. Raises _LeftError where its own code does not go on."""
        if this.ticket in self._left:
            return None
        try:
            wants = [Form(dtype, tuple(shape)) for dtype, shape in this.wants]
            say = Say(this.ticket, self._client, this.stage, this.body, wants)
            answer = self.site.answer(say)
            if answer is not None and forms_of(named(answer.tensors)) != wanted_forms(wants):
                raise ValueError("the answer has other tensors than were asked for")
        except Exception as error:
            self._left.add(this.ticket)
            self.event("left", {"why": described(error)})
            raise _LeftError(type(error).__name__) from error
        return answer

    def _sends(self, this: SayThis, answer: Answer, wanted: Callable[[], bool]) -> bool:
        """Sends the tensors of an answer; whether it is still wanted."""
        if not answer.tensors:
            return True
        tensors = named(answer.tensors)
        size, digest = size_of(forms_of(tensors)), digest_of(tensors)
        reserve = Reserve(this.ticket, size, digest, 0, 0, 0.0, asking=this.asking)
        try:
            return self.session.send(reserve, tensors, wanted)
        except RefusedError as refused:
            if refused.status != NOT_WANTED:
                raise
            return False

    def _ready(self, train: Train) -> tuple[Reserve, Mapping[str, Tensor]] | None:
        """An update that was computed before this process began."""
        for reserve in () if self.state.temporary else self.state.updates():
            # A server that was restored from a copy gives its tickets again, for other models.
            computed = self.state.computed_from(train.ticket)
            if reserve.ticket == train.ticket and computed == train.tensors:
                return reserve, tensors_in(self.state.update(train.ticket))
        return None

    def _answered(self, train: Train, wanted: Watching) -> Answered | None:
        """What the site makes of it, written down; None where its own code raised, or where nobody
        waits for it any more."""
        tensors = self._fetched(train)
        if tensors is None:
            return None
        self.event("training", {"round": train.round})
        try:
            answered = self.site.train(
                train, tensors, lambda: wanted() and not self.session.stop.is_set()
            )
        except NotWantedError:
            if self.session.stop.is_set():
                raise StoppedError from None
            self._not_wanted(train, wanted)
            return None
        except PolicyError:
            self.session.failed(Failed(train.ticket, PolicyError.__name__))
            raise
        except Exception as error:
            self._fails(train, error)
            return None
        self._failures = 0
        if not self.state.temporary:
            if answered.memory is not None:
                self.state.keep_pending(train.ticket, answered.memory)
            if answered.reserve.failure is None and answered.keep:
                self.state.keep_update(answered.reserve, answered.tensors, train.tensors)
        return answered

    def _fetched(
        self, model: Train | MeasureThis, limit: float | None = None
    ) -> dict[str, Tensor] | None:
        """A model; None where the server has a newer one by now. limit: as `Session.fetch`'s."""
        extras = isinstance(model, Train)
        try:
            return self.session.fetch(
                model.round, model.tensors, model.bytes, limit=limit, extras=extras
            )
        except RefusedError as refused:
            if refused.status != 410:
                raise
            return None

    def _not_wanted(self, train: Train, wanted: Watching) -> None:
        self.event("not wanted", {"round": train.round, "why": wanted.reason})

    def _refused(self, train: Train, refused: RefusedError) -> None:
        """The server takes no such update, and would not take it later: another is asked."""
        if not self.state.temporary:
            self.state.settle(train.ticket, kept=False)
        self._fails(train, refused)

    def _fails(self, train: Train, error: Exception) -> None:
        """The site's own code raised: the server hears where, and the client waits a little."""
        site = self.site
        told = what_is_told(train.ticket, error, site.share_errors, site.folder)
        self._give_up(train, told, described(error))

    def _give_up(self, train: Train, told: Failed, why: str) -> None:
        """There is no update, of which the server hears this much; the next attempt waits."""
        self.event("failed", {"round": train.round, "error": why})
        self.session.failed(told)
        self._failures += 1
        if self.session.stop.wait(min(2.0**self._failures, MOST_WAIT)):
            raise StoppedError


class _LeftError(Exception):
    """The site's own code does not go on with a protocol. kind: of its error, which is told."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind
