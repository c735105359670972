"""Whoever alters a client's requests on the way, or repeats them, does not have it shut out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.deploy.server.access import AccessControl
from dure.deploy.server.rate_limits import RateLimits

sys.path.insert(0, str(Path(__file__).parents[1] / "worlds" / "network"))
from fuzzed import DIGEST, STREAM, TICKET, Request, Target

MANY = 3 * RateLimits().refusals

RESERVE = {
    "ticket": TICKET,
    "bytes": len(STREAM),
    "digest": DIGEST,
    "examples": 5,
    "samples": 5,
    "loss": 1.0,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with Target(tmp_path_factory.mktemp("altered")) as served:
        yield served


@pytest.fixture(autouse=True)
def strict(target: Target) -> None:
    """As served by default: with a quarantine after 20 refusals, which nobody has had yet."""
    fresh = AccessControl(target.register, "open")
    target.access._conducts = fresh._conducts
    target.access._addresses = fresh._addresses


def sent(target: Target, request: Request) -> int:
    """The status of the answer to a request that is signed, and then altered."""
    status = 401
    for _ in range(2):
        path = request.target.decode()
        signed = target.signed(request.who, request.method, path, request.body)
        altered = request._replace(headers=[*signed, *request.headers])
        status, fresh, _ = target.send(altered)
        if status != 401:
            break
        target.renew(request.who, fresh)
    return status


def in_quarantine(target: Target) -> dict[int, float]:
    return target.access._conducts.in_quarantine()


def send_altered_body(target: Target, path: str, body: bytes, other: bytes) -> int:
    """Signed over one body, sent with another."""
    status = 401
    for _ in range(2):
        headers = target.signed("client", "POST", path, body)
        status, fresh, _ = target.send(Request("POST", path.encode(), headers, other, "client"))
        if status != 401:
            break
        target.renew("client", fresh)
    return status


@settings(max_examples=10)
@given(
    path=st.sampled_from(["/v1/check-in", "/v1/next", "/v1/watch", "/v1/uploads", "/v1/answers"]),
    other=st.binary(max_size=60),
)
def test_altered_bodies_shut_out_no_client(path: str, other: bytes, target: Target) -> None:
    for _ in range(MANY):
        assert send_altered_body(target, path, b"{}", b"!" + other) in (400, 429)
    assert not in_quarantine(target)
    assert target.said("client", "/v1/watch", {"ticket": TICKET})[0] == 200


def test_altered_headers_of_a_download_shut_out_no_client(target: Target) -> None:
    path = f"/v1/tensors/{DIGEST}".encode()
    for _ in range(MANY):
        request = Request("GET", path, [(b"range", b"bytes=x")], b"", "client")
        assert sent(target, request) in (400, 429)
    assert not in_quarantine(target)


@pytest.mark.parametrize("offset", [b"8", b"99999", b"-1", b"x"])
def test_altered_parts_shut_out_no_client(offset: bytes, target: Target) -> None:
    target.assign()
    assert target.said("client", "/v1/uploads", RESERVE)[0] == 200
    path = f"/v1/uploads/{TICKET}".encode()
    for _ in range(MANY):
        request = Request("PATCH", path, [(b"upload-offset", offset)], STREAM[:8], "client")
        assert sent(target, request) >= 400
    assert not in_quarantine(target)


def test_altered_bytes_of_a_signed_part_shut_out_no_client(target: Target) -> None:
    target.assign()
    assert target.said("client", "/v1/uploads", RESERVE)[0] == 200
    path = f"/v1/uploads/{TICKET}?offset=0"
    for _ in range(MANY):
        headers = target.signed("client", "PATCH", path, STREAM)
        altered = STREAM[:-1] + b"!"
        target.send(Request("PATCH", path.encode(), headers, altered, "client"))
    assert not in_quarantine(target)


def test_a_signed_offset_is_taken_and_not_the_header(target: Target) -> None:
    target.assign()
    assert target.said("client", "/v1/uploads", RESERVE)[0] == 200
    for at in range(0, len(STREAM), 64):
        path = f"/v1/uploads/{TICKET}?offset={at}".encode()
        part = STREAM[at : at + 64]
        request = Request("PATCH", path, [(b"upload-offset", b"3")], part, "client")
        assert sent(target, request) == 200
    assert target.updates.all() == [TICKET]


def test_a_signed_range_is_taken_and_not_the_header(target: Target) -> None:
    path = f"/v1/tensors/{DIGEST}?from=8"
    for _ in range(2):
        headers = target.signed("client", "GET", path, b"")
        headers.append((b"range", b"bytes=20-30"))
        status, fresh, body = target.send(Request("GET", path.encode(), headers, b"", "client"))
        if status != 401:
            break
        target.renew("client", fresh)
    assert (status, body) == (206, STREAM[8:])


def test_what_a_client_has_signed_counts_against_it(target: Target) -> None:
    for _ in range(MANY):
        target.said("client", "/v1/watch", {"ticket": "not a number"})
    assert 0 in in_quarantine(target)
