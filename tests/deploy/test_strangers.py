"""Strangers who open connections and waste them: closed in time, and nobody else waits for them."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fuzzed import DIGEST, STREAM, Request, Target

from dure.deploy.server import serving
from dure.deploy.server.serving import HttpServer
from dure.deploy.server.uploads import PART
from dure.errors import ServeError
from dure.wire.certificates import issue_server, make_authority, server_context

SECONDS = 15.0
"""Until which the server has closed what it closes after one, on a busy machine."""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    monkeypatch.setattr(serving, "HEADER_SECONDS", 1.0)
    monkeypatch.setattr(serving, "SILENT_SECONDS", 1)
    with Target(tmp_path) as served:
        yield served


def link_to(target: Target) -> socket.socket:
    return socket.create_connection(("127.0.0.1", target.serving.port), SECONDS)


def is_closed(link: socket.socket) -> bool:
    """Whether the server closes it, within the time that there is."""
    try:
        while link.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def answers(target: Target) -> bool:
    """Whether the server still answers a client."""
    return target.said("client", "/v1/watch", {"ticket": 7})[0] == 200


def test_a_header_that_never_ends(target: Target) -> None:
    with link_to(target) as link:
        until = time.monotonic() + SECONDS
        link.sendall(b"GET / HTTP/1.1\r\n")
        closed = False
        while not closed and time.monotonic() < until:
            time.sleep(0.1)
            try:
                # A line more, again and again: each of them would begin the time anew.
                link.sendall(b"a: b\r\n")
            except ConnectionError:
                closed = True
        assert closed
    assert answers(target)


def test_a_body_that_never_comes(target: Target) -> None:
    headers = target.signed("client", "POST", "/v1/next", b"{}")
    with link_to(target) as link:
        lines = [b"POST /v1/next HTTP/1.1", b"host: a", b"content-length: 100"]
        lines += [name + b": " + value for name, value in headers]
        link.sendall(b"\r\n".join(lines) + b"\r\n\r\n")
        assert is_closed(link)
    assert answers(target)


def test_hundreds_who_say_nothing(target: Target) -> None:
    with contextlib.ExitStack() as ending:
        links = [ending.enter_context(link_to(target)) for _ in range(500)]
        assert answers(target)
        assert all(map(is_closed, links))
    assert answers(target)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_long(chunked: bool, target: Target) -> None:
    path, body = "/v1/uploads/7", b"a" * (PART + 1)
    reserve = {
        "ticket": 7,
        "bytes": len(STREAM),
        "digest": DIGEST,
        "examples": 5,
        "samples": 5,
        "loss": 1.0,
    }
    assert target.said("client", "/v1/uploads", reserve)[0] == 200
    headers = target.signed("client", "PATCH", path, body)
    headers.append((b"upload-offset", b"0"))
    if chunked:
        headers.append((b"transfer-encoding", b"chunked"))
        body = b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
    else:
        headers.append((b"content-length", str(len(body)).encode()))
    status, _, _ = target.send(Request("PATCH", path.encode(), headers, body, "client"), SECONDS)
    # Of what is not said beforehand, no more is taken than the update may have.
    assert status == (400 if chunked else 413)
    assert answers(target)


async def never_called(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("nobody has come so far as to ask")


def test_those_who_do_not_even_begin_with_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "HEADER_SECONDS", 1.0)
    make_authority(tmp_path)
    context = server_context(*issue_server(tmp_path))
    served = HttpServer(never_called, "127.0.0.1", 0, context)
    try:
        with socket.create_connection(("127.0.0.1", served.port), SECONDS) as silent:
            assert is_closed(silent)
        with socket.create_connection(("127.0.0.1", served.port), SECONDS) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert is_closed(plain)
    finally:
        served.stop()


def test_a_port_is_taken(target: Target) -> None:
    with pytest.raises(ServeError, match="in use"):
        HttpServer(target.app.asgi(), "127.0.0.1", target.serving.port, None)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/next/"),
        ("POST", "/v1/x/"),
        ("GET", "/v1/x"),
        ("GET", "/"),
        ("GET", "/v1/next"),
        ("DELETE", "/v1/tensors/x"),
        ("POST", "/v1/uploads/7/8"),
        ("OPTIONS", "/v1/uploads"),
    ],
)
def test_what_is_no_route_is_told_to_those_alone_who_may_ask(
    method: str, path: str, target: Target
) -> None:
    def status(who: str) -> int:
        headers = [] if who == "nobody" else target.signed(who, method, path, b"")
        answered, fresh, _ = target.send(Request(method, path.encode(), headers, b"", who))
        if answered == 401 and who != "nobody":
            target.renew(who, fresh)
            headers = target.signed(who, method, path, b"")
            answered, _, _ = target.send(Request(method, path.encode(), headers, b"", who))
        return answered

    assert (status("nobody"), status("stranger"), status("client")) == (401, 403, 404)
