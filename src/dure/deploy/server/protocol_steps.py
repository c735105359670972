"""Steps of a protocol over the network: send each client its step, and yield answers on arrival.

For updates that stay at their clients. An answer exists in memory only, from its request to the
consumer; tensors of an answer, which may be large, have a file until the consumer gets them. No
journal, log or checkpoint contains an answer. A step therefore cannot be repeated after a restart:
the server stores the result of the whole protocol instead (`durable_once.py`).

Other events of the journal are set aside meanwhile. A step ends when all clients have answered,
when no remaining client is available, or at its timeout. A disconnected client may return until
then. The server also waits for an absent client for which no other client can answer
(`ProtocolStep.waits`).
"""

from __future__ import annotations

import queue
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from dure.contracts.learner import StepInterrupted
from dure.deploy.answer_tensors import forms_of
from dure.deploy.server.durable_once import DurableOnce
from dure.deploy.server.events import JournalEvents
from dure.deploy.server.outbox import ClientAnswer, ClientOutbox
from dure.deploy.server.server_metrics import ServerMetrics
from dure.deploy.updates import Updates
from dure.errors import DamagedUpdateError
from dure.protocol.messages import ProtocolAnswer, ProtocolStep
from dure.wire.requests import MOST_STEP_BYTES, ProtocolStepBody
from dure.wire.tensors import TensorsError, size_of

MOMENT = 0.1
"""Seconds between two checks for disconnected clients."""


class ProtocolSteps:
    """Steps of protocols.

    `seconds` is the timeout of a step. `stops` returns whether the user wants the server to stop.
    """

    def __init__(
        self,
        events: JournalEvents,
        outbox: ClientOutbox,
        files: Updates,
        once: DurableOnce,
        seconds: float,
        stops: Callable[[], bool],
        server_metrics: ServerMetrics,
    ) -> None:
        self._events = events
        self._outbox = outbox
        self._files = files
        self._once = once
        self._seconds = seconds
        self._stops = stops
        self._server_metrics = server_metrics

    def with_clients(self, says: Sequence[ProtocolStep]) -> Iterator[ProtocolAnswer]:
        """Yield the clients' answers. Raises Interrupted, and ValueError for invalid steps."""
        assert self._once.making, "clients' answers exist only in the results computed from them"
        _check(says)
        asking = secrets.token_hex(8)
        waits = {say.ticket: say for say in says}
        self._put_aside()
        for say in says:
            self._ask(say, asking)
        until = time.monotonic() + self._seconds
        try:
            while waits:
                self._put_aside()
                if self._stops():
                    raise StepInterrupted
                self._server_metrics.pulse(self._outbox, "adding up")
                answered = self._next(asking)
                if answered is not None:
                    answer = self._answer(waits.pop(answered.said.ticket), answered)
                    if answer is not None:
                        yield answer
                elif time.monotonic() > until or not self._anybody(waits.values()):
                    break
        finally:
            for say in waits.values():
                self._outbox.ask(say.client, None, {})
            self._forget(waits.values())

    def _ask(self, say: ProtocolStep, asking: str) -> None:
        wants = [(form.dtype, list(form.shape)) for form in say.wants]
        this = ProtocolStepBody(say.ticket, say.stage, asking, say.body, wants)
        self._outbox.ask(say.client, this, forms_of(say.wants))
        self._count(say.client, down=len(say.body))

    def _put_aside(self) -> None:
        """Set aside the events that have arrived meanwhile."""
        while (event := self._events.next(float("inf"), 0.0)) is not None:
            self._events.aside.append(event)

    def _next(self, asking: str) -> ClientAnswer | None:
        """Return an answer to this question; None after a moment without an answer."""
        try:
            answered = self._outbox.answers.get(timeout=MOMENT)
        except queue.Empty:
            return None
        # An answer that arrived at the very end of an earlier step has no consumer.
        return answered if answered.said.asking == asking else None

    def _anybody(self, says: Iterable[ProtocolStep]) -> bool:
        """Return whether a client of these steps is available, or must be waited for."""
        return any(say.waits or self._outbox.session(say.client).available for say in says)

    def _forget(self, says: Iterable[ProtocolStep]) -> None:
        """Drop late answers to these steps."""
        self._files.delete([say.ticket for say in says if say.wants])
        with suppress(queue.Empty):
            while True:
                self._outbox.answers.get_nowait()

    def _answer(self, say: ProtocolStep, answered: ClientAnswer) -> ProtocolAnswer | None:
        """Return the client's answer; None if the client leaves the protocol."""
        said = answered.said
        why = said.failure and f"its own code raised {said.failure}"
        wants = forms_of(say.wants)
        try:
            if said.body is not None and not why:
                # The tensors are memory-mapped: the file can be deleted immediately.
                tensors = self._files.read(say.ticket, wants) if wants else {}
                up = len(said.body) + (size_of(wants) if wants else 0)
                self._count(say.client, up=up)
                return ProtocolAnswer(
                    say.ticket, say.client, say.stage, said.body, list(tensors.values())
                )
        except (TensorsError, DamagedUpdateError):
            why = "its tensors are others than were asked for"
        finally:
            if wants:
                self._files.delete([say.ticket])
        self._server_metrics.left_protocol(say.client, say.ticket, say.stage, why)
        return None

    def _count(self, client: int, down: int = 0, up: int = 0) -> None:
        travelled = self._once.travelled
        before_down, before_up = travelled.get(client, (0, 0))
        travelled[client] = before_down + down, before_up + up


def _check(says: Sequence[ProtocolStep]) -> None:
    """Check steps before they are sent. Raises ValueError for invalid steps."""
    if len({say.client for say in says}) < len(says):
        raise ValueError("a client is asked one thing at a time")
    for say in says:
        if len(say.body) > MOST_STEP_BYTES:
            raise ValueError(
                f"step {say.stage} would send {len(say.body):,} bytes to client {say.client}, but "
                f"at most {MOST_STEP_BYTES:,} are allowed: sum over smaller groups"
            )
