"""Evaluation of a model on the clients' held-out examples.

Every available client with held-out examples is asked. The journal alone determines the awaited
clients: the end of an evaluation is an event, so that the same clients count after a restart and in
a replay.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from dure.deploy.journal import Journal
from dure.deploy.server.events import JournalEvents
from dure.deploy.server.outbox import ClientOutbox
from dure.deploy.server.server_metrics import ServerMetrics
from dure.protocol.messages import EvaluationResults, merge_evaluations
from dure.wire.requests import EvaluationReport, EvaluationTask, from_json


class NetworkEvaluation:
    """Evaluations by clients.

    `seconds` is the timeout of an evaluation. `stops` returns whether the user wants the server to
    stop.
    """

    def __init__(
        self,
        events: JournalEvents,
        journal: Journal,
        outbox: ClientOutbox,
        seconds: float,
        stops: Callable[[], bool],
        server_metrics: ServerMetrics,
    ) -> None:
        self._events = events
        self._journal = journal
        self._outbox = outbox
        self._seconds = seconds
        self._stops = stops
        self._server_metrics = server_metrics

    def by_clients(self, request: EvaluationTask) -> EvaluationResults:
        """Have clients evaluate this model, and return their metrics; other events wait."""
        asked = [
            session
            for session in self._outbox.everybody()
            if session.available and session.held_out
        ]
        answers: dict[int, EvaluationReport] = {}
        for session in asked:
            self._outbox.ask_measure(session.number, request)
        until = time.monotonic() + self._seconds
        ended = said_so = False
        while not ended:
            waits = [s for s in asked if s.available and s.number not in answers]
            # Only logged events count, so the end of the evaluation is an event too.
            late = time.monotonic() > until or self._stops()
            self._server_metrics.pulse(self._outbox, "measuring")
            if self._events.live and (late or not waits) and not said_so:
                self._journal.write("all_measured")
                said_so = True  # only once: the next evaluation would end at a second event
            event = self._events.next(math.inf)
            if event is None:
                continue
            if event.kind == "measured":
                said = from_json(event.body, EvaluationReport)
                if said.round == request.round:
                    answers[event.client] = said
                    self._outbox.ask_measure(event.client, None)
            elif event.kind == "all_measured":
                ended = True
            else:
                self._events.aside.append(event)
        for session in asked:
            self._outbox.ask_measure(session.number, None)
        return merge_evaluations([_measured(client, said) for client, said in answers.items()])


def _measured(client: int, said: EvaluationReport) -> EvaluationResults:
    """Return a client's metrics as a message of a single client."""
    values = {name: [_number(value)] for name, value in said.values.items()}
    sums = {name: [list(map(_number, row))] for name, row in said.sums.items()}
    examples = {name: [count] for name, count in said.examples.items()}
    failures = {client: said.failure} if said.failure else {}
    return EvaluationResults([client], values, examples, sums, dict(said.forms), failures)


def _number(value: float | None) -> float:
    return math.nan if value is None else value
