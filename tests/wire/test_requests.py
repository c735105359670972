"""What servers and clients say to each other stays readable by the version before and after.

`version_1.json` has bodies of version 1 as they were sent: for each kind one with every field, and
one with those alone that have to be there. A test here that fails means that clients in the field
can no longer speak with the server: give a new field a default, and leave the old ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dure.wire import requests
from dure.wire.requests import MOST_BODY, MessageBody, RequestError, from_json, to_json

BODIES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "version_1.json").read_text()
)
RENAMED = {
    "Trains": "TaskDescription",
    "Outcome": "UpdateOutcome",
    "MeasureThis": "EvaluationTask",
    "SayThis": "ProtocolStepBody",
    "Word": "NextAnswer",
    "Ready": "NextRequest",
    "Watch": "WatchRequest",
    "Watched": "WatchAnswer",
    "Reserve": "UploadRequest",
    "Reserved": "UploadState",
    "Failed": "TrainingFailure",
    "MeasuredThis": "EvaluationReport",
    "Holds": "UpdateReady",
    "AnswerTo": "ProtocolAnswerBody",
}
"""Classes of today, by the names that they had when `version_1.json` was written."""

KINDS: dict[str, type[MessageBody]] = {
    name: kind
    for name, kind in vars(requests).items()
    if isinstance(kind, type) and issubclass(kind, MessageBody) and kind is not MessageBody
}
KINDS |= {name: KINDS.pop(today) for name, today in RENAMED.items()}


def test_a_server_answers_clients_of_the_version_before() -> None:
    assert requests.VERSION in (1, 2), "bodies of version 1 need not be readable any more"
    assert set(BODIES) <= set(KINDS)
    assert requests.VERSION > 1 or set(BODIES) == set(KINDS)


@pytest.mark.parametrize("name", BODIES)
def test_bodies_of_version_1_are_read(name: str) -> None:
    kind = KINDS[name]
    for body in (BODIES[name]["whole"], BODIES[name]["least"]):
        read = from_json(json.dumps(body).encode(), kind)
        said = json.loads(to_json(read))
        assert {field: said[field] for field in body} == body
        # What is not said has its default.
        left_out = [field for field in msgspec.structs.fields(kind) if field.name not in body]
        for field in left_out:
            assert not field.required, field.name
            default = getattr(read, field.name)
            assert default in (field.default, []) or default == {}, field.name


@pytest.mark.parametrize("name", BODIES)
def test_every_field_of_version_1_is_still_said(name: str) -> None:
    """An old client, or server, needs it."""
    body = BODIES[name]["whole"]
    said = json.loads(to_json(from_json(json.dumps(body).encode(), KINDS[name])))
    assert said == body


@pytest.mark.parametrize("name", BODIES)
def test_the_least_is_what_has_to_be_there(name: str) -> None:
    least = BODIES[name]["least"]
    for field in least:
        with pytest.raises(RequestError, match=field):
            from_json(
                json.dumps({k: v for k, v in least.items() if k != field}).encode(), KINDS[name]
            )


@pytest.mark.parametrize("name", BODIES)
def test_fields_of_a_later_version_are_ignored(name: str) -> None:
    body = BODIES[name]["whole"]
    later = json.dumps({**body, "later": {"much": [1, None, "more"]}}).encode()
    assert from_json(later, KINDS[name]) == from_json(json.dumps(body).encode(), KINDS[name])


def test_numbers_that_are_not_finite_are_no_numbers() -> None:
    said = requests.UploadRequest(1, 2, "d", 3, 4, loss=float("nan"))
    assert json.loads(to_json(said))["loss"] is None
    with pytest.raises(RequestError, match="loss"):
        from_json(to_json(said), requests.UploadRequest)


def test_a_body_has_a_size() -> None:
    with pytest.raises(RequestError, match="may have"):
        from_json(b" " * (MOST_BODY + 1), requests.NextRequest)
