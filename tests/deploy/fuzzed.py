"""Requests that nobody should send, and the routes of a server to which they are sent.

The server is the real one, behind its real sockets, with two clients and an assignment, but without
a run: whatever is written to its journal is seen here. Requests are valid ones in which something
was changed, and such as have nothing in common with one; signed by a client, by a stranger, or not
at all.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from hypothesis import strategies as st

from dure.deploy.clock import FederationClock
from dure.deploy.journal import Journal
from dure.deploy.server import outbox as outbox_module
from dure.deploy.server.access import AccessControl
from dure.deploy.server.app import App
from dure.deploy.server.blob_cache import BlobCache
from dure.deploy.server.outbox import ClientOutbox
from dure.deploy.server.rate_limits import RateLimits
from dure.deploy.server.register import FILE, Register
from dure.deploy.server.serving import HttpServer
from dure.deploy.server.sessions import ServedRun
from dure.deploy.updates import Updates
from dure.wire.requests import Machine, ProtocolStepBody, TaskDescription, Train
from dure.wire.signatures import NONCE, Key, Signer, digest_of
from dure.wire.tensors import digest_of as digest_of_tensors
from dure.wire.tensors import forms_of, pieces

PLACES = 4
TICKET = 7
ASKING = "asked"
SECONDS = 10.0

TENSORS = {"0.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4)}
STREAM = b"".join(bytes(piece) for piece in pieces(TENSORS))
DIGEST = digest_of_tensors(TENSORS)


class Request(NamedTuple):
    """What is sent. headers: in their order, each as it is. signed: by whom, and over what."""

    method: str
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    who: str


@dataclass
class Target:
    """A server to be sent requests, in `folder`."""

    folder: Path
    ending: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> Target:
        enter = self.ending.enter_context
        # Nobody is taken for gone meanwhile, which would be written too.
        enter(mock.patch.object(outbox_module, "GRACE", 1e9))
        clock = FederationClock()
        self.journal = Journal(self.folder, clock)
        self.ending.callback(self.journal.close)
        self.updates = Updates(self.folder / "updates")
        self.outbox = ClientOutbox(clock.now)
        self.cache = BlobCache()
        self.register = enter(Register(self.folder / FILE, PLACES))
        # No hurry and no quarantine: each request is to be looked at.
        limits = RateLimits(rate=1e9, burst=1e9, refusals=10**9)
        self.access = AccessControl(self.register, "open", limits)
        served = ServedRun(
            run="run",
            clients=PLACES,
            strategy={"name": "fed-avg"},
            seed=0,
            trains=TaskDescription({}),
            machine=Machine("2", "none", "loop", 1),
            heartbeat=0.01,
            patience=0.01,
            compare=lambda theirs, ours: ["the loss"] if theirs.loss else [],
            samples=lambda examples: 2 * examples,
        )
        self.app = App(served, self.outbox, self.cache, self.journal, self.updates, self.access)
        self.serving = HttpServer(self.app.asgi(), "127.0.0.1", 0, None, self.app.lives_in)
        self.ending.callback(self.serving.stop)
        self.outbox.open.set()
        self.cache.put(TENSORS)
        self.signers = {who: Signer(Key.make()) for who in ("client", "other", "stranger")}
        for number, who in enumerate(("client", "other")):
            said = {"version": 1, "name": who, "examples": 5, "wants": number}
            assert self.said(who, "/v1/check-in", said)[0] == 200
        self.assign()
        return self

    def __exit__(self, *error: object) -> None:
        self.ending.close()

    def assign(self) -> None:
        """The client is to train, and to answer a step of a protocol on an earlier update."""
        train = Train(TICKET, 3, 3, DIGEST, len(STREAM))
        self.outbox.assign(0, train, None, forms_of(TENSORS))
        self.outbox.ask(0, ProtocolStepBody(TICKET - 1, 2, ASKING, b"hello"), {})
        while not self.outbox.answers.empty():
            self.outbox.answers.get()

    def state(self) -> dict[str, Any]:
        """Everything that a request could change, once no other is under way."""
        until = time.monotonic() + SECONDS
        while any(session.calls for session in self.outbox.everybody()):
            assert time.monotonic() < until, "a call does not end"
            time.sleep(0.001)
        outbox = {
            number: (
                *(
                    session.name,
                    session.examples,
                    session.held_out,
                    session.available,
                    session.missing,
                ),
                *(session.train, dict(session.outcomes), session.measure, list(session.sent)),
                *(session.say, session.uploaded_answer, session.answered),
            )
            for number, session in sorted(self.outbox.sessions.items())
        }
        # What is under way and turns out to be another update is rightly dropped.
        whole = sorted(path.name for path in self.updates.folder.glob("*.safetensors"))
        return {
            "outbox": outbox,
            "journal": self.journal.last,
            "answers": self.outbox.answers.qsize(),
            "files": whole,
            "clients": self.register.clients(),
            "reserved": dict(self.app.uploads.reserved),
        }

    def sizes(self) -> dict[str, int]:
        """Of what could grow."""
        return {
            "sessions": len(self.outbox.sessions),
            "reserved": len(self.app.uploads.reserved),
            "uploads": len(self.updates._uploads),
            "kinds of refusals": len(self.access.status()["refusals"]),
        }

    def said(self, who: str, path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        """A request as it has to be; status and body of the answer."""
        content = json.dumps(body).encode()
        status, answer = 401, b""
        for _ in range(2):
            headers = self.signed(who, "POST", path, content)
            status, fresh, answer = self.send(Request("POST", path.encode(), headers, content, who))
            if status != 401:
                break
            self.renew(who, fresh)
        return status, answer

    def signed(self, who: str, method: str, path: str, body: bytes) -> list[tuple[bytes, bytes]]:
        headers = self.signers[who].sign(method, path, digest_of(body))
        return [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]

    def renew(self, who: str, headers: Mapping[str, str]) -> None:
        """Signs with the server's nonce from now on, where it is another one."""
        signer = self.signers[who]
        if headers.get(NONCE, signer._nonce) != signer._nonce:
            signer._nonce, signer._serial = headers[NONCE], 0

    def send(self, request: Request, patience: float = 1.0) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body) of the answer; status 0 where the connection was closed.

        patience: seconds for the answer to a request that may not be whole.
        """
        lines = [request.method.encode("latin-1") + b" " + request.target + b" HTTP/1.1"]
        headers = list(request.headers)
        names = {name.lower() for name, _ in headers}
        if b"host" not in names:
            headers.insert(0, (b"host", b"127.0.0.1"))
        if not names & {b"content-length", b"transfer-encoding"}:
            headers.append((b"content-length", str(len(request.body)).encode()))
        lines += [name + b": " + value for name, value in headers]
        sent = b"\r\n".join(lines) + b"\r\n\r\n" + request.body
        # Of what is not whole, nobody says more; any other answer comes.
        whole = names.isdisjoint({b"content-length", b"transfer-encoding", b"expect"})
        seconds = SECONDS if whole else patience
        with socket.create_connection(("127.0.0.1", self.serving.port), seconds) as link:
            with contextlib.suppress(ConnectionError):
                link.sendall(sent)
            with contextlib.suppress(ConnectionError, TimeoutError):
                return answer_of(link, request.method)
            assert not whole, f"no answer within {seconds} s"
            return 0, {}, b""


def answer_of(link: socket.socket, method: str) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of the next answer; status 0 where the link is closed."""
    content = b""
    # Who asked for that is first told to go on.
    while b"\r\n\r\n" not in content or content.startswith(b"HTTP/1.1 100"):
        if content.startswith(b"HTTP/1.1 100") and b"\r\n\r\n" in content:
            content = content.partition(b"\r\n\r\n")[2]
            continue
        piece = link.recv(1 << 16)
        if not piece:
            return 0, {}, b""
        content += piece
    head, _, body = content.partition(b"\r\n\r\n")
    first, *rest = head.split(b"\r\n")
    headers = dict(line.decode("latin-1").lower().split(": ", 1) for line in rest if b": " in line)
    size = 0 if method == "HEAD" else int(headers.get("content-length", 0))
    while len(body) < size and (piece := link.recv(1 << 16)):
        body += piece
    return int(first.split()[1]), headers, body


