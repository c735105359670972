"""Server of a split learning run over a network: state machine, channels, and connected clients.

    a client connects      Hello; the roster; its unfinished turn starts again
    a client sends         the message is checked and processed, and the answers are sent
    a client disconnects   its unfinished turn does not count: the server rolls back to the state
                           before it. If the client reconnects within `answer_timeout`, it gets the
                           same turn; after that the round continues without it, with the head that
                           the client before has kept
    a client sends         an invalid message, or values that make the server's computation fail, or
                           nothing for `answer_timeout`: its channel is closed, and the round
                           continues without it
    without a turn         a client cannot make another client's turn start again

Only a message that is due extends a client's deadline. Other messages are refused, and a client
that reconnects more than `MOST_RETURNS` times in a turn is left out of the round.

If all clients of a round are lost, or the client with the newest head does not reconnect, the run
ends with an error that names the clients; the run can be resumed once the clients are back.

A head that a client sends to another client is encrypted: the server sees only the receiver.
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

from dure.errors import DureError, LossNotFiniteError
from dure.fleet.virtual_network import Transmission, nbytes
from dure.machine.devices import CPU
from dure.protocol.channels import Channels, ClientConnected, ClientDisconnected, ClientFrame, Event
from dure.record.meter import Meter
from dure.split.activity_log import ActivityLog
from dure.split.blame import ADVICE, CannotComputeError, InvalidMessageError, NotANumberError
from dure.split.compressed import CutCompression
from dure.split.message_order import FromClient
from dure.split.messages import (
    SERVER,
    Envelope,
    Message,
    Pass,
    SideState,
    Smashed,
    client,
)
from dure.split.network.admission import MOST_RETURNS, MOST_SHOWN, Admission
from dure.split.network.checks import BatchSizes, Checks, ClientMessage, MeasurementProgress
from dure.split.network.control import (
    ClientFailed,
    Final,
    HeadRefused,
    MeasureModel,
    ModelMeasured,
    Query,
    RosterMembers,
    SealedHead,
)
from dure.split.network.frames import Frame, SplitFrameError, decode, encode, values_on
from dure.split.server import TailServer

LAST = 5.0
"""Seconds for a last measurement after the end of the run was requested."""

PULSE = 0.5
"""Seconds between two updates of the terminal."""

MOMENT = 0.2
"""Seconds between two looks at the clock and at requests to stop."""

BUSY = 1.0
"""Threshold in seconds: between two events the server itself was busy, and deadlines are extended.
"""

Tell = Callable[[str], None]


class ClientsLostError(DureError):
    """No client is left to continue the run."""


class CheckInData(NamedTuple):
    """Data of the clients at check-in, by number: batch sizes, and test examples (-1: unknown)."""

    sizes: Sequence[BatchSizes]
    tests: Sequence[int]


class SplitServer:
    """Server of a run.

    Args:
        server: the state machine of the server.
        channels: to the clients.
        checks: checks of the clients' messages.
        clients: data of the clients at check-in.
        meters: the server's meter, then the clients' in order.
        entrance: admission of clients that reconnect.
        told: message to each client that connects.
        account: record of messages and of the server's compute time.
        exchange: makes the compression of the values at the cuts; None without compression.
        tell: receives messages about lost clients.
        show: receives the state of the run, at most every `PULSE` seconds.
        kept: called when a turn counts, before the next turn begins.
        device: device of the server's part.
    """

    def __init__(
        self,
        server: TailServer,
        channels: Channels,
        checks: Checks,
        clients: CheckInData,
        meters: Sequence[Meter],
        entrance: Admission,
        told: RosterMembers,
        account: ActivityLog,
        exchange: Callable[[], CutCompression] | None,
        tell: Tell,
        show: Callable[[dict[str, Any]], None],
        kept: Callable[[], None],
        device: torch.device = CPU,
    ) -> None:
        self.device = device
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
        """Reason for the loss of each lost client."""
        self._since: dict[str, float] = {}
        """Time since which a client is disconnected, or a message of it is awaited."""
        self._refused: set[str] = set()
        """Rejected clients."""
        self._diverged: dict[str, str] = {}
        """For each client among them whose batches contained NaN: the round."""
        self._returns: Counter[str] = Counter()
        """Number of reconnects of each client since the last turn that counts."""
        self._looked = time.monotonic()
        self._handing: dict[str, str] = {}
        """Receiver of the head, by the name of the client that has to send it."""
        self._late_heads: dict[str, set[int]] = {}
        """Turns for which a client was asked for its head, and which have since been rolled back.
        """
        self._exchanges: dict[str, CutCompression] = {}
        self._began: dict[str, Smashed] = {}
        """The current batch of each client, without its tensors."""
        self._shown = 0.0
        self._measured: dict[str, float] | None = None
        self._measurer: str | None = None
        self._measuring = MeasurementProgress(MeasureModel(0, -1), -1)
        """Newest measurement, and its progress."""
        # All clients have been admitted.
        for name in self.order.everyone:
            self._enters(name)

    # A round

    def round(self, round: int, ends: Callable[[], bool]) -> bool:
        """Train until the round is over; return False if `ends` returns True before.

        Raises ClientsLostError and LossNotFiniteError.
        """
        self.account.begin(round)
        self._returns.clear()
        if self.order.over:
            # Do not wait for rejected clients; they may reconnect.
            self.absent = frozenset(self._refused - self.here)
            said = self.server.begin(round, self.absent)
        # A run that was interrupted continues in the middle of a round.
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
        """Process the next event. A client whose message is already queued has not timed out."""
        self._forgives(time.monotonic() - self._looked)
        event = self.channels.next(MOMENT)
        self._looked = time.monotonic()
        self._happens(event)
        self._shows()
        # Check timeouts only after other events, since more messages may be queued.
        # A client that only reconnects has sent no message.
        if not isinstance(event, ClientFrame):
            self._look()

    def _forgives(self, seconds: float) -> None:
        """Extend all deadlines by the time that the server itself was busy."""
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
        if isinstance(event, ClientConnected):
            self._comes(name, event)
        elif isinstance(event, ClientDisconnected):
            self._goes(name, event.why)
        elif name in self.here:
            self._hears(name, event)

    def _look(self) -> None:
        """Drop a client that has exceeded its deadline."""
        now = time.monotonic()
        awaited = self._awaited()
        # A client whose message was not due is not late.
        for name in self.here - set(awaited):
            self._since.pop(name, None)
        for name in awaited:
            since = self._since.setdefault(name, now)
            if now - since <= self.channels.answer_timeout:
                continue
            if name in self.here:
                self._fails(name, f"said nothing for {self.channels.answer_timeout:g} s")
            else:
                self._without([name])
            return

    def look(self) -> dict[str, Any]:
        """Return the connected and the awaited clients, for display."""
        awaited = self._awaited()
        missing = [name for name in awaited if name not in self.here]
        left = [
            self.channels.answer_timeout - (time.monotonic() - self._since[name])
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
        """Return the clients whose message is awaited; a sender of a head precedes its receiver."""
        if self._measurer is not None:
            return [self._measurer]
        receivers = set(self._handing.values())
        return [*self._handing, *(x for x in self.server.awaited() if x not in receivers)]

    # Connected clients

    def _enters(self, name: str) -> None:
        self.here.add(name)
        self._diverged.pop(name, None)
        self._refused.discard(name)
        self._since.pop(name, None)
        self._send(name, self.told)

    def _comes(self, name: str, event: ClientConnected) -> None:
        if not self.entrance.lets_in(event):
            return
        self._enters(name)
        needed = name == self._measurer or name in self.order.turns or name in self._handing
        if not needed:
            return
        self._returns[name] += 1
        if self._returns[name] > MOST_RETURNS:
            self._fails(name, f"it has reconnected {MOST_RETURNS} times in one turn")
        elif name == self._measurer:
            self._asks_to_measure(name)
        else:
            self._anew(self.absent)

    def _goes(self, name: str, why: str) -> None:
        # A rejected client has been removed already, with its own reason.
        if name not in self.here:
            return
        self.here.discard(name)
        self._since[name] = time.monotonic()
        self.reasons[name] = why
        self.tell(f"{name} is disconnected: {why}")

    def _fails(self, name: str, reason: str) -> None:
        """Reject a client, and continue without it."""
        self._refuses(name, reason)
        self._without([name])

    def _refuses(self, name: str, reason: str) -> None:
        self.here.discard(name)
        self.reasons[name] = reason
        self._refused.add(name)
        self.channels.reject(number_of(name), reason)

    def _without(self, names: Sequence[str]) -> None:
        """Continue the round without these clients."""
        for name in names:
            self._tells_of(name, self.reasons.get(name, "it has not reconnected"))
        if self._measurer in names:
            self._measurer = None
        needed = [name for name in names if self._is_needed(name)]
        for name in set(names) - set(needed):
            self.order.leave_out(name)
            self.absent = self.order.absent
        if needed:
            self._anew(self.absent | set(needed))

    def _is_needed(self, name: str) -> bool:
        """Return whether the turns in progress cannot continue without this client."""
        return name in self.order.turns

    def _tells_of(self, name: str, reason: str) -> None:
        """Report that a client is left out. Raises ClientsLostError if the run cannot continue."""
        if name in self._handing:
            raise ClientsLostError(
                f"{name} has the newest head, but does not send it in round "
                f"{self.order.round + 1}: {reason}; resume the run when {name} is connected again"
            )
        if name == self._measurer:
            self.tell(f"{name} does not evaluate the model: {reason}")
        else:
            self.tell(f"{name} is left out of this round: {reason}")

    def _anew(self, absent: frozenset[str]) -> None:
        """Start again everything since the newest turn that counts."""
        self.absent = absent
        self._set_back()
        self._say(self.server.again(absent))
        if self.order.over and absent >= set(self.order.everyone):
            self._nobody_left()

    def _set_back(self) -> None:
        # A head that was requested before the rollback may still arrive: discard it then.
        for name, to in self._handing.items():
            self._late_heads.setdefault(name, set()).add(self.order.turns.get(to, -1))
        self._handing.clear()
        self._began.clear()
        self.server.back()
        for name in self.here:
            self._since.pop(name, None)

    def _nobody_left(self) -> None:
        """Raise the error that ends the run."""
        if self._diverged.keys() >= set(self.order.everyone):
            when = next(iter(self._diverged.values()))
            raise LossNotFiniteError(math.nan, " and ".join(sorted(self._diverged)), when)
        why = "; ".join(f"{name}: {reason}" for name, reason in sorted(self.reasons.items()))
        raise ClientsLostError(
            f"no client is left to train ({why}); resume the run when one is connected"
        )

    # Messages of clients

    def _hears(self, name: str, event: ClientFrame) -> None:
        try:
            frame = decode(event.frame)
            self._deals(name, frame)
        except (SplitFrameError, InvalidMessageError) as error:
            if isinstance(error, NotANumberError):
                self._diverged[name] = f"round {self.order.round + 1}"
            self._fails(name, f"sent an invalid message: {error}")
        except CannotComputeError as error:
            self._cannot_compute(error)
        except LossNotFiniteError:
            self._set_back()
            raise

    def _cannot_compute(self, error: CannotComputeError) -> None:
        """Reject the clients whose values make the server's computation fail."""
        for name, reason in error.reasons.items():
            if error.diverged:
                self._diverged[name] = f"round {self.order.round + 1}"
            self._refuses(name, f"sent an invalid message: {reason}")
        self._without(list(error.reasons))

    def _deals(self, name: str, frame: Frame) -> None:
        size = nbytes(frame)
        self.meters[1 + number_of(name)].sent(size)
        self.meters[0].received(size)
        self._passed(name, SERVER, frame, size)
        if isinstance(frame, ClientFailed):
            self._fails(name, f"its own code raised: {frame.reason[:MOST_SHOWN]}")
        elif isinstance(frame, HeadRefused):
            self._refuses_head(name, frame)
        elif isinstance(frame, SealedHead):
            self._relays(name, frame)
        elif isinstance(frame, Query):
            self._answers(name, frame)
        elif isinstance(frame, ModelMeasured):
            self._check_measures(name, frame)
            self._measured = self.checks.measured(frame, self._measuring)
        elif isinstance(frame, FromClient):
            self._trains(name, frame)
        else:
            raise InvalidMessageError(f"a client does not send {type(frame).__name__}")

    def _trains(self, name: str, message: FromClient) -> None:
        if message.turn != self.order.turns.get(name):
            # A message of a turn that was rolled back is discarded, not an error.
            if self.server.due.is_late(name, message.turn):
                return
            raise InvalidMessageError(
                f"{type(message).__name__} of turn {message.turn} is not expected"
            )
        whole = self.server.whole
        message = self._checked(name, message)
        self._since.pop(name, None)
        began = time.perf_counter()
        try:
            said = self.server.receive(name, message, time.monotonic())
        except ValueError as error:
            raise InvalidMessageError(str(error)) from error
        took = time.perf_counter() - began
        self.meters[0].counters.compute_seconds += took
        self.account.did(SERVER, "tail", began - self._clock, took)
        if self.server.whole is not whole:
            self._returns.clear()
            self.kept()
        self._say(said)
        self.server.meanwhile()

    def _checked(self, name: str, message: FromClient) -> FromClient:
        """Return a message that is due, decompressed. Raises WrongError."""
        try:
            self.server.due.check(name, message)
            message = values_on(message, self.device)
            if name in self._handing.values():
                raise InvalidMessageError(
                    "values were sent before the head with which the turn starts"
                )
            heard = ClientMessage(
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
        except (InvalidMessageError, MemoryError, torch.OutOfMemoryError):
            raise
        # A message that cannot be decompressed is the sender's fault, whatever a decoder raises.
        except Exception as error:
            raise InvalidMessageError(str(error)) from error
        if isinstance(checked, Smashed):
            self._began[name] = msgspec.structs.replace(checked, values=(), targets=None)
        return checked

    def _relays(self, name: str, sealed: SealedHead) -> None:
        """Forward an encrypted head to its receiver."""
        to = client(sealed.peer)
        if self._handing.get(name) != to or self.order.turns.get(to) != sealed.turn:
            late = self._late_heads.get(name, set())
            if sealed.turn not in late:
                raise InvalidMessageError(f"a head for {to} was sent, but not requested")
            late.discard(sealed.turn)
            return
        if sealed.content.dtype != torch.uint8 or sealed.content.ndim != 1:
            raise InvalidMessageError("a sealed head has to be bytes")
        del self._handing[name]
        self._since.pop(name, None)
        self._send(to, SealedHead(sealed.turn, number_of(name), sealed.content))

    def _refuses_head(self, name: str, refused: HeadRefused) -> None:
        """Process a client's refusal of an invalid head: it is left out, without being rejected."""
        turn = self.order.turns.get(name)
        if refused.turn != turn:
            if self.server.due.is_late(name, refused.turn):
                return
            raise InvalidMessageError("a head is rejected that was not sent")
        begun = self.server.due.turns[name]
        if not begun.comes or name in self._began or name in self._handing.values():
            raise InvalidMessageError("a head is rejected that was not sent")
        self.reasons[name] = f"it rejects the head that it received: {refused.reason[:MOST_SHOWN]}"
        self._without([name])

    def _with(self, name: str) -> CutCompression:
        """Return the compression between the server and a client."""
        assert self.exchange is not None
        return self._exchanges.setdefault(name, self.exchange())

    # Messages of the server

    def _say(self, said: Sequence[Envelope]) -> None:
        for name, message in said:
            if isinstance(message, Pass):
                self._handing[name] = message.to
                # Its deadline starts now, even if it has been disconnected for long.
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

    def final(self, head: SideState) -> None:
        """Send the final head to all connected clients."""
        for name in self.here:
            self._send(name, Final(head))

    def _passed(self, sender: str, receiver: str, frame: Frame, size: int) -> None:
        """Record a message; the server cannot know the transmission time."""
        if size:
            now = time.perf_counter() - self._clock
            self.account.passed(Transmission(sender, receiver, frame, size, now, now, now, now))

    # Evaluation by a client that has the head

    def measure(
        self, name: str, round: int, ends: Callable[[], bool], head: SideState | None
    ) -> dict[str, float]:
        """Return a client's metrics on its test data; empty without test data or for a lost client.

        head: the head to measure; None for the client's own newest head.
        """
        if name not in self.here:
            return {}
        self._measurer = name
        measure = MeasureModel(round, self.order.since.get(name, -1), head)
        self._measuring = MeasurementProgress(measure, self.clients.tests[number_of(name)])
        self._returns.clear()
        self._asks_to_measure(name)
        try:
            until = math.inf
            while self._measured is None and self._measurer and time.monotonic() < until:
                # After a request to stop, wait at most LAST seconds for a last measurement.
                if ends():
                    until = min(until, time.monotonic() + LAST)
                self._goes_on()
        finally:
            self._measurer = None
        return self._measured or {}

    def _asks_to_measure(self, name: str) -> None:
        """Start the measurement from the beginning; parts from before a disconnect do not count."""
        self._measured = None
        self.checks.forget()
        self._measuring = MeasurementProgress(self._measuring.measure, self._measuring.tests)
        self._send(name, self._measuring.measure)

    def _check_measures(self, name: str, frame: Query | ModelMeasured) -> None:
        """Raise WrongError for a measurement message of a client that was not asked for it."""
        if name != self._measurer:
            raise InvalidMessageError(
                f"{type(frame).__name__} was sent, but no evaluation was requested"
            )
        self._since.pop(name, None)

    def _answers(self, name: str, query: Query) -> None:
        self._check_measures(name, query)
        self._send(name, self.checks.answered(values_on(query, self.device), self._measuring))


def number_of(name: str) -> int:
    """Return the number of a client, by its name."""
    assert name != SERVER
    return int(name.removeprefix("client "))
