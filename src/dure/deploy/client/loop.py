"""Main loop of a client: request work, then train, evaluate or answer, and send the result.

    next -> outcomes of its updates      commit or drop the state of the algorithm
         -> evaluate this model          on the held-out examples
         -> train from this model        fetch, train, store, send
         -> answer a step of a protocol  on an update that stays here

If updates stay at their clients, the client sends only the notice that an update is ready, and the
answers to the protocol's steps. The keys of the protocol exist in memory only: a restarted client
has left the protocol. In this mode the client reports nothing else about its examples, neither
their number nor an evaluation.

A client may be killed at any moment. The state that the algorithm keeps between rounds is committed
when the server confirms that the update counts. A computed update is sent after a restart, and not
computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from msgspec.structs import replace
from torch import Tensor

from dure.deploy.answer_tensors import forms_of as wanted_forms
from dure.deploy.answer_tensors import named
from dure.deploy.client.failure import failure_report
from dure.deploy.client.link import RefusedError, StoppedError
from dure.deploy.client.session import (
    LAST,
    GaveUpError,
    NotWantedError,
    Session,
    WorkWatcher,
    tensors_in,
)
from dure.errors import PolicyError, described
from dure.protocol.messages import ProtocolAnswer, ProtocolStep, WantedTensor
from dure.wire.requests import (
    VERSION,
    CheckIn,
    EvaluationReport,
    EvaluationTask,
    Machine,
    ProtocolAnswerBody,
    ProtocolStepBody,
    TaskDescription,
    Train,
    TrainingFailure,
    UpdateOutcome,
    UploadRequest,
    Welcome,
)
from dure.wire.tensors import digest_of, forms_of, size_of

NOT_WANTED = 410
"""HTTP status for work that is no longer needed."""

UNFIT = 422
"""HTTP status for an update that does not match the assignment."""

MOST_WAIT = 60.0
"""Maximum seconds between two attempts of a client whose own code raises repeatedly."""


class TrainedAssignment(NamedTuple):
    """Result of an assignment at a site.

    `reserve` is the update without its tensors. `memory` is the state of the algorithm if the
    update counts; None for no new state. `keep` is True if the update is stored, to be sent or held
    again after a restart.
    """

    reserve: UploadRequest
    tensors: Mapping[str, Tensor]
    memory: Sequence[Tensor] | None
    keep: bool = True


class TrainingSite(Protocol):
    """Work of a site for a server: training, evaluation and protocol steps.

    The loop depends on neither the model nor the algorithm. `holds` is True if the site knows from
    the run's settings that updates stay here, whatever the server says.
    """

    name: str
    examples: int
    held_out: int
    wants: int | None
    folder: Path | None
    holds: bool

    @property
    def share_errors(self) -> bool:
        """Whether messages and source lines of the site's own errors are sent."""

    def trains(self) -> TaskDescription | None:
        """Return the model and task of the site; None for its own training loop."""

    def machine(self) -> Machine | None:
        """Return the properties of the machine that determine the computed bits."""

    def begin(self, welcome: Welcome, memory: Sequence[Tensor] | None) -> None:
        """Start a run; `memory` is the stored state of the algorithm."""

    def train(
        self, train: Train, tensors: Mapping[str, Tensor], wanted: Callable[[], bool]
    ) -> TrainedAssignment:
        """Train from a model and return the update.

        Calls `wanted` now and then, and raises NotWantedError if the update is no longer needed.
        """

    def hold(
        self,
        train: Train,
        tensors: Mapping[str, Tensor],
        reserve: UploadRequest,
        update: Mapping[str, Tensor],
    ) -> None:
        """Restore an update that stays here, computed from this model by an earlier process."""

    def answer(self, say: ProtocolStep) -> ProtocolAnswer | None:
        """Answer a step of a protocol; None if the site has left the protocol.

        An error ends the protocol for this update.
        """

    def measure(self, measure: EvaluationTask, tensors: Mapping[str, Tensor]) -> EvaluationReport:
        """Evaluate a model on the held-out examples."""

    def settle(self, outcome: UpdateOutcome) -> None:
        """Take the outcome of an update."""

    def remember(self, memory: Sequence[Tensor] | None) -> None:
        """Set the state of the algorithm."""