# What is sent

_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from(
        [2**31, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**300, -1, TICKET, DIGEST]
    )
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["\ud800", "\x00", "a" * 70, "\x1b[2J", "١٢", "../..", "client", "other"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)

_VALID: dict[str, tuple[str, str, dict[str, Any]]] = {
    "check-in": (
        "POST",
        "/v1/check-in",
        {
            "version": 1,
            "name": "client",
            "examples": 5,
            "held_out": 1,
            "wants": 0,
            "trains": {"forms": {"w": ["float32", [2]]}, "metrics": ["a"]},
            "machine": {"torch": "2", "capability": "x", "engine": "loop", "threads": 1},
        },
    ),
    "next": ("POST", "/v1/next", {"confirmed": [1, 2]}),
    "watch": ("POST", "/v1/watch", {"ticket": TICKET}),
    "uploads": (
        "POST",
        "/v1/uploads",
        {
            "ticket": TICKET,
            "bytes": len(STREAM),
            "digest": DIGEST,
            "examples": 5,
            "samples": 5,
            "loss": 1.0,
            "counted": 5.0,
            "failure": None,
            "seconds": 0.1,
            "metrics": {"a": 1.0},
            "asking": "",
        },
    ),
    "failures": (
        "POST",
        "/v1/failures",
        {"ticket": TICKET, "kind": "ValueError", "file": "a.py", "line": 3, "message": "m"},
    ),
    "measured": (
        "POST",
        "/v1/measured",
        {"round": 3, "values": {"a": 1.0}, "examples": {"a": 5}, "sums": {"a": [1.0]}, "forms": {}},
    ),
    "ready": ("POST", "/v1/ready", {"ticket": TICKET}),
    "answers": (
        "POST",
        "/v1/answers",
        {"ticket": TICKET - 1, "stage": 2, "asking": ASKING, "body": "aGVsbG8=", "failure": ""},
    ),
    "enrol": (
        "POST",
        "/v1/enrol",
        {"token": "t", "key": "k", "proof": "p", "name": "n", "wants": 1},
    ),
    "part": ("PATCH", f"/v1/uploads/{TICKET}", {}),
    "tensors": ("GET", f"/v1/tensors/{DIGEST}", {}),
}

_NUMBERS = st.sampled_from(
    [
        "0",
        "-1",
        "1",
        "8",
        "١٢",
        "²",
        "1e3",
        "",
        " 1",
        "9" * 19,
        "9" * 40,
        "0x10",
        "18446744073709551616",
    ]
)
_RANGES = st.sampled_from(
    [
        "bytes=0-",
        "bytes=5-3",
        "bytes=-5",
        "bytes=0-0,5-9",
        "bytes=99999999999999999999-",
        "bytes=0-99999999999999999999",
        "items=0-1",
        "bytes",
        "",
        "bytes=١-٢",
    ]
)
_LATIN = st.text(st.characters(max_codepoint=255, exclude_characters="\r\n\0"), max_size=30)


@st.composite
def bodies(draw: st.DrawFn, valid: dict[str, Any]) -> bytes:
    """A body in which something is not as it was, or none at all."""
    how = draw(st.sampled_from(["field", "field", "field", "json", "bytes", "cut", "nest"]))
    if how == "field" and valid:
        name = draw(st.sampled_from(sorted(valid)))
        return _dumps({**valid, name: draw(_JSON)})
    if how == "json":
        return _dumps(draw(_JSON))
    if how == "bytes":
        return draw(st.binary(max_size=200))
    if how == "cut":
        whole = _dumps(valid)
        return whole[: draw(st.integers(0, len(whole)))]
    if how == "nest":
        depth = draw(st.sampled_from([100, 10_000, 100_000]))
        return draw(st.sampled_from([b"[", b'{"a":', b'{"name":['])) * depth
    return _dumps(valid)


def _dumps(what: Any) -> bytes:
    return json.dumps(what).encode()


@st.composite
def targets(draw: st.DrawFn, path: str) -> bytes:
    """Where it goes."""
    how = draw(st.sampled_from(["other", "end", "query", "odd", "long"]))
    if how == "other":
        return draw(st.sampled_from([one[1] for one in _VALID.values()])).encode()
    if how == "end":
        end = draw(st.sampled_from(["/", "//", "%00", "/..", "%2f..", "%ff", "x", "?"]))
        return (path + end).encode()
    if how == "query":
        return path.encode() + b"?" + draw(_LATIN).encode("latin-1").replace(b" ", b"+")
    if how == "odd":
        odd = draw(_LATIN).encode("latin-1").replace(b" ", b"%20")
        return b"/v1/" + draw(st.sampled_from([b"uploads/", b"tensors/", b""])) + odd
    if how == "long":
        return path.encode() + b"a" * draw(st.sampled_from([1000, 70_000]))
    return path.encode()


