"""The server of a run whose clients are elsewhere: the state machine, channels, and who is there.

    a client comes     Hello; the roster; what it was in the middle of begins anew
    a client speaks    what it says is checked, dealt with, and the answers go out
    a client is gone   its turn has not counted: the server is set back to before it. It may come
                       again within `lasts`, and has the same turn then; after that the round goes
                       on without it, with the head that the one before has kept
    a client says      what cannot be, or what the server cannot compute with, or nothing for
                       `lasts`: its channel is closed, and the round goes on without it
    it has no turn     nobody else's turn begins anew by what it says

Only a message that is due puts the client's deadline off: who says something else is refused, and
who comes again more than `MOST_RETURNS` times in one turn is left out of the round.

Where all of a round are gone, or the one who has the newest head does not come again, the run ends
with an error that names it; it can be resumed when they are there.

A head that goes from client to client passes here sealed: the server sees for whom it is.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import torch

from dure.contracts.channels import Came, Channels, Event, Gone, Said
from dure.errors import DureError, LossNotFiniteError
from dure.fleet.virtual import Passage, nbytes
from dure.record.meter import Meter
from dure.split.account import Account
from dure.split.blame import ADVICE, CannotComputeError, NotANumberError, WrongError
from dure.split.compressed import Exchange
from dure.split.due import FromClient
from dure.split.messages import (
    SERVER,
    Envelope,
    Message,
    Own,
    Pass,
    Smashed,
    client,
)
from dure.split.network.checks import BatchSizes, Checks, Heard, Measuring
from dure.split.network.control import (
    Failed,
    Final,
    HeadRefused,
    Measure,
    Measured,
    Members,
    Query,
    Sealed,
)
from dure.split.network.entrance import MOST_RETURNS, MOST_SHOWN, Entrance
from dure.split.network.frames import Frame, FrameError, decode, encode
from dure.split.server import Server

LAST = 5.0
"""Seconds in which a run that is to end may be measured."""

PULSE = 0.5
"""Seconds between two looks that a terminal gets."""

MOMENT = 0.2
"""Seconds between two looks at the clock and at wishes to end."""

BUSY = 1.0
"""Seconds between two events after which the server was busy itself: nobody was late meanwhile."""

Tell = Callable[[str], None]


class ClientsLostError(DureError):
    """No client is left that could go on."""


class Clients(NamedTuple):
    """What clients have said at check-in, by their numbers: of their batches, and how many test
    examples they have (-1: one does not say)."""

    sizes: Sequence[BatchSizes]
    tests: Sequence[int]


class Hall:
    """Of one run. clients: what they have said of themselves. meters: the server's, and the
    clients' in their order.

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
        clients: Clients,
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
        self.clients = clients
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
        self._diverged: dict[str, str] = {}
        """Those of them whose batches gave what is no number, and when."""
        self._returns: Counter[str] = Counter()
        """How often each has come again since a turn has counted."""
        self._looked = time.monotonic()
        self._handing: dict[str, str] = {}
        """Who hands its head to whom."""
        self._late_heads: dict[str, set[int]] = {}
        """Turns for which a client was asked for its head, and which were taken back since."""
        self._exchanges: dict[str, Exchange] = {}
        self._began: dict[str, Smashed] = {}
        """The batch that a client has under way, without its tensors."""
        self._shown = 0.0
        self._measured: dict[str, float] | None = None
        self._measurer: str | None = None
        self._measuring = Measuring(Measure(0, -1), -1)
        """What the newest measurement is about, and how far it has come."""
        # All have come in.
        for name in self.order.everyone:
            self._enters(name)

    # A round

    def round(self, round: int, ends: Callable[[], bool]) -> bool:
        """Trains until the round is over; False where it `ends` before. Raises ClientsLostError,
        LossNotFiniteError."""
        self.account.begin(round)
        self._returns.clear()
        if self.order.over:
            # Whoever was turned away is not waited for, and may come again.
            self.absent = frozenset(self._refused - self.here)
            said = self.server.begin(round, self.absent)
        # A run that was interrupted goes on in the middle of one.
        else:
            said = self.server.again(self.absent)
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
        self._forgives(time.monotonic() - self._looked)
        event = self.channels.next(MOMENT)
        self._looked = time.monotonic()
        self._happens(event)
        self._shows()
        # Whose message lies here already is not silent; who comes and goes says nothing.
        if not isinstance(event, Said):
            self._look()

    def _forgives(self, seconds: float) -> None:
        """Puts all deadlines off by the time that the server itself was busy."""
        if seconds > BUSY:
            self._since = {name: since + seconds for name, since in self._since.items()}

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
        awaited = self._awaited()
        # Nobody is late with a message that was not due.
        for name in self.here - set(awaited):
            self._since.pop(name, None)
        for name in awaited:
            since = self._since.setdefault(name, now)
            if now - since <= self.channels.lasts:
                continue
            if name in self.here:
                self._fails(name, f"said nothing for {self.channels.lasts:g} s")
            else:
                self._without([name])
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
        self._diverged.pop(name, None)
        self._refused.discard(name)
        self._since.pop(name, None)
        self._send(name, self.told)

    def _comes(self, name: str, event: Came) -> None:
        if not self.entrance.lets_in(event):
            return
        self._enters(name)
        needed = name == self._measurer or name in self.order.turns or name in self._handing
        if not needed:
            return
        self._returns[name] += 1
        if self._returns[name] > MOST_RETURNS:
            self._fails(name, f"it has come again {MOST_RETURNS} times in one turn")
        elif name == self._measurer:
            self._asks_to_measure(name)
        else:
            self._anew(self.absent)

    def _goes(self, name: str, why: str) -> None:
        # Who was turned away is gone already, and for another reason than this.
        if name not in self.here:
            return
        self.here.discard(name)
        self._since[name] = time.monotonic()
        self.reasons[name] = why
        self.tell(f"{name} is gone: {why}")

    def _fails(self, name: str, reason: str) -> None:
        """A client has done what cannot be gone on with."""
        self._refuses(name, reason)
        self._without([name])

    def _refuses(self, name: str, reason: str) -> None:
        self.here.discard(name)
        self.reasons[name] = reason
        self._refused.add(name)
        self.channels.turn_away(number_of(name), reason)

    def _without(self, names: Sequence[str]) -> None:
        """The round goes on without some clients."""
        for name in names:
            self._tells_of(name, self.reasons.get(name, "it has not come again"))
        if self._measurer in names:
            self._measurer = None
        needed = [name for name in names if self._is_needed(name)]
        for name in set(names) - set(needed):
            self.order.leave_out(name)
            self.absent = self.order.absent
        if needed:
            self._anew(self.absent | set(needed))

    def _is_needed(self, name: str) -> bool:
        """Whether what has begun cannot be gone on with without a client."""
        return name in self.order.turns

    def _tells_of(self, name: str, reason: str) -> None:
        """Says that it goes on without a client. Raises ClientsLostError where it cannot."""
        if name in self._handing:
            raise ClientsLostError(
                f"{name}, who has the newest head, does not hand it on in round "
                f"{self.order.round + 1}: {reason}; resume the run when it is there again"
            )
        if name == self._measurer:
            self.tell(f"{name} does not measure the model: {reason}")
        else:
            self.tell(f"{name} is left out of this round: {reason}")

    def _anew(self, absent: frozenset[str]) -> None:
        """What has begun since the newest turn that counts begins once more."""
        self.absent = absent
        self._set_back()
        self._say(self.server.again(absent))
        if self.order.over and absent >= set(self.order.everyone):
            self._nobody_left()

    def _set_back(self) -> None:
        for name, to in self._handing.items():
            self._late_heads.setdefault(name, set()).add(self.order.turns.get(to, -1))
        self._handing.clear()
        self._began.clear()
        self.server.back()
        for name in self.here:
            self._since.pop(name, None)

    def _nobody_left(self) -> None:
        """Raises the error that ends the run."""
        if self._diverged.keys() >= set(self.order.everyone):
            when = next(iter(self._diverged.values()))
            raise LossNotFiniteError(math.nan, " and ".join(sorted(self._diverged)), when)
        why = "; ".join(f"{name}: {reason}" for name, reason in sorted(self.reasons.items()))
        raise ClientsLostError(
            f"no client is left to train with ({why}); resume the run when one is there"
        )

    # What clients say

    def _hears(self, name: str, event: Said) -> None:
        try:
            frame = decode(event.frame)
            self._deals(name, frame)
        except (FrameError, WrongError) as error:
            if isinstance(error, NotANumberError):
                self._diverged[name] = f"round {self.order.round + 1}"
            self._fails(name, f"sent what cannot be: {error}")
        except CannotComputeError as error:
            self._cannot_compute(error)
        except LossNotFiniteError:
            self._set_back()
            raise

    def _cannot_compute(self, error: CannotComputeError) -> None:
        """The server cannot compute with what some clients have sent."""
        for name, reason in error.reasons.items():
            if error.diverged:
                self._diverged[name] = f"round {self.order.round + 1}"
            self._refuses(name, f"sent what cannot be: {reason}")
        self._without(list(error.reasons))

    def _deals(self, name: str, frame: Frame) -> None:
        size = nbytes(frame)
        self.meters[1 + number_of(name)].sent(size)
        self.meters[0].received(size)
        self._passed(name, SERVER, frame, size)
        if isinstance(frame, Failed):
            self._fails(name, f"its own code raised: {frame.reason[:MOST_SHOWN]}")
        elif isinstance(frame, HeadRefused):
            self._refuses_head(name, frame)
        elif isinstance(frame, Sealed):
            self._relays(name, frame)
        elif isinstance(frame, Query):
            self._answers(name, frame)
        elif isinstance(frame, Measured):
            self._check_measures(name, frame)
            self._measured = self.checks.measured(frame, self._measuring)
        elif isinstance(frame, FromClient):
            self._trains(name, frame)
        else:
            raise WrongError(f"{type(frame).__name__} is nothing that a client says")

    def _trains(self, name: str, message: FromClient) -> None:
        if message.turn != self.order.turns.get(name):
            # Of a turn that was taken back: it came too late to be wrong.
            if self.server.due.is_late(name, message.turn):
                return
            raise WrongError(f"{type(message).__name__} of turn {message.turn} is not due")
        whole = self.server.whole
        message = self._checked(name, message)
        self._since.pop(name, None)
        began = time.perf_counter()
        try:
            said = self.server.receive(name, message, time.monotonic())
        except ValueError as error:
            raise WrongError(str(error)) from error
        took = time.perf_counter() - began
        self.meters[0].counters.compute_seconds += took
        self.account.did(SERVER, "tail", began - self._clock, took)
        if self.server.whole is not whole:
            self._returns.clear()
            self.kept()
        self._say(said)
        self.server.meanwhile()

    def _checked(self, name: str, message: FromClient) -> FromClient:
        """A message that is due, as it was before it was compressed. Raises WrongError."""
        try:
            self.server.due.check(name, message)
            if name in self._handing.values():
                raise WrongError("values came before the head that the turn begins with")
            heard = Heard(
                message,
                self.server.due.turns[name],
                self.clients.sizes[number_of(name)],
                self._began.get(name),
            )
            self.checks.begun(heard)
            if self.exchange is not None:
                heard = replace(heard, message=self._with(name).read(name, message))
            checked = self.checks.checked(heard)
        except LossNotFiniteError as error:
            raise NotANumberError(f"what crosses the cut has NaN: {ADVICE}") from error
        except (WrongError, MemoryError, torch.OutOfMemoryError):
            raise
        # What cannot be unpacked is the sender's as well, whatever a decoder raises.
        except Exception as error:
            raise WrongError(str(error)) from error
        if isinstance(checked, Smashed):
            self._began[name] = msgspec.structs.replace(checked, values=(), targets=None)
        return checked

    def _relays(self, name: str, sealed: Sealed) -> None:
        """A head, which nobody here can read, goes on to whom it is for."""
        to = client(sealed.peer)
        if self._handing.get(name) != to or self.order.turns.get(to) != sealed.turn:
            late = self._late_heads.get(name, set())
            if sealed.turn not in late:
                raise WrongError(f"a head for {to} came, and was not asked for")
            late.discard(sealed.turn)
            return
        if sealed.content.dtype != torch.uint8 or sealed.content.ndim != 1:
            raise WrongError("a sealed head is bytes")
        del self._handing[name]
        self._since.pop(name, None)
        self._send(to, Sealed(sealed.turn, number_of(name), sealed.content))

    def _refuses_head(self, name: str, refused: HeadRefused) -> None:
        """A client does not train with the head that it was handed: it is not its fault."""
        turn = self.order.turns.get(name)
        if refused.turn != turn:
            if self.server.due.is_late(name, refused.turn):
                return
            raise WrongError("a head is refused that was not handed over")
        begun = self.server.due.turns[name]
        if not begun.comes or name in self._began or name in self._handing.values():
            raise WrongError("a head is refused that was not handed over")
        self.reasons[name] = f"the head that it was handed cannot be: {refused.reason[:MOST_SHOWN]}"
        self._without([name])

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
        measure = Measure(round, self.order.since.get(name, -1), head)
        self._measuring = Measuring(measure, self.clients.tests[number_of(name)])
        self._returns.clear()
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
        self.checks.forget()
        self._measuring = Measuring(self._measuring.measure, self._measuring.tests)
        self._send(name, self._measuring.measure)

    def _check_measures(self, name: str, frame: Query | Measured) -> None:
        """Raises WrongError for a part of a measurement by somebody who was not asked for it."""
        if name != self._measurer:
            raise WrongError(f"{type(frame).__name__} came, and it was not asked to measure")
        self._since.pop(name, None)

    def _answers(self, name: str, query: Query) -> None:
        self._check_measures(name, query)
        self._send(name, self.checks.answered(query, self._measuring))


def number_of(name: str) -> int:
    """The number of a client, by its name."""
    assert name != SERVER
    return int(name.removeprefix("client "))
