"""Operator's view of a server: /status as JSON, /metrics for Prometheus, and /health.

The routes have a separate listener, which clients need not reach, and a separate random token,
which `RUN/status.token` stores readable by its owner only. The operator sends `Authorization:
Bearer TOKEN`. Credentials of clients are not accepted here. /health needs no token, and reports
only whether the server can serve.

    200   it can                    401   the token is missing or wrong
    503   it is starting, or its journal cannot be written any more

The path / has the live page of the run (`dure.contracts.page`), with a form for the same token. The
page's cookie gives access to the page only.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import stat
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from dure.contracts.page import MOST_BODY, PACE, EventStream, Page
from dure.deploy.clock import FederationClock
from dure.deploy.journal import Journal
from dure.deploy.server.access import AccessControl, RequestRefused
from dure.deploy.server.client_requests import target_of
from dure.deploy.server.log_lines import as_json
from dure.deploy.server.outbox import ClientOutbox, ClientSession
from dure.deploy.server.server_metrics import ServerMetrics
from dure.record.disk import disk_errors, sync_folder
from dure.record.untrusted_files import opened

TOKEN = "status.token"
"""Name of the file in a run folder."""

_MOST_TOKEN = 4096
"""Maximum bytes of the file; a token has 64 digits."""


@dataclass
class Status:
    """Status of a server and its routes. `about` has constant facts on the run."""

    about: Mapping[str, Any]
    server_metrics: ServerMetrics
    outbox: ClientOutbox
    access: AccessControl
    journal: Journal
    clock: FederationClock
    differs: Callable[[ClientSession], list[str]]
    token: str
    page: Page | None = None
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.server_metrics.registry.register(_Now(self))

    def asgi(self) -> Starlette:
        """Return the application, for a separate listener."""
        return Starlette(
            routes=[
                Route("/health", self.health, methods=["GET"]),
                Route("/status", self._known(self.status), methods=["GET"]),
                Route("/metrics", self._known(self.metrics), methods=["GET"]),
                Route("/{rest:path}", self.show, methods=["GET", "POST"]),
            ]
        )

    async def show(self, request: Request) -> Response:
        """Answer a request for the live page and its parts."""
        if self.page is None:
            return _json({"error": "there is no page here: pip install 'dure[report]'"}, 404)
        body = b""
        try:
            async for piece in request.stream():
                body += piece
                if len(body) > MOST_BODY:
                    return Response(status_code=413, headers={"connection": "close"})
        except ClientDisconnect:
            return Response(status_code=400)
        asked = (request.method, target_of(request), dict(request.headers), body)
        try:
            # In a thread, since the page reads files.
            answer = await run_in_threadpool(self.page.answer, *asked)
        except Exception:
            self.server_metrics.mistake(f"{request.method} {request.scope['path']}")
            return _json({"error": "the server has made a mistake; its log says where"}, 500)
        headers = dict(answer.headers)
        if answer.stream is not None:
            return StreamingResponse(_due(answer.stream), answer.status, headers)
        return Response(answer.body, answer.status, headers)

    def _known(self, answer: Callable[[], Response]) -> Callable[[Request], Any]:
        """Return an endpoint that checks the token."""

        # Not a coroutine: Starlette runs it in a thread, so that a slow answer delays no other.
        def endpoint(request: Request) -> Response:
            kind, _, token = request.headers.get("authorization", "").partition(" ")
            given = token.strip().encode(errors="replace")
            if kind.lower() != "bearer" or not secrets.compare_digest(given, self.token.encode()):
                why = f"this request needs the token in {TOKEN}: Authorization: Bearer TOKEN"
                return _json({"error": why}, 401, {"www-authenticate": "Bearer"})
            try:
                return answer()
            except Exception:
                self.server_metrics.mistake(f"GET {request.scope['path']}")
                return _json({"error": "the server has made a mistake; its log says where"}, 500)

        return endpoint

    def health(self, request: Request) -> Response:
        """Report whether the server can serve."""
        state = self.state
        return _json({"status": state}, 200 if state not in ("starting", "broken") else 503)

    def status(self) -> Response:
        return _json(self.look())

    def metrics(self) -> Response:
        return Response(
            generate_latest(self.server_metrics.registry), media_type=CONTENT_TYPE_LATEST
        )

    @property
    def state(self) -> str:
        """State of the server: starting, broken, waiting (for first clients), training, or over."""
        if self.journal.broken is not None:
            return "broken"
        if not self.outbox.open.is_set():
            return "starting"
        if self.outbox.over is not None:
            return "over"
        return "training" if self.server_metrics.training else "waiting"

    def look(self) -> dict[str, Any]:
        """Return the whole status for JSON."""
        server_metrics = self.server_metrics
        admitted = self._admitted()
        away = admitted.pop("quarantine")
        sessions = sorted(self.outbox.everybody(), key=lambda session: session.number)
        clients = [self._client(session, away) for session in sessions]
        states = [client["state"] for client in clients]
        short = server_metrics.look(self.outbox)
        return {
            **self.about,
            "state": self.state,
            "broken": self.journal.broken,
            "round": short["round"],
            "rounds": server_metrics.step,
            "model": self.outbox.newest,
            "loss": server_metrics.loss,
            "metrics": server_metrics.metrics,
            "measured_in_round": server_metrics.evaluated,
            "seconds_to_deadline": short["left"],
            "clients": {
                "places": admitted["places"],
                "enrolled": admitted["enrolled"],
                "here": short["here"],
                "at_work": states.count("at work"),
                "missing": states.count("missing"),
                "quarantined": len(away),
            },
            "who": clients,
            "updates": dict(server_metrics.outcomes),
            # Includes refusals of strangers.
            "refusals": admitted["refusals"],
            "newest_refusals": list(server_metrics.recent),
            "bytes": {"received": server_metrics.received, "sent": server_metrics.sent},
            "uptime_seconds": round(time.monotonic() - self.began, 3),
            "clock_seconds": round(self.clock.now(), 3),
            "journal_rows": self.journal.last,
        }

    def _admitted(self) -> dict[str, Any]:
        try:
            return self.access.status()
        # The register is unreadable at present; the rest is still reported.
        except RequestRefused:
            return {"places": None, "enrolled": None, "refusals": {}, "quarantine": {}}

    def _client(self, session: ClientSession, away: Mapping[int, float]) -> dict[str, Any]:
        train = session.train
        left = None
        if train is not None and session.deadline is not None:
            left = round(max(0.0, session.deadline - self.clock.now()), 3)
        return {
            "client": session.number,
            "name": session.name,
            "state": state_of(session),
            "examples": session.examples,
            "held_out": session.held_out,
            "round": None if train is None else train.round + 1,
            "ticket": None if train is None else train.ticket,
            "seconds_to_deadline": left,
            "silent_seconds": _silent(session),
            "last": self.server_metrics.last.get(session.number),
            "refusals": dict(self.server_metrics.refusals.get(session.number, {})),
            "quarantined_seconds": round(away[session.number], 1)
            if session.number in away
            else None,
            "bits_differ_by": self.differs(session) if session.examples else [],
        }


async def _due(stream: EventStream) -> AsyncIterator[bytes]:
    """Yield the stream's messages, until the stream ends or the reader disconnects."""
    try:
        while not stream.over:
            said = await run_in_threadpool(stream.due)
            if said:
                yield said
            await asyncio.sleep(PACE)
    finally:
        stream.close()