Event = Callable[[str, Mapping[str, object]], None]
"""Listener for events, such as ("training", {"round": 3, …})."""


class ClientLoop:
    """Client that works until the run ends or the client is stopped.

    `closed` returns the seconds until the site's working hours; 0 within them.
    """

    def __init__(
        self,
        session: Session,
        site: TrainingSite,
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
        """Number of the client, after its check-in."""
        self._left: set[int] = set()
        """Assignment ids for which the site's own code has left the protocol."""
        self._earlier = set(self.state.pending())
        """Assignment ids for which an earlier process of this client has worked."""

    def run(self) -> str:
        """Work until the run ends, and return the reason. Raises StoppedError and RefusedError."""
        self._check_in()
        self._confirmed = [] if self.state.temporary else self.state.confirmations()
        while True:
            self._wait_until_open()
            confirmed = list(self._confirmed)
            try:
                word = self.session.next(confirmed)
            except RefusedError as refused:
                # A server that was restarted without its run needs a new check-in.
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

    def _keep_final(self, final: EvaluationTask | None) -> None:
        """Fetch the last model of the run, if the client stores the newest model."""
        if final is not None and not self.state.temporary:
            self.event("fetching", {"round": final.round, "bytes": final.bytes})
            try:
                self._fetched(final, LAST)
            # A server whose run has ended does not wait long for a client with a broken connection.
            except GaveUpError as error:
                why = f"{error.__cause__}; the last model was not saved"
                self.event("waiting", {"why": why})

    def _wait_until_open(self) -> None:
        """Wait for the site's working hours, without any request to the server."""
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
                # A positive number signals a client with examples, without their count.
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
        """Whether updates stay here, by the server's or the site's settings."""
        return self.session.holds or self.site.holds

    # Outcomes of updates

    def _settle(self, outcome: UpdateOutcome) -> None:
        self._left.discard(outcome.ticket)
        if not self.state.temporary:
            self.state.settle(outcome.ticket, outcome.kept)
        self.site.settle(outcome)
        # The earlier process has left its algorithm's state only on the disk.
        if outcome.ticket in self._earlier:
            self._earlier.remove(outcome.ticket)
            self.site.remember(self.state.memory())
        self._confirmed.append(outcome.ticket)
        self.event("settled", {"kept": outcome.kept, "reason": outcome.reason})

    def _heard(self, tickets: list[int]) -> None:
        """Remove outcomes from the list after the server has received their confirmation."""
        if tickets:
            self._confirmed = [one for one in self._confirmed if one not in tickets]
            if not self.state.temporary:
                self.state.confirmed(tickets)

    # Work

    def _measure(self, measure: EvaluationTask) -> None:
        if self.holds:
            self.session.measured(EvaluationReport(measure.round, failure="measurements stay here"))
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
                # The round ended while the update was in transit.
                if refused.status != 410:
                    raise
                sent = False
            if sent:
                self.event("sent", {"round": train.round, "bytes": found[0].bytes})
            else:
                self._not_wanted(train, wanted)

    def _holds(self, train: Train, reserve: UploadRequest) -> None:
        """Report that an update is ready, or that there is none, without the reason."""
        try:
            if reserve.failure is None:
                self.session.ready(train.ticket)
                self.event("ready", {"round": train.round})
            else:
                self._give_up(train, TrainingFailure(train.ticket, "NoUpdate"), reserve.failure)
        except RefusedError as refused:
            if refused.status != NOT_WANTED:
                raise

    def _held(
        self, train: Train, reserve: UploadRequest, update: Mapping[str, Tensor]
    ) -> tuple[UploadRequest, Mapping[str, Tensor]] | None:
        """Return the same update after the site has restored it; None if its model is gone."""
        tensors = self._fetched(train)
        if tensors is None:
            return None
        self.site.hold(train, tensors, reserve, update)
        return reserve, update

    def _answer(self, this: ProtocolStepBody) -> None:
        """Answer a step of a protocol."""
        with self.session.working(this.ticket) as wanted:
            self.event("answering", {"ticket": this.ticket, "step": this.stage})
            said = ProtocolAnswerBody(this.ticket, this.stage, this.asking)
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
                # The step ended while the answer was in transit.
                if refused.status != NOT_WANTED:
                    raise

    def _says(self, this: ProtocolStepBody) -> ProtocolAnswer | None:
        """Return the site's answer. Raises _LeftError if its own code raises."""
        if this.ticket in self._left:
            return None
        try:
            wants = [WantedTensor(dtype, tuple(shape)) for dtype, shape in this.wants]
            say = ProtocolStep(this.ticket, self._client, this.stage, this.body, wants)
            answer = self.site.answer(say)
            if answer is not None and forms_of(named(answer.tensors)) != wanted_forms(wants):
                raise ValueError("the answer has other tensors than requested")
        except Exception as error:
            self._left.add(this.ticket)
            self.event("left", {"why": described(error)})
            raise _LeftError(type(error).__name__) from error
        return answer

    def _sends(
        self, this: ProtocolStepBody, answer: ProtocolAnswer, wanted: Callable[[], bool]
    ) -> bool:
        """Send the tensors of an answer, and return whether the answer is still needed."""
        if not answer.tensors:
            return True
        tensors = named(answer.tensors)
        size, digest = size_of(forms_of(tensors)), digest_of(tensors)
        reserve = UploadRequest(this.ticket, size, digest, 0, 0, 0.0, asking=this.asking)
        try:
            return self.session.send(reserve, tensors, wanted)
        except RefusedError as refused:
            if refused.status != NOT_WANTED:
                raise
            return False

    def _ready(self, train: Train) -> tuple[UploadRequest, Mapping[str, Tensor]] | None:
        """Return an update that an earlier process has computed from the same model."""
        for reserve in () if self.state.temporary else self.state.updates():
            # A server restored from a backup reuses assignment ids for other models.
            computed = self.state.computed_from(train.ticket)
            if reserve.ticket == train.ticket and computed == train.tensors:
                return reserve, tensors_in(self.state.update(train.ticket))
        return None

    def _answered(self, train: Train, wanted: WorkWatcher) -> TrainedAssignment | None:
        """Train and store the update; None if the site's code raised or the work is not needed."""
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
            self.session.failed(TrainingFailure(train.ticket, PolicyError.__name__))
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
        self, model: Train | EvaluationTask, limit: float | None = None
    ) -> dict[str, Tensor] | None:
        """Fetch a model; None if the server has a newer model. `limit` is as in `Session.fetch`."""
        extras = isinstance(model, Train)
        try:
            return self.session.fetch(
                model.round, model.tensors, model.bytes, limit=limit, extras=extras
            )
        except RefusedError as refused:
            if refused.status != 410:
                raise
            return None

    def _not_wanted(self, train: Train, wanted: WorkWatcher) -> None:
        self.event("not wanted", {"round": train.round, "why": wanted.reason})

    def _refused(self, train: Train, refused: RefusedError) -> None:
        """Drop an update that the server refuses permanently, as a failure."""
        if not self.state.temporary:
            self.state.settle(train.ticket, kept=False)
        self._fails(train, refused)

    def _fails(self, train: Train, error: Exception) -> None:
        """Report an error of the site's own code, and wait before the next attempt."""
        site = self.site
        told = failure_report(train.ticket, error, site.share_errors, site.folder)
        self._give_up(train, told, described(error))

    def _give_up(self, train: Train, told: TrainingFailure, why: str) -> None:
        """Report that there is no update, and wait before the next attempt."""
        self.event("failed", {"round": train.round, "error": why})
        self.session.failed(told)
        self._failures += 1
        if self.session.stop.wait(min(2.0**self._failures, MOST_WAIT)):
            raise StoppedError


class _LeftError(Exception):
    """The site's own code has left a protocol. `kind` is the type of its error, which is sent."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind
