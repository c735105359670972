"""What a server takes of clients that hold their updates, and what it refuses."""

from __future__ import annotations

import base64
import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzed import DIGEST, STREAM, TICKET, Request, Target
from msgspec.structs import replace

from dure.wire.requests import MOST_STEP_BYTES, ProtocolAnswerBody, ProtocolStepBody, Train
from dure.wire.tensors import digest_of, forms_of, pieces

VECTOR = {"0": torch.arange(6, dtype=torch.int32)}
VECTOR_STREAM = b"".join(bytes(piece) for piece in pieces(VECTOR))
ASKED = ProtocolStepBody(TICKET, 2, "asked now", b"the list of survivors", [("int32", [6])])
ANSWER = {"ticket": TICKET, "stage": 2, "asking": "asked now", "body": "c2hhcmVz"}
UPDATE = {
    "ticket": TICKET,
    "bytes": len(STREAM),
    "digest": DIGEST,
    "examples": 5,
    "samples": 5,
    "loss": 1.0,
}
TENSORS = {
    "ticket": TICKET,
    "bytes": len(VECTOR_STREAM),
    "digest": digest_of(VECTOR),
    "examples": 0,
    "samples": 0,
    "loss": 0.0,
    "asking": "asked now",
}


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    with Target(tmp_path) as served:
        served.outbox.ask(0, None, {})
        yield served


def holds(target: Target) -> None:
    train = Train(TICKET, 3, 3, DIGEST, len(STREAM), holds=True)
    target.outbox.assign(0, train, None, {})


def asks(target: Target, wants: bool = False, **other: Any) -> None:
    """The client is asked, and its update is there."""
    target.outbox.done(0, TICKET)
    said = replace(ASKED, **other)
    forms = forms_of(VECTOR) if wants else {}
    target.outbox.ask(0, said if wants else replace(said, wants=[]), forms)


def said(target: Target, path: str, body: dict[str, Any]) -> tuple[int, str]:
    status, answer = target.said("client", f"/v1/{path}", body)
    return status, answer.decode()


def send(target: Target, stream: bytes = VECTOR_STREAM) -> int:
    path = f"/v1/uploads/{TICKET}"
    headers = target.signed("client", "PATCH", path, stream)
    headers.append((b"upload-offset", b"0"))
    return target.send(Request("PATCH", path.encode(), headers, stream, "client"))[0]


def heard(target: Target) -> list[ProtocolAnswerBody]:
    found = []
    while True:
        try:
            found.append(target.outbox.answers.get_nowait().said)
        except queue.Empty:
            return found


def rows(target: Target) -> list[tuple[str, bytes]]:
    events = iter(lambda: target.journal.next(0.0), None)
    return [(event.kind, event.body) for event in events if event.kind != "check_in"]


def test_that_an_update_is_ready_is_written_once_and_nothing_else_of_it(target: Target) -> None:
    holds(target)
    for _ in range(3):
        assert said(target, "ready", {"ticket": TICKET, "examples": 99})[0] == 204
    [(kind, body)] = rows(target)
    told = json.loads(body)
    assert (kind, told["ticket"], told["examples"], told["bytes"]) == ("update", TICKET, 0, 0)
    assert "99" not in body.decode()
    assert said(target, "ready", {"ticket": TICKET + 1})[0] == 410


def test_an_update_that_is_to_stay_is_not_taken_bare_and_one_that_is_sent_not_as_ready(
    target: Target,
) -> None:
    status, why = said(target, "ready", {"ticket": TICKET})
    assert (status, "send their updates" in why) == (422, True)
    holds(target)
    before = target.state()
    status, why = said(target, "uploads", UPDATE)
    assert (status, "stay with their clients" in why) == (422, True)
    # Also one that says that it has failed, and why.
    assert said(target, "uploads", {**UPDATE, "failure": "its first loss is not finite"})[0] == 422
    assert target.state() == before


@pytest.mark.parametrize(
    ("other", "status"),
    [
        ({"ticket": TICKET + 1}, 410),
        ({"asking": "asked before a restart"}, 410),
        ({"asking": ""}, 410),
        ({"stage": 1}, 422),
        ({"stage": -1}, 400),
        ({"body": "no base64!"}, 400),
        ({"body": [1]}, 400),
        ({"body": base64.b64encode(bytes(MOST_STEP_BYTES + 1)).decode()}, 400),
        ({"body": "A" * (1 << 20)}, 413),
    ],
)
def test_what_answers_something_else_is_refused_and_changes_nothing(
    other: dict[str, Any], status: int, target: Target
) -> None:
    asks(target)
    before = target.state()
    assert said(target, "answers", {**ANSWER, **other})[0] == status
    assert target.state() == before
    assert said(target, "answers", ANSWER)[0] == 204


def test_whoever_was_not_asked_cannot_answer(target: Target) -> None:
    asks(target)
    before = target.state()
    assert target.said("other", "/v1/answers", ANSWER)[0] == 410
    assert target.state() == before


def test_an_answer_that_comes_twice_is_heard_once_and_another_one_is_refused(
    target: Target,
) -> None:
    asks(target)
    for _ in range(3):
        assert said(target, "answers", ANSWER)[0] == 204
    assert said(target, "answers", {**ANSWER, "body": "b3RoZXI="})[0] == 410
    [answer] = heard(target)
    assert answer.body == base64.b64decode(ANSWER["body"])  # type: ignore[arg-type]
    assert rows(target) == []


def test_a_client_that_leaves_says_of_which_kind_its_error_was(target: Target) -> None:
    asks(target, wants=True)
    left = {**ANSWER, "body": None, "failure": "Arithmetic\x1b[2JError" + "x" * 10_000}
    assert said(target, "answers", left)[0] == 204
    [answer] = heard(target)
    assert answer.body is None
    assert answer.failure.startswith("Arithmetic [2JError")
    assert len(answer.failure) == 100


def test_tensors_come_before_their_answer_and_are_written_to_no_journal(target: Target) -> None:
    asks(target, wants=True)
    status, why = said(target, "answers", ANSWER)
    assert (status, "before it" in why) == (422, True)
    assert said(target, "uploads", {**TENSORS, "bytes": 2})[0] == 400
    assert said(target, "uploads", {**TENSORS, "asking": "another"})[0] == 410
    assert said(target, "uploads", TENSORS)[0] == 200
    assert said(target, "answers", ANSWER)[0] == 422, "they have not come"
    assert send(target, VECTOR_STREAM[:-1] + b"x") == 400
    assert send(target) == 200
    assert '"complete":true' in said(target, "uploads", TENSORS)[1]
    assert said(target, "answers", ANSWER)[0] == 204
    # Whoever has not heard that says both again.
    assert '"complete":true' in said(target, "uploads", TENSORS)[1]
    assert said(target, "answers", ANSWER)[0] == 204
    assert len(heard(target)) == 1
    assert rows(target) == []


def test_no_tensors_are_taken_that_nobody_has_asked_for(target: Target) -> None:
    asks(target)
    before = target.state()
    assert said(target, "uploads", TENSORS)[0] == 400
    target.outbox.ask(0, None, {})
    assert said(target, "uploads", TENSORS)[0] == 410
    assert target.state() == {**before, "outbox": target.state()["outbox"]}


def test_tensors_of_an_earlier_question_are_not_those_of_a_later_one(target: Target) -> None:
    asks(target, wants=True)
    assert said(target, "uploads", TENSORS)[0] == 200
    assert send(target) == 200
    asks(target, wants=True, asking="asked anew")
    anew = {"asking": "asked anew"}
    assert said(target, "answers", ANSWER)[0] == 410
    assert said(target, "answers", {**ANSWER, **anew})[0] == 422
    assert said(target, "uploads", {**TENSORS, **anew})[0] == 200
    assert said(target, "answers", {**ANSWER, **anew})[0] == 204


def test_how_many_examples_a_client_has_is_nowhere_where_updates_stay(target: Target) -> None:
    target.app.served.holds = True
    about = {"name": "other", "examples": 77, "held_out": 33, "wants": 1}
    status, why = target.said("other", "/v1/check-in", {**about, "version": 1})
    assert (status, b"stay with their clients" in why) == (400, True)
    assert target.said("other", "/v1/check-in", {**about, "version": 2})[0] == 200
    body = list(iter(lambda: target.journal.next(0.0), None))[-1].body
    assert (json.loads(body)["examples"], json.loads(body)["held_out"]) == (1, 0)
    assert target.outbox.session(1).examples == 1