def state_of(session: ClientSession) -> str:
    """Return the client's state: at work, missing (at work, and disconnected), here, or away."""
    if session.train is not None:
        return "missing" if session.missing else "at work"
    return "here" if session.available else "away"


def _silent(session: ClientSession) -> float | None:
    """Return the seconds since the client's last request; 0 during a request, None if never."""
    if session.calls:
        return 0.0
    return round(max(0.0, time.monotonic() - session.seen), 3) if session.seen else None


class _Now(Collector):
    """Collector of the metrics that are read on request instead of counted."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def describe(self) -> list[Any]:
        """Return no descriptions, because the metrics are known only when collected."""
        return []

    def collect(self) -> Any:
        status = self._status
        sessions = status.outbox.everybody()
        clients = GaugeMetricFamily("dure_clients", "clients by state", labels=["state"])
        states = [state_of(session) for session in sessions]
        for state in ("here", "at work", "missing", "away"):
            clients.add_metric([state.replace(" ", "_")], states.count(state))
        away = status._admitted()["quarantine"]
        clients.add_metric(["quarantined"], len(away))
        yield clients
        server_metrics = status.server_metrics
        for name, value in (("received", server_metrics.received), ("sent", server_metrics.sent)):
            family = CounterMetricFamily(f"dure_bytes_{name}", f"bytes of bodies that were {name}")
            family.add_metric([], value)
            yield family
        for name, about, number in (
            ("round", "models that were made, over the whole run", server_metrics.step),
            ("journal_rows", "number of the newest row of the journal", status.journal.last),
            ("start_time_seconds", "when this process began to serve", server_metrics.began),
            ("up", "1 while it can serve", float(status.state not in ("starting", "broken"))),
        ):
            yield GaugeMetricFamily(f"dure_{name}", about, value=number)
        if server_metrics.loss is not None:
            yield GaugeMetricFamily("dure_loss", "of the newest round", value=server_metrics.loss)
        metrics = GaugeMetricFamily("dure_metric", "at the last evaluation", labels=["name"])
        for name, measured in server_metrics.metrics.items():
            metrics.add_metric([name], measured)
        yield metrics


def _json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(as_json(content), status, dict(headers or {}), media_type="application/json")


def load_or_create_token(folder: Path) -> str:
    """Return the token in a run folder, readable by its owner only; create a random one if missing.

    Raises ValueError if others may read the file or it has no token, and RunFolderWriteError if it
    cannot be created.
    """
    path = folder / TOKEN
    if not path.exists():
        with disk_errors(path):
            _make(path)
    try:
        with opened(path, most=_MOST_TOKEN) as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read().decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the token {path}: {error}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise ValueError(f"others may read the token {path}: run chmod 600 {path}")
    if len(token) < 32:
        raise ValueError(
            f"{path} is not a token of 32 digits or more: remove it to create a new one"
        )
    return token


def _make(path: Path) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    # Left by a killed process: the next process may get its process id, as in a container.
    beside.unlink(missing_ok=True)
    # The mode protects the token from its first byte on.
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as file:
        file.write(f"{secrets.token_hex(32)}\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync_folder(path.parent)
