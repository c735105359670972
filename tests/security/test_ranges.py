"""Every number in a body has a range; a number beyond it ends in one refusal and no work."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.deploy.client.link import HttpAnswer, HttpLink, UnfitMessageError
from dure.deploy.client.session import Session
from dure.deploy.client.state import ClientState
from dure.wire.requests import (
    CheckIn,
    Enrol,
    Enrolled,
    EvaluationReport,
    EvaluationTask,
    MessageBody,
    NextAnswer,
    NextRequest,
    ProtocolAnswerBody,
    ProtocolStepBody,
    RangeError,
    RequestError,
    Train,
    TrainingFailure,
    UpdateReady,
    UploadRequest,
    UploadState,
    WatchAnswer,
    WatchRequest,
    Welcome,
    from_json,
)

TRAINS = {"forms": {"w": ["float32", [3, 2]]}, "frozen": "ab" * 32, "frozen_bytes": 8}
MACHINE = {"torch": "2.13", "capability": "AVX2", "engine": "loop", "threads": 2}
TRAIN = {"ticket": 1, "round": 2, "turn": 2, "tensors": "ab" * 32, "bytes": 99, "left": 3.5}
MEASURE = {"round": 2, "tensors": "ab" * 32, "bytes": 99}
SAY = {"ticket": 1, "stage": 2, "asking": "q", "body": "aGk=", "wants": [["int32", [7]]]}
WELCOME = {
    "version": 2,
    "run": "run-1",
    "client": 1,
    "clients": 3,
    "strategy": {"name": "fed-avg"},
    "seed": 7,
    "trains": TRAINS,
    "machine": MACHINE,
    "heartbeat": 10.0,
    "patience": 30.0,
    "smallest_cohort": 2,
}

TO_CLIENTS: list[tuple[type[MessageBody], dict[str, Any]]] = [
    (Welcome, WELCOME),
    (Train, {**TRAIN, "smallest_cohort": 2}),
    (EvaluationTask, MEASURE),
    (ProtocolStepBody, SAY),
    (
        NextAnswer,
        {
            "outcomes": [{"ticket": 5, "kept": True, "reason": "late"}],
            "train": TRAIN,
            "measure": MEASURE,
            "final": MEASURE,
            "say": SAY,
            "over": "it is over",
        },
    ),
    (WatchAnswer, {"wanted": True, "reason": "late", "over": "it is over"}),
    (UploadState, {"upload": "7", "offset": 3, "part": 9, "complete": True}),
    (Enrolled, {"client": 1, "clients": 3, "name": "ward"}),
]
TO_SERVER: list[tuple[type[MessageBody], dict[str, Any]]] = [
    (
        CheckIn,
        {
            "version": 2,
            "name": "ward",
            "examples": 5,
            "held_out": 2,
            "wants": 1,
            "trains": TRAINS,
            "machine": MACHINE,
            "looks": True,
            "smallest_cohort": 3,
        },
    ),
    (NextRequest, {"confirmed": [1, 2]}),
    (WatchRequest, {"ticket": 1}),
    (
        UploadRequest,
        {
            "ticket": 1,
            "bytes": 99,
            "digest": "ab" * 32,
            "examples": 5,
            "samples": 10,
            "loss": 0.5,
            "counted": 10.0,
            "seconds": 1.5,
            "steps": 2,
        },
    ),
    (TrainingFailure, {"ticket": 1, "kind": "ValueError", "line": 7}),
    (EvaluationReport, {"round": 2, "examples": {"loss": 5}}),
    (UpdateReady, {"ticket": 1}),
    (ProtocolAnswerBody, {"ticket": 1, "stage": 2, "asking": "q"}),
    (Enrol, {"token": "t", "key": "k", "proof": "p", "wants": 1}),
]

BEYOND = [-(10**9), -(1 << 63), (1 << 53) + 1, (1 << 63) - 1, 1 << 64, 10**400]
"""Whole numbers that no field takes, but for a seed, and what is compared with a size later."""

NOT_A_NUMBER = ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", '"7"', "null", "[]", "{}"]
LATER = {(UploadState, "offset"), (UploadState, "part")}
"""Compared with the size of the update by whoever sends it (`test_transfer`)."""


def numbers(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all numbers in a body, but for those of a strategy, which are its own."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            if name != "strategy":
                yield from numbers(value, (*at, name))
    elif isinstance(tree, list):
        for place, value in enumerate(tree):
            yield from numbers(value, (*at, place))
    elif isinstance(tree, (int, float)) and not isinstance(tree, bool):
        yield at


def changed(body: dict[str, Any], at: tuple[Any, ...], literal: str) -> bytes:
    """The body with something else in one place, as it stands in JSON."""
    copy = json.loads(json.dumps(body))
    inner = copy
    for step in at[:-1]:
        inner = inner[step]
    inner[at[-1]] = "HERE"
    return json.dumps(copy).replace('"HERE"', literal).encode()


PLACES = [
    pytest.param(kind, body, at, id=f"{kind.__name__} {'.'.join(map(str, at))}")
    for kind, body in [*TO_CLIENTS, *TO_SERVER]
    for at in numbers(body)
    if (kind, at[-1]) not in LATER
]


@pytest.mark.parametrize(("kind", "body"), [*TO_CLIENTS, *TO_SERVER])
def test_the_bodies_that_these_tests_change_are_good(kind: type[MessageBody], body: Any) -> None:
    from_json(json.dumps(body).encode(), kind)


@pytest.mark.parametrize(("kind", "body", "at"), PLACES)
def test_a_number_beyond_its_range_is_refused(kind: type[MessageBody], body: Any, at: Any) -> None:
    whole = [one for one in BEYOND if at[-1] != "seed" or abs(one) >= 1 << 63]
    real = ["1e13", "-1e13"] if at[-1] in ("heartbeat", "patience", "left") else []
    wide = ("loss", "counted", "seconds")
    for literal in [*(map(str, whole) if at[-1] not in wide else []), *real, *NOT_A_NUMBER]:
        if literal == "null" and at[-1] in ("left", "wants", "counted"):
            continue
        # 2^63 - 1 is a seed.
        if at[-1] == "seed" and literal in (str((1 << 63) - 1), str(-(1 << 63))):
            continue
        with pytest.raises(RequestError) as raised:
            from_json(changed(body, at, literal), kind)
        assert "\n" not in str(raised.value)


@given(st.text(min_size=1, max_size=80))
def test_a_digest_is_a_digest(text: str) -> None:
    if len(text) == 64 and set(text) <= set("0123456789abcdef"):
        return
    for kind, body in ((Train, TRAIN), (EvaluationTask, MEASURE)):
        with pytest.raises(RequestError, match="tensors"):
            from_json(json.dumps({**body, "tensors": text}).encode(), kind)


@pytest.mark.parametrize("run", ["", "..", "a/b", "/etc", "a\n", "a" * 101, "a\0"])
def test_the_name_of_a_run_is_a_part_of_the_name_of_a_file(run: str) -> None:
    with pytest.raises(RangeError, match="run"):
        from_json(json.dumps({**WELCOME, "run": run}).encode(), Welcome)


def test_tensors_of_more_elements_than_there_are_bytes_are_none() -> None:
    forms = {"w": ["float32", [1 << 30, 1 << 30]]}
    with pytest.raises(RangeError, match=r"2\^53"):
        from_json(json.dumps({**WELCOME, "trains": {"forms": forms}}).encode(), Welcome)
    with pytest.raises(RangeError, match=r"2\^53"):
        from_json(
            json.dumps({**SAY, "wants": [["int32", [1 << 30, 1 << 30]]]}).encode(), ProtocolStepBody
        )


@contextmanager
def hearing(*bodies: bytes) -> Iterator[tuple[Session, list[str]]]:
    """A session whose server answers this, one after another, and what it was asked."""
    asked: list[str] = []
    left = list(bodies)
    with ClientState(None) as state:
        session = Session(
            "http://127.0.0.1:1", context=None, state=state, audit=None, stop=threading.Event()
        )
        link: HttpLink = session._link
        # A server that was right once: pages of others would be waited for.
        link.known = True

        def request(method: str, path: str, *_: Any, **__: Any) -> HttpAnswer:
            asked.append(path)
            return HttpAnswer(200, {}, left.pop(0))

        link.request = request  # type: ignore[method-assign]
        try:
            yield session, asked
        finally:
            session.close()


ASKS = {
    Welcome: lambda session: session.check_in(CheckIn(2, "ward", 0)),
    NextAnswer: lambda session: session.next([]),
    Enrolled: lambda session: session.enrol("token", "ward", None),
}


@pytest.mark.parametrize(("kind", "body", "at"), [one for one in PLACES if one.values[0] in ASKS])
def test_a_client_asks_once_and_does_nothing(kind: type[MessageBody], body: Any, at: Any) -> None:
    # Any other answer would be asked for: there is none.
    with (
        hearing(changed(body, at, "-1000000000000000000000")) as (session, asked),
        pytest.raises(UnfitMessageError) as raised,
    ):
        ASKS[kind](session)
    assert len(asked) == 1
    assert str(at[-1]) in str(raised.value) or str(at[-2]) in str(raised.value)


@pytest.mark.parametrize("body", [{**WELCOME, "client": 3}, {**WELCOME, "client": 1 << 19}])
def test_the_number_of_a_client_is_below_the_number_of_clients(body: Any) -> None:
    with (
        hearing(json.dumps(body).encode()) as (session, _),
        pytest.raises(UnfitMessageError, match=": the run has 3 clients"),
    ):
        session.check_in(CheckIn(2, "ward", 0))
    enrolled = {"client": 3, "clients": 3, "name": ""}
    with (
        hearing(json.dumps(enrolled).encode()) as (session, _),
        pytest.raises(UnfitMessageError, match=": the run has 3 clients"),
    ):
        session.enrol("token", "ward", None)