class Plan(NamedTuple):
    """What is to be sent, but for the signature. wrong: what is wrong with that."""

    method: str
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    who: str
    wrong: str


_HEADERS: list[tuple[bytes, bytes]] = [
    (b"content-type", b"text/html"),
    (b"content-length", b"99999999999"),
    (b"content-length", b"-5"),
    (b"content-length", "\u00b2".encode()),
    (b"transfer-encoding", b"chunked"),
    (b"transfer-encoding", b"gzip"),
    (b"expect", b"100-continue"),
    (b"upgrade", b"websocket"),
    (b"host", b"[::1"),
    (b"host", b"a\xffb"),
    (b"connection", b"close"),
    (b"x", b"a" * 70_000),
    (b"accept-encoding", b"gzip"),
    (b"dure-client", b"0" * 64),
]
_METHODS = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "M-SEARCH", "x"]
_ASPECTS = ["method", "target", "headers", "body", "body", "body", "who", "signature"]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A request of which up to two things are not as they have to be."""
    method, path, valid = _VALID[draw(st.sampled_from(sorted(_VALID)))]
    odd = draw(st.sets(st.sampled_from(_ASPECTS), max_size=2))
    headers: list[tuple[bytes, bytes]] = []
    body = b"" if method == "GET" else _dumps(valid)
    if method == "PATCH":
        body, offset = STREAM, "0"
        if "body" in odd:
            body = draw(st.sampled_from([STREAM[:8], STREAM[8:], STREAM[::-1], b"", STREAM * 2]))
            offset = draw(st.sampled_from(["0", "8"]) | _NUMBERS)
        headers.append((b"upload-offset", offset.encode()))
    elif "body" in odd and method == "GET":
        headers.append((b"range", draw(_RANGES).encode()))
        if draw(st.booleans()):
            headers.append((b"if-range", draw(_LATIN).encode("latin-1")))
    elif "body" in odd:
        body = draw(bodies(valid))
    if "headers" in odd:
        plain = _LATIN.map(lambda text: (b"x-odd", text.encode("latin-1")))
        headers.append(draw(st.sampled_from(_HEADERS) | plain))
    others = ["other", "stranger", "nobody"]
    wrongs = ["signature", "replayed", "digest", "another"]
    return Plan(
        draw(st.sampled_from(_METHODS)) if "method" in odd else method,
        draw(targets(path)) if "target" in odd else path.encode(),
        headers,
        body,
        draw(st.sampled_from(others)) if "who" in odd else "client",
        draw(st.sampled_from(wrongs)) if "signature" in odd else "",
    )


def sent(target: Target, plan: Plan) -> int:
    """Sends it, as signed as it is to be; the status of the answer."""
    headers = list(plan.headers)
    status = 401
    # Again with the server's nonce, where it asks for that.
    for _ in range(2):
        signed = [] if plan.who == "nobody" else _signed(target, plan)
        request = Request(plan.method, plan.target, [*headers, *signed], plan.body, plan.who)
        status, answered, _ = target.send(request)
        if plan.wrong == "replayed":
            state = target.state()
            again, _, _ = target.send(request)
            assert again >= 300 or not signed, "what was answered once is not answered twice"
            assert target.state() == state
        if status != 401 or plan.who == "nobody" or NONCE not in answered:
            break
        target.renew(plan.who, answered)
    return status


def _signed(target: Target, plan: Plan) -> list[tuple[bytes, bytes]]:
    path = plan.target.decode("latin-1")
    body = b"another" if plan.wrong == "digest" else plan.body
    method = "TRACE" if plan.wrong == "another" else plan.method
    try:
        headers = target.signed(plan.who, method, path, body)
    except ValueError:  # what no client can sign
        return []
    if plan.wrong == "signature":
        headers = [(name, value[:-1] + b"0") for name, value in headers]
    return headers
