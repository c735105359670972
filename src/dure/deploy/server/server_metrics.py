"""Events of a server, counted and logged: for the log, /metrics and /status.

Handlers and the carrier report events; this module makes no decisions. Counters are those of this
process and start at 0, as Prometheus expects; events applied again after a restart are not counted
twice. Lines go to the logger `dure.server.events`, each with its fields.

Any stranger who reaches the port can cause refusals. Refusals of the same kind therefore get at
most `log_rate_limit.MOST_LINES` lines per minute; the next line states the number of omitted lines.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client import Counter as Counts

from dure.deploy.server.log_lines import SERVER
from dure.deploy.server.log_rate_limit import LogRateLimit, log_mistake
from dure.deploy.server.outbox import ClientOutbox, ClientSession
from dure.wire.requests import UploadRequest

EVENTS = logging.getLogger("dure.server.events")
# Without a handler, logging would print warnings to standard error.
EVENTS.addHandler(logging.NullHandler())

RECENT = 50
"""Number of newest refusals in /status."""

PULSE = 0.5
"""Seconds between two reports to the terminal."""

_QUICK = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_SLOW = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0, 14400.0)
"""Bounds of histograms in seconds."""

Report = Callable[[dict[str, Any]], None]


def _ignore(event: dict[str, Any]) -> None:
    pass


class ServerMetrics:
    """Counters and events of a server. Safe for several threads.

    `report` gets the available clients and the awaited work periodically, as {"federation": …}.
    """

    def __init__(self, report: Report = _ignore) -> None:
        self.began = time.time()
        self.step = 0
        """Models made, over the whole run."""
        self.loss: float | None = None
        self.metrics: dict[str, float] = {}
        self.evaluated: int | None = None
        """Round of the newest metrics."""
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self.refusals: dict[int, Counter[str]] = {}
        """Refusals of each client, by kind."""
        self.outcomes: Counter[str] = Counter()
        self.last: dict[int, str] = {}
        """Outcome of each client's newest assignment."""
        self.received = 0
        self.sent = 0
        self._report = report
        self._pulsed = float("-inf")
        self._round_began: float | None = None
        self._round_seconds: float | None = None
        """Seconds of the newest round."""
        self.training = False
        """Whether the first round has begun."""
        self._sparing = LogRateLimit()
        self._lock = threading.Lock()
        self.registry = CollectorRegistry()
        self.rounds = self._counts("rounds", "models that were made")
        self.updates = self._counts("updates", "what became of assignments", ["outcome"])
        self.refused_requests = self._counts("refusals", "requests that were refused", ["kind"])
        self.mistakes = self._counts("mistakes", "mistakes of the server's own; the log has them")
        self.checkpoints = self._counts("checkpoints", "checkpoints that were written")
        self.round_seconds = self._histogram("round_seconds", "seconds of a round", _SLOW)
        self.sync_seconds = self._histogram(
            "journal_sync_seconds", "seconds until rows of the journal are on the disk", _QUICK
        )
        self.fold_seconds = self._histogram(
            "fold_seconds", "seconds in which an update is folded into the sum", _QUICK
        )

    def _counts(self, name: str, about: str, labels: list[str] | None = None) -> Counts:
        return Counts(f"dure_{name}", about, labels or [], registry=self.registry)

    def _histogram(self, name: str, about: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(f"dure_{name}", about, buckets=bounds, registry=self.registry)

    # The run

    def serves(self, run: str, url: str, resumed: bool) -> None:
        log_event("restart" if resumed else "start", run=run, url=url)

    def ends(self, reason: str) -> None:
        log_event("end", reason=reason, rounds=self.step)

    def hears(self, event: Mapping[str, Any]) -> None:
        """Take the run's progress events."""
        if "unit" not in event:
            return
        made = int(event["step"])
        if made > self.step:
            self.step = made
            self.loss = event["loss"]
            log_event("round", round=made, loss=event["loss"], seconds=self._round_seconds)
        if event["evaluated"] == made and event["evaluated"] != self.evaluated:
            self.evaluated = made
            self.metrics = dict(event["metrics"])
            log_event("evaluation", round=made, metrics=self.metrics)

    def round_begins(self) -> None:
        """Record that work on the next model has begun, unless it had begun before."""
        self.training = True
        if self._round_began is None:
            self._round_began = time.monotonic()

    def round_made(self) -> None:
        self.rounds.inc()
        began = self._round_began
        self._round_began = None
        if began is not None:
            self._round_seconds = round(time.monotonic() - began, 6)
            self.round_seconds.observe(self._round_seconds)

    def saved(self) -> None:
        self.checkpoints.inc()
        log_event("checkpoint", round=self.step)

    # Clients

    def arrived(self, session: ClientSession) -> None:
        log_event(
            "client in",
            client=session.number,
            name=session.name,
            examples=session.examples,
            held_out=session.held_out,
        )

    def left(self, session: ClientSession) -> None:
        """Log that a client has disconnected: missing if at work, otherwise out."""
        if session.train is not None:
            log_event(
                "client missing",
                logging.WARNING,
                client=session.number,
                ticket=session.train.ticket,
            )
        else:
            log_event("client out", client=session.number)

    def back(self, session: ClientSession) -> None:
        log_event("client back", client=session.number)

    def assigned(self, client: int, ticket: int, round: int, size: int) -> None:
        log_event("assignment", client=client, ticket=ticket, round=round + 1, bytes=size)

    def came(self, client: int, said: UploadRequest) -> None:
        """Log a received and recorded update."""
        more: dict[str, Any] = {} if said.failure is None else {"reason": said.failure}
        log_event(
            "update",
            client=client,
            ticket=said.ticket,
            bytes=said.bytes,
            loss=said.loss,
            seconds=round(said.seconds, 6),
            **more,
        )

    def holds(self, client: int, ticket: int) -> None:
        """Log that an update is ready and stays at its client."""
        log_event("ready", client=client, ticket=ticket)

    def left_protocol(self, client: int, ticket: int, stage: int, reason: str) -> None:
        """Log that a client has left the protocol on its update."""
        more: dict[str, Any] = {"reason": reason} if reason else {}
        log_event("left", logging.WARNING, client=client, ticket=ticket, step=stage, **more)

    def came_of(self, client: int, ticket: int, outcome: str, reason: str = "") -> None:
        """Count and log an assignment's outcome: accepted, refused, late, expired or failed."""
        self.updates.labels(outcome).inc()
        with self._lock:
            self.outcomes[outcome] += 1
            self.last[client] = f"{outcome}: {reason}" if reason else outcome
        level = logging.INFO if outcome == "accepted" else logging.WARNING
        more: dict[str, Any] = {"reason": reason} if reason else {}
        log_event("outcome", level, client=client, ticket=ticket, outcome=outcome, **more)

    def refused(
        self, client: int | None, address: str, request: str, kind: str, reason: str
    ) -> None:
        """Count and log a refused request; `client` is None for an unknown sender."""
        # Every new session begins with this answer, so it is not an offence.
        if kind == "new nonce":
            return
        self.refused_requests.labels(kind).inc()
        about: dict[str, Any] = {"kind": kind, "reason": reason, "request": request}
        about |= {"address": address} if client is None else {"client": client}
        with self._lock:
            self.recent.append({"time": now(), **about})
            if client is not None:
                self.refusals.setdefault(client, Counter())[kind] += 1
            left_out = self._sparing.take(kind)
        if left_out is not None:
            more = {"left_out": left_out} if left_out else {}
            log_event("refusal", logging.WARNING, **about, **more)

    def mistake(self, request: str) -> None:
        """Log the server's own error that is being handled, with its traceback.

        The same position in the code is logged a few times per minute, because a stranger may be
        able to cause the error. `request` has the method and the path.
        """
        self.mistakes.inc()
        log_mistake(SERVER, self._sparing, request)

    # The terminal

    def pulse(self, outbox: ClientOutbox, doing: str) -> None:
        """Report the available clients, at most every `PULSE` seconds."""
        at = time.monotonic()
        if at - self._pulsed < PULSE:
            return
        self._pulsed = at
        self._report({"federation": {"doing": doing, **self.look(outbox)}})

    def look(self, outbox: ClientOutbox) -> dict[str, Any]:
        """Return a short summary of the available clients and the awaited work."""
        sessions = outbox.everybody()
        available = [session for session in sessions if session.available]
        working = [session for session in sessions if session.train is not None]
        ends = [session.deadline for session in working if session.deadline is not None]
        rounds = [session.train.round for session in working if session.train is not None]
        return {
            "round": max([self.step, *rounds]) + 1,
            "here": len(available),
            "at_work": [session.name for session in working if not session.missing],
            "missing": [session.name for session in working if session.missing],
            "left": max(0.0, min(ends) - outbox.now()) if ends else None,
            "outcomes": dict(self.outcomes),
            "received": self.received,
            "sent": self.sent,
        }


def log_event(event: str, level: int = logging.INFO, **about: Any) -> None:
    """Write a line of the log."""
    EVENTS.log(level, event, extra={"about": about})


def now() -> str:
    """Return the current time in the format of logs."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


class MeteredApp:
    """ASGI application that counts the bytes of request and answer bodies."""

    def __init__(self, app: Any, server_metrics: ServerMetrics) -> None:
        self._app = app
        self._server_metrics = server_metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        server_metrics = self._server_metrics

        async def receiving() -> Any:
            message = await receive()
            server_metrics.received += len(message.get("body", b""))
            return message

        async def sending(message: Any) -> None:
            server_metrics.sent += len(message.get("body", b""))
            await send(message)

        await self._app(scope, receiving, sending)
