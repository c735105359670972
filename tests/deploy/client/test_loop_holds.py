"""What a client says whose updates stay with it, and what it does not say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from test_loop import MODEL, Patient, Played, run, works
from torch import Tensor

from dure.deploy.client.loop import TrainedAssignment
from dure.deploy.client.state import ClientState
from dure.protocol.messages import ProtocolAnswer, ProtocolStep
from dure.wire.requests import (
    CheckIn,
    EvaluationReport,
    EvaluationTask,
    NextAnswer,
    ProtocolAnswerBody,
    ProtocolStepBody,
    Train,
    TrainingFailure,
    UploadRequest,
    Welcome,
)
from dure.wire.tensors import digest_of, forms_of, size_of

OVER = NextAnswer(over="the run is over")
UPDATE = UploadRequest(3, size_of(forms_of(MODEL)), digest_of(MODEL), 5, 5, 1.0)


class Holding(Played):
    """A session of a run whose updates stay with their clients. says: all that it was said."""

    def __init__(self, state: ClientState, *words: NextAnswer, holds: bool = True) -> None:
        super().__init__(state, words)
        self.holds = holds
        self.says: list[Any] = []

    def check_in(self, said: CheckIn) -> Welcome:
        self.says.append(said)
        return super().check_in(said)

    def ready(self, ticket: int) -> None:
        self.says.append(ticket)

    def answered(self, answer: ProtocolAnswerBody) -> None:
        self.says.append(answer)

    def measured(self, measured: EvaluationReport) -> None:
        self.says.append(measured)

    def failed(self, failed: TrainingFailure) -> None:
        self.says.append(failed)

    def send(self, reserve: UploadRequest, tensors: Mapping[str, Tensor], wanted: Any) -> bool:
        self.says.append((reserve, dict(tensors)))
        return True


class Adds(Patient):
    """A site that takes part in a protocol."""

    held_out = 4

    def __init__(self) -> None:
        super().__init__()
        self.has: list[int] = []
        self.heard: list[ProtocolStep] = []

    def hold(self, train: Train, tensors: Any, reserve: UploadRequest, update: Any) -> None:
        assert (digest_of(tensors), digest_of(update)) == (digest_of(MODEL), reserve.digest)
        self.has.append(train.ticket)

    def answer(self, say: ProtocolStep) -> ProtocolAnswer | None:
        self.heard.append(say)
        tensors = [torch.ones(want.shape, dtype=torch.int32) for want in say.wants]
        return ProtocolAnswer(say.ticket, say.client, say.stage, b"shares", tensors)

    def measure(self, *_: Any) -> EvaluationReport:
        raise AssertionError("it would tell how well a model fits its data")


@pytest.fixture
def state(tmp_path: Path) -> Iterator[ClientState]:
    with ClientState(tmp_path / "site") as state:
        yield state


def said(session: Holding, site: Any) -> list[Any]:
    """What was said after the check-in, of which nothing is told either."""
    run(session, site)
    first, *rest = session.says
    assert (first.examples, first.held_out) == (1, 0)
    return rest


def test_an_update_stays_and_nothing_of_it_is_said(state: ClientState) -> None:
    site = Adds()
    assert said(Holding(state, *works(3)), site) == [3]
    assert site.batches == 10
    # It is written down, for the case that the client is started again.
    assert [one.ticket for one in state.updates()] == [3]


@pytest.mark.parametrize("who", ["server", "site", "assignment"])
def test_it_stays_whoever_says_so(who: str, state: ClientState) -> None:
    site = Adds()
    site.holds = who == "site"  # type: ignore[misc]
    train = Train(3, 3, 3, "", 0, holds=who == "assignment")
    session = Holding(state, NextAnswer(train=train), OVER, holds=who == "server")
    run(session, site)
    assert session.says[1:] == [3]


def test_an_update_of_an_earlier_process_is_handed_to_the_site(state: ClientState) -> None:
    state.keep_update(UPDATE, MODEL, "the same")
    site = Adds()
    session = Holding(state, NextAnswer(train=Train(3, 3, 3, "the same", 0)), OVER)
    assert said(session, site) == [3]
    assert (site.has, site.batches) == ([3], 0)


def test_that_there_is_no_update_is_said_without_why(
    state: ClientState, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Diverges(Adds):
        def train(self, train: Train, *_: Any) -> TrainedAssignment:
            why = "its loss became not finite"
            return TrainedAssignment(
                UploadRequest(train.ticket, 0, "", 5, 5, 1.0, failure=why), {}, None
            )

    session = Holding(state, *works(3))
    monkeypatch.setattr(session.stop, "wait", lambda seconds: False)
    assert said(session, Diverges()) == [TrainingFailure(3, "NoUpdate")]


def test_nothing_is_measured(state: ClientState) -> None:
    [measured] = said(Holding(state, NextAnswer(measure=EvaluationTask(2, "", 0)), OVER), Adds())
    assert measured == EvaluationReport(2, failure="measurements stay here")


def test_a_step_is_answered_with_what_names_it(state: ClientState) -> None:
    site = Adds()
    step = ProtocolStepBody(3, 2, "asked", b"hello", [("int32", [4])])
    [(reserve, tensors), answer] = said(Holding(state, NextAnswer(say=step), OVER), site)
    assert answer == ProtocolAnswerBody(3, 2, "asked", b"shares")
    assert (reserve.ticket, reserve.asking, reserve.examples) == (3, "asked", 0)
    assert reserve.digest == digest_of(tensors)
    assert [(one.ticket, one.stage, one.body) for one in site.heard] == [(3, 2, b"hello")]
    assert not list(state.folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    "wants", [[("int32", [2, 2])], [("float128", [4])], [("int32", [-1])], []], ids=repr
)
def test_a_site_that_does_not_go_on_is_not_asked_again(wants: Any, state: ClientState) -> None:
    class Others(Adds):
        def answer(self, say: ProtocolStep) -> ProtocolAnswer | None:
            self.heard.append(say)
            return ProtocolAnswer(say.ticket, say.client, say.stage, b"", [torch.ones(4).int()])

    site = Others()
    words = [
        NextAnswer(say=ProtocolStepBody(ticket, stage, "asked", b"", wants))
        for ticket, stage in [(3, 1), (3, 2)]
    ]
    first, second = said(Holding(state, *words, OVER), site)
    assert (first.body, first.failure) == (None, "ValueError")
    assert (second.body, second.failure) == (None, "")
    assert len(site.heard) <= 1
