"""What a client makes of what it is told, with a session that plays the server."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dure.deploy.client.link import RefusedError, StoppedError
from dure.deploy.client.loop import ClientLoop, TrainedAssignment
from dure.deploy.client.session import NotWantedError
from dure.deploy.client.state import ClientState
from dure.wire.requests import (
    Machine,
    NextAnswer,
    TaskDescription,
    Train,
    TrainingFailure,
    UploadRequest,
    Welcome,
)
from dure.wire.tensors import digest_of, forms_of, size_of

MODEL = {"w": torch.arange(3.0)}


class Wanted:
    """Whether the work is wanted: so many times, then no more."""

    reason = "the round is over"

    def __init__(self, times: int) -> None:
        self.times = times

    def __call__(self) -> bool:
        self.times -= 1
        return self.times >= 0


class Played:
    """A session. words: what it is told, one after another. sends: what becomes of updates."""

    def __init__(
        self, state: ClientState, words: Sequence[NextAnswer], wanted: int = 10**9
    ) -> None:
        self.state = state
        self.stop = threading.Event()
        self.words = list(words)
        self.wanted = wanted
        self.refusal: Exception | None = None
        self.sent: list[int] = []
        self.told: list[TrainingFailure] = []
        self.holds = False

    def check_in(self, said: Any) -> Welcome:
        machine = Machine("2", "x", "loop", 1)
        return Welcome(1, "run", 0, 1, {}, 0, TaskDescription({}), machine, 1.0, 1.0)

    def next(self, confirmed: Sequence[int]) -> NextAnswer:
        return self.words.pop(0)

    def fetch(self, *_: Any, **__: Any) -> dict[str, Tensor]:
        return MODEL

    @contextmanager
    def working(self, ticket: int) -> Iterator[Wanted]:
        yield Wanted(self.wanted)

    def send(self, reserve: UploadRequest, tensors: Mapping[str, Tensor], wanted: Any) -> bool:
        if self.refusal is not None:
            raise self.refusal
        self.sent.append(reserve.ticket)
        return True

    def failed(self, failed: TrainingFailure) -> None:
        self.told.append(failed)


class Patient:
    """A site that trains for ten batches, and asks before each."""

    name, examples, held_out, wants = "site", 5, 0, None
    share_errors, folder, holds = False, None, False

    def __init__(self) -> None:
        self.batches = 0

    def trains(self) -> None: ...

    def machine(self) -> None: ...

    def settle(self, outcome: Any) -> None: ...

    def train(self, train: Train, tensors: Mapping[str, Tensor], wanted: Any) -> TrainedAssignment:
        for _ in range(10):
            if not wanted():
                raise NotWantedError
            self.batches += 1
        size, digest = size_of(forms_of(MODEL)), digest_of(MODEL)
        return TrainedAssignment(
            UploadRequest(train.ticket, size, digest, 5, 5, 1.0), MODEL, [torch.ones(1)]
        )


def works(*tickets: int) -> list[NextAnswer]:
    orders = [NextAnswer(train=Train(ticket, ticket, ticket, "", 0)) for ticket in tickets]
    return [*orders, NextAnswer(over="the run is over")]


@pytest.fixture
def state(tmp_path: Path) -> Iterator[ClientState]:
    with ClientState(tmp_path / "site") as state:
        yield state


def run(session: Played, site: Patient) -> list[tuple[str, Mapping[str, object]]]:
    heard: list[tuple[str, Mapping[str, object]]] = []
    loop = ClientLoop(session, site, lambda what, about: heard.append((what, about)))  # type: ignore[arg-type]
    assert loop.run() == "the run is over"
    return heard


def test_training_that_nobody_waits_for_is_left_off_and_nothing_of_it_is_sent_or_kept(
    state: ClientState,
) -> None:
    session, site = Played(state, works(3), wanted=4), Patient()
    heard = run(session, site)
    assert site.batches == 4
    assert (session.sent, session.told) == ([], [])
    assert ("not wanted", {"round": 3, "why": "the round is over"}) in heard
    assert (state.updates(), state.pending()) == ([], [])


def test_who_is_to_stop_does_so_between_two_batches(state: ClientState) -> None:
    session, site = Played(state, works(3)), Patient()
    session.stop.set()
    with pytest.raises(StoppedError):
        run(session, site)
    assert site.batches == 0


def test_an_update_that_the_server_takes_for_impossible_is_dropped_and_told(
    state: ClientState, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, site = Played(state, works(3)), Patient()
    session.refusal = RefusedError(422, "the update is of 9 examples, but its client has 5")
    monkeypatch.setattr(session.stop, "wait", lambda seconds: False)
    heard = run(session, site)
    assert [one.ticket for one in session.told] == [3]
    assert [about["error"] for what, about in heard if what == "failed"] == [
        "RefusedError: the update is of 9 examples, but its client has 5"
    ]
    # Else it would be sent again by the next process, and refused again.
    assert (state.updates(), state.pending()) == ([], [])


@pytest.mark.parametrize(("model", "batches"), [("the same", 0), ("another", 10), ("", 10)])
def test_an_update_that_is_kept_is_sent_only_if_it_is_of_the_model_that_is_meant(
    model: str, batches: int, state: ClientState
) -> None:
    # A server that was restored from a copy gives a ticket again, for another model.
    size, digest = size_of(forms_of(MODEL)), digest_of(MODEL)
    state.keep_update(UploadRequest(3, size, digest, 5, 5, 1.0), MODEL, model)
    words = [NextAnswer(train=Train(3, 3, 3, "the same", 0)), NextAnswer(over="the run is over")]
    session, site = Played(state, words), Patient()
    run(session, site)
    assert (site.batches, session.sent) == (batches, [3])
