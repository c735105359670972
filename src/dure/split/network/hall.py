"""The server of a run whose clients are elsewhere: the state machine, channels, and who is there.

    a client comes     Hello; the roster; what it was in the middle of begins anew
    a client speaks    what it says is checked, dealt with, and the answers go out
    a client is gone   its turn has not counted: the server is set back to before it. It may come
                       again within `lasts`, and has the same turn then; after that the round goes
                       on without it, with the head that the one before has kept
    a client says      what cannot be, or nothing for `lasts`: its channel is closed, and the round
                       goes on without it

Where all of a round are gone, or the one who has the newest head does not come again, the run ends
with an error that names it; it can be resumed when they are there.

A head that goes from client to client passes here sealed: the server sees for whom it is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from dure.contracts.channels import Came, Channels, Event, Gone, Said
from dure.errors import DureError, LossNotFiniteError
from dure.fleet.virtual import Passage, nbytes
from dure.record.meter import Meter
from dure.split.account import Account
from dure.split.compressed import Exchange
from dure.split.messages import (
    SERVER,
    Ended,
    Envelope,
    HeadGradients,
    Message,
    OutputGradients,
    Own,
    Pass,
    Smashed,
    client,
)
from dure.split.network.checks import Checks, WrongError
from dure.split.network.control import (
    Failed,
    Final,
    Measure,
    Measured,
    Members,
    Query,
    Sealed,
)
from dure.split.network.entrance import Entrance
from dure.split.network.frames import Frame, FrameError, decode, encode
from dure.split.server import Server

LAST = 5.0
"""Seconds in which a run that is to end may be measured."""

PULSE = 0.5
"""Seconds between two looks that a terminal gets."""

MOMENT = 0.2
"""Seconds between two looks at the clock and at wishes to end."""

FROM_CLIENTS = (Smashed, OutputGradients, HeadGradients, Ended)

Tell = Callable[[str], None]


class ClientsLostError(DureError):
    """No client is left that could go on."""


class Hall:
    """Of one run. meters: the server's, and the clients' in their order.

    told: what a client is told when it comes. account: of which messages went, and when the server
    computed. exchange: in what way values cross, where they are compressed. tell: hears of what
    goes wrong with clients; show, now and then, who is there. kept: called when a turn counts,
    before the next one begins.
    """

    def __init__(
        self,
        server: Server,
        channels: Channels,
        checks: Checks,
        meters: Sequence[Meter],
        entrance: Entrance,
        told: Members,
        account: Account,
        exchange: Callable[[], Exchange] | None,
        tell: Tell,
        show: Callable[[dict[str, Any]], None],
        kept: Callable[[], None],
    ) -> None:
        self.server = server
        self.order = server.order
        self.channels = channels
        self.checks = checks
        self.meters = meters
        self.entrance = entrance
        self.told = told
        self.account = account
        self._clock = time.perf_counter()
        self.exchange = exchange
        self.tell = tell
        self.show = show
        self.kept = kept
        self.here: set[str] = set()
        self.absent: frozenset[str] = frozenset()
        self.reasons: dict[str, str] = {}
        """Why a client was lost."""
        self._since: dict[str, float] = {}
        """Since when a client is gone, or a message of it is awaited."""
        self._refused: set[str] = set()
        """Those that were turned away."""
        self._handing: dict[str, str] = {}
        """Who hands its head to whom."""
        self._exchanges: dict[str, Exchange] = {}
        self._examples: dict[str, int] = {}
        """Of the batch that a client has under way."""
        self._shown = 0.0
        self._measured: dict[str, float] | None = None
        self._measurer: str | None = None
        self._measure = Measure(0, -1)
        """What the newest measurement is about."""
        # All have come in.
        for name in self.order.everyone:
            self._enters(name)

    # A round

    def round(self, round: int, ends: Callable[[], bool]) -> bool:
        """Trains until the round is over; False where it `ends` before. Raises ClientsLostError,
        LossNotFiniteError."""
        self.account.begin(round)
        if self.order.over:
            # Whoever was turned away is not waited for, and may come again.
            self.absent = frozenset(self._refused - self.here)
            said = self.server.begin(round, self.absent)
        # A run that was interrupted goes on in the middle of one.
        else:
            said = self.order.again(self.absent)
        self._say(said)
        while not self.order.over:
            if ends():
                self._set_back()
                return False
            self._goes_on()
        if self.absent >= set(self.order.everyone):
            self._nobody_left()
        return True

    def _goes_on(self) -> None:
        """The next thing that happens. Whose message lies here already is not silent."""
        event = self.channels.next(MOMENT)
        self._happens(event)
        self._shows()
        if event is None:
            self._look()

    def _shows(self) -> None:
        now = time.monotonic()
        if now - self._shown > PULSE:
            self._shown = now
            self.show(self.look())

    def _happens(self, event: Event | None) -> None:
        if event is None:
            return
        name = client(event.client)
        if isinstance(event, Came):
            self._comes(name, event)
        elif isinstance(event, Gone):
            self._goes(name, event.why)
        elif name in self.here:
            self._hears(name, event)

    def _look(self) -> None:
        """Who has been waited for long enough?"""
        now = time.monotonic()
        for name in self._awaited():
            since = self._since.setdefault(name, now)
            if now - since <= self.channels.lasts:
                continue
            if name in self.here:
                self._fails(name, f"said nothing for {self.channels.lasts:g} s")
            else:
                self._without(name)
            return

    def look(self) -> dict[str, Any]:
        """Who is there and what is waited for, as terminals show it."""
        awaited = self._awaited()
        missing = [name for name in awaited if name not in self.here]
        left = [
            self.channels.lasts - (time.monotonic() - self._since[name])
            for name in awaited
            if name in self._since
        ]
        counters = self.meters[0].counters
        return {
            "doing": "training" if self._measurer is None else "measuring",
            "round": self.order.round + 1,
            "here": len(self.here),
            "at_work": [name for name in awaited if name in self.here],
            "missing": missing,
            "left": max(0.0, min(left)) if left else None,
            "outcomes": {},
            "received": counters.bytes_received,
            "sent": counters.bytes_sent,
        }

    def _awaited(self) -> list[str]:
        """Whose next message is waited for: who hands a head on comes before who gets it."""
        if self._measurer is not None:
            return [self._measurer]
        receivers = set(self._handing.values())
        return [*self._handing, *(x for x in self.server.awaited() if x not in receivers)]

    # Who is there

    def _enters(self, name: str) -> None:
        self.here.add(name)
        self._refused.discard(name)
        self._since.pop(name, None)
        self._send(name, self.told)

    def _comes(self, name: str, event: Came) -> None:
        if not self.entrance.lets_in(event):
            return
        self._enters(name)
        if name == self._measurer:
            self._asks_to_measure(name)
        elif name in self.order.turns or name in self._handing:
            self._anew(self.absent)

    def _goes(self, name: str, why: str) -> None:
        self.here.discard(name)
        self._since[name] = time.monotonic()
        self.reasons[name] = why
        self.tell(f"{name} is gone: {why}")

    def _fails(self, name: str, reason: str) -> None:
        """A client has done what cannot be gone on with."""
        self.here.discard(name)
        self.reasons[name] = reason
        self._refused.add(name)
        self.channels.turn_away(number_of(name), reason)
        self._without(name)

    def _without(self, name: str) -> None:
        """The round goes on without a client."""
        reason = self.reasons.get(name, "it has not come again")
        if self._measurer is not None:
            self.tell(f"{name} does not measure the model: {reason}")
            self._measurer = None
            return
        if name in self._handing:
            raise ClientsLostError(
                f"{name}, who has the newest head, does not hand it on in round "
                f"{self.order.round + 1}: {reason}; resume the run when it is there again"
            )
        self.tell(f"{name} is left out of this round: {reason}")
        self._anew(self.absent | {name})

    def _anew(self, absent: frozenset[str]) -> None:
        """What has begun since the newest turn that counts begins once more."""
        self.absent = absent
        self._set_back()
        self._say(self.order.again(absent))
        if self.order.over and absent >= set(self.order.everyone):
            self._nobody_left()

    def _set_back(self) -> None:
        self.server.back()
        self._handing.clear()
        self._examples.clear()
        for name in self.here:
            self._since.pop(name, None)

    def _nobody_left(self) -> None:
        why = "; ".join(f"{name}: {reason}" for name, reason in sorted(self.reasons.items()))
        raise ClientsLostError(
            f"no client is left to train with ({why}); resume the run when one is there"
        )

    # What clients say

    def _hears(self, name: str, event: Said) -> None:
        self._since.pop(name, None)
        try:
            frame = decode(event.frame)
            self._deals(name, frame)
        except (FrameError, WrongError) as error:
            self._fails(name, f"sent what cannot be: {error}")
        except LossNotFiniteError:
            self._set_back()
            raise

    def _deals(self, name: str, frame: Frame) -> None:
        size = nbytes(frame)
        self.meters[1 + number_of(name)].sent(size)
        self.meters[0].received(size)
        self._passed(name, SERVER, frame, size)
        if isinstance(frame, Failed):
            self._fails(name, f"its own code raised: {frame.reason}")
        elif isinstance(frame, Sealed):
            self._relays(name, frame)
        elif isinstance(frame, Query):
            self._answers(name, frame)
        elif isinstance(frame, Measured):
            if name == self._measurer:
                self._measured = {**frame.values, **self.checks.measured()}
        elif isinstance(frame, FROM_CLIENTS):
            self._trains(name, frame)
        else:
            raise WrongError(f"{type(frame).__name__} is nothing that a client says")

    def _trains(self, name: str, message: Message) -> None:
        # Of a turn that was taken back: it came too late to be wrong.
        if getattr(message, "turn", None) != self.order.turns.get(name):
            return
        try:
            whole = self.server.whole
            if self.exchange is not None:
                message = self._with(name).read(name, message)
            message = self.checks.checked(message, self._examples.get(name, 0))
            if isinstance(message, Smashed):
                self._examples[name] = message.examples
            began = time.perf_counter()
            said = self.server.receive(name, message, time.monotonic())
            took = time.perf_counter() - began
            self.meters[0].counters.compute_seconds += took
            self.account.did(SERVER, "tail", began - self._clock, took)
        # What the order of messages does not allow, or no code can have written.
        except ValueError as error:
            raise WrongError(str(error)) from error
        if self.server.whole is not whole:
            self.kept()
        self._say(said)
        self.server.meanwhile()

    def _relays(self, name: str, sealed: Sealed) -> None:
        """A head, which nobody here can read, goes on to whom it is for."""
        to = client(sealed.peer)
        if self._handing.get(name) != to or self.order.turns.get(to) != sealed.turn:
            return
        del self._handing[name]
        self._send(to, Sealed(sealed.turn, number_of(name), sealed.content))

    def _with(self, name: str) -> Exchange:
        """In what way values cross between the server and a client."""
        assert self.exchange is not None
        return self._exchanges.setdefault(name, self.exchange())

    # What the server says

    def _say(self, said: Sequence[Envelope]) -> None:
        for name, message in said:
            if isinstance(message, Pass):
                self._handing[name] = message.to
                # However long it was gone before: it is needed now.
                self._since.pop(name, None)
            self._send(name, message)

    def _send(self, name: str, frame: Frame) -> None:
        if name not in self.here:
            self._since.setdefault(name, time.monotonic())
            return
        if self.exchange is not None and isinstance(frame, Message):
            frame = self._with(name).written(frame)
        number = number_of(name)
        size = nbytes(frame)
        if size:
            self.meters[0].sent(size)
            self.meters[1 + number].received(size)
            self._passed(SERVER, name, frame, size)
        self.channels.say(number, encode(frame))

    def final(self, head: Own) -> None:
        """Gives all who are there the head that the run has come to."""
        for name in self.here:
            self._send(name, Final(head))

    def _passed(self, sender: str, receiver: str, frame: Frame, size: int) -> None:
        """Notes a message; how long links were busy with it nobody here knows."""
        if size:
            now = time.perf_counter() - self._clock
            self.account.passed(Passage(sender, receiver, frame, size, now, now, now, now))

    # Evaluation by a client that has the head

    def measure(
        self, name: str, round: int, ends: Callable[[], bool], head: Own | None
    ) -> dict[str, float]:
        """What a client measures on its own test data; empty without, or if it does not come.

        head: with which; None: with its own newest.
        """
        if name not in self.here:
            return {}
        self._measurer = name
        self._measure = Measure(round, self.order.since.get(name, -1), head)
        self._asks_to_measure(name)
        try:
            until = math.inf
            while self._measured is None and self._measurer and time.monotonic() < until:
                # Who wants to end waits no longer than that for a last measurement.
                if ends():
                    until = min(until, time.monotonic() + LAST)
                self._goes_on()
        finally:
            self._measurer = None
        return self._measured or {}

    def _asks_to_measure(self, name: str) -> None:
        """From the beginning: what was measured before it was gone does not count."""
        self._measured = None
        self.checks.measured()
        self._send(name, self._measure)

    def _answers(self, name: str, query: Query) -> None:
        if name != self._measurer:
            return
        self._send(name, self.checks.answered(query))


def number_of(name: str) -> int:
    """The number of a client, by its name."""
    assert name != SERVER
    return int(name.removeprefix("client "))
