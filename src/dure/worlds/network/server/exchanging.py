"""A step of a protocol: clients are asked, and what they answer is handed on as it comes.

For updates that stay with their clients. An answer is in memory from the request that brings it to
whoever asked; only its tensors, which may be large, lie in a file until then. It is in no journal,
no log and no checkpoint. So a step cannot be gone through again: what comes of a whole protocol is
kept instead (`once.py`).

Other events of the journal are put aside meanwhile. A step ends once all have answered, once none
of those that have not is there, or when its time is up. Who has fallen silent may come back until
then. Of clients that nobody else can answer for (`Say.waits`), one that is away is waited for too.
"""

from __future__ import annotations

import queue
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from dure.contracts.strategy import Interrupted
from dure.errors import DamagedUpdateError
from dure.protocol.messages import Answer, Say
from dure.wire.requests import MOST_SAID, SayThis
from dure.wire.tensors import TensorsError, size_of
from dure.worlds.network.server.desk import Answered, Desk
from dure.worlds.network.server.events import Events
from dure.worlds.network.server.once import Once
from dure.worlds.network.server.watching import Watching
from dure.worlds.network.updates import Updates
from dure.worlds.network.wanted import forms_of

MOMENT = 0.1
"""Seconds after which it looks who has gone."""


class Exchanging:
    """Steps of protocols. seconds: that one may take. stops: whether the user wants that."""

    def __init__(
        self,
        events: Events,
        desk: Desk,
        files: Updates,
        once: Once,
        seconds: float,
        stops: Callable[[], bool],
        watching: Watching,
    ) -> None:
        self._events = events
        self._desk = desk
        self._files = files
        self._once = once
        self._seconds = seconds
        self._stops = stops
        self._watching = watching

    def with_clients(self, says: Sequence[Say]) -> Iterator[Answer]:
        """What they answer. Raises Interrupted, and ValueError for what cannot be asked."""
        assert self._once.making, "what clients answer is nowhere else than in what is made of it"
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
                    raise Interrupted
                self._watching.pulse(self._desk, "adding up")
                answered = self._next(asking)
                if answered is not None:
                    answer = self._answer(waits.pop(answered.said.ticket), answered)
                    if answer is not None:
                        yield answer
                elif time.monotonic() > until or not self._anybody(waits.values()):
                    break
        finally:
            for say in waits.values():
                self._desk.ask(say.client, None, {})
            self._forget(waits.values())

    def _ask(self, say: Say, asking: str) -> None:
        wants = [(form.dtype, list(form.shape)) for form in say.wants]
        this = SayThis(say.ticket, say.stage, asking, say.body, wants)
        self._desk.ask(say.client, this, forms_of(say.wants))
        self._count(say.client, down=len(say.body))

    def _put_aside(self) -> None:
        """Events that have come meanwhile."""
        while (event := self._events.next(float("inf"), 0.0)) is not None:
            self._events.aside.append(event)

    def _next(self, asking: str) -> Answered | None:
        """An answer to this question; None where there is none for a moment."""
        try:
            answered = self._desk.answers.get(timeout=MOMENT)
        except queue.Empty:
            return None
        # One that came at the very end of an earlier step is nobody's any more.
        return answered if answered.said.asking == asking else None

    def _anybody(self, says: Iterable[Say]) -> bool:
        """Whether one of their clients is there, or is waited for."""
        return any(say.waits or self._desk.seat(say.client).here for say in says)

    def _forget(self, says: Iterable[Say]) -> None:
        """What has come of these answers, which nobody takes any more."""
        self._files.delete([say.ticket for say in says if say.wants])
        with suppress(queue.Empty):
            while True:
                self._desk.answers.get_nowait()

    def _answer(self, say: Say, answered: Answered) -> Answer | None:
        """What the client says; None where that is that it does not go on."""
        said = answered.said
        why = said.failure and f"its own code raised {said.failure}"
        wants = forms_of(say.wants)
        try:
            if said.body is not None and not why:
                # Mapped: the file may go at once.
                tensors = self._files.read(say.ticket, wants) if wants else {}
                up = len(said.body) + (size_of(wants) if wants else 0)
                self._count(say.client, up=up)
                return Answer(say.ticket, say.client, say.stage, said.body, list(tensors.values()))
        except (TensorsError, DamagedUpdateError):
            why = "its tensors are others than were asked for"
        finally:
            if wants:
                self._files.delete([say.ticket])
        self._watching.left_protocol(say.client, say.ticket, say.stage, why)
        return None

    def _count(self, client: int, down: int = 0, up: int = 0) -> None:
        travelled = self._once.travelled
        before_down, before_up = travelled.get(client, (0, 0))
        travelled[client] = before_down + down, before_up + up


def _check(says: Sequence[Say]) -> None:
    """Raises ValueError for what cannot be asked."""
    if len({say.client for say in says}) < len(says):
        raise ValueError("a client is asked one thing at a time")
    for say in says:
        if len(say.body) > MOST_SAID:
            raise ValueError(
                f"step {say.stage} would say {len(say.body):,} bytes to client {say.client}, and "
                f"{MOST_SAID:,} are the most: sum over smaller groups"
            )
