"""Waiting ends: a server that is gone is given up, and one that had said so need not be there."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from faulty_server import Request, serving

from dure.deploy.client import session as module
from dure.deploy.client.session import GaveUpError, Session
from dure.deploy.client.state import ClientState, FolderOwner
from dure.wire.requests import EvaluationReport, NextAnswer, UploadRequest, WatchAnswer, to_json
from dure.wire.tensors import digest_of, forms_of, size_of

MODEL = {"w": torch.arange(3.0)}


@contextmanager
def talking(url: str, state: ClientState, give_up: float | None = 0.4) -> Iterator[Session]:
    stop = threading.Event()
    made = Session(url, context=None, state=state, audit=None, stop=stop, give_up=give_up)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def nobody() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def reserve() -> UploadRequest:
    return UploadRequest(3, size_of(forms_of(MODEL)), digest_of(MODEL), 5, 5, 1.0)


CALLS: list[Callable[[Session], object]] = [
    lambda session: session.next([]),
    lambda session: session.measured(EvaluationReport(1)),
    lambda session: session.fetch(1, "0" * 64, 100),
    lambda session: session.send(reserve(), MODEL, lambda: True),
]


@pytest.mark.parametrize("call", CALLS, ids=["next", "measured", "fetch", "send"])
def test_a_server_that_is_gone_is_given_up_whatever_was_to_be_done(
    call: Callable[[Session], object], nobody: str
) -> None:
    with (
        ClientState(None) as state,
        talking(nobody, state) as session,
        pytest.raises(GaveUpError, match=rf"{nobody} was not reached for 0\.4 s: .*refuses"),
    ):
        call(session)


def test_what_is_kept_is_named(nobody: str, tmp_path: Path) -> None:
    with ClientState(tmp_path / "site") as state:
        state.keep_model(12, MODEL)
        state.keep_update(reserve(), MODEL)
        with talking(nobody, state) as session, pytest.raises(GaveUpError) as gave_up:
            session.next([])
    said = str(gave_up.value)
    assert f"kept in {tmp_path / 'site'}: the model of round 12, and 1 update" in said


def test_a_server_that_answers_now_and_then_is_not_given_up() -> None:
    answered = 0

    def answer(request: Request) -> None:
        nonlocal answered
        request.body()
        answered += 1
        if answered % 2:
            request.reply(503)
        else:
            request.reply(body=to_json(NextAnswer()))

    with (
        serving(answer) as server,
        ClientState(None) as state,
        talking(server.url, state, give_up=2.0) as session,
    ):
        began = time.monotonic()
        while time.monotonic() - began < 3.0:
            session.next([])


def test_who_has_heard_the_end_at_work_needs_no_server_to_say_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "QUICK", 0.0)
    monkeypatch.setattr(module, "LAST", 0.3)

    def answer(request: Request) -> None:
        request.body()
        request.reply(body=to_json(WatchAnswer(False, "the run is over", "the run is over")))

    with (
        serving(answer) as server,
        ClientState(None) as state,
        talking(server.url, state, give_up=None) as session,
    ):
        with session.working(3) as wanted:
            until = time.monotonic() + 20
            while wanted() and time.monotonic() < until:
                time.sleep(0.01)
        assert wanted.reason == "the run is over"
        server.shutdown()
        server.socket.close()
        assert session.next([]).over == "the run is over"


def test_a_server_that_a_folder_belongs_to_is_known_from_the_beginning(
    tmp_path: Path, nobody: str
) -> None:
    with ClientState(tmp_path / "site") as state:
        with talking(nobody, state) as session:
            assert not session.another_link().known
        state.enter(FolderOwner(nobody, "run", 0, "site"))
        with talking(nobody, state) as session:
            assert session.another_link().known
