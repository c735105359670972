"""Server of vertical split learning over a network: holder of the labels, and connected parties.

    a party connects      Hello; the roster; all start again from the newest step that all saved
    a party sends         the message is processed, and the answers are sent
    a party disconnects   the run waits for it: training needs its columns
    a party fails         it stays away or silent for `answer_timeout`, sends an invalid message, or
                          its code raises: the run ends with an error that names it, and can be
                          resumed

Steps after the newest step that all have saved are repeated, with the same bits. Messages that
parties sent before they received the request to start again are discarded. Only a message that is
due extends a party's deadline, and the run does not wait for a party that reconnects more than
`MOST_RETURNS` times without a new step.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch

from dure.errors import DureError, LossNotFiniteError
from dure.fleet.virtual_network import nbytes
from dure.machine.devices import CPU
from dure.protocol.channels import Channels, ClientConnected, ClientDisconnected, ClientFrame, Event
from dure.record.meter import Meter
from dure.split.alignment import EmptyIntersectionError
from dure.split.network.admission import MOST_RETURNS, MOST_SHOWN, Admission
from dure.split.network.control import (
    ClientFailed,
    Evaluate,
    Evaluated,
    Resume,
    Resumed,
    RosterMembers,
    SaveState,
    StateSaved,
)
from dure.split.network.frames import Frame, SplitFrameError, decode, encode, values_on
from dure.split.parties.messages import party

MOMENT = 0.2
"""Seconds between two looks at the clock and at requests to stop."""

MOST_LATE = 1 << 13
"""Maximum number of discarded messages of a party before it begins the newest turn."""

PULSE = 0.5
"""Seconds between two updates of the terminal."""


Question = SaveState | Evaluate
CheckAnswer = Callable[[str, Any, Any], None]
"""check(name, question, answer): raises ValueError for an invalid answer."""


def _anything(name: str, question: Any, answer: Any) -> None:
    """Accept every answer of the right type."""


class PartyLostError(DureError):
    """A party that the run needs is lost."""


class PartiesWork(Protocol):
    """Task of the parties, in steps.

    done: number of finished steps.
    """

    @property
    def done(self) -> int: ...

    @property
    def waits_for(self) -> Sequence[str]:
        """Names of the parties whose message is next."""

    def back(self) -> int:
        """Return to the state that all have saved; return the `Resume.step` for the parties."""

    def begin(self) -> list[tuple[str, Any]]:
        """Return the messages that begin the next step."""

    def receive(self, sender: str, message: Any) -> list[tuple[str, Any]]:
        """Process a message and return the replies. Raises ValueError for an invalid message."""


class VerticalSplitServer:
    """Server of a vertical split learning run.

    Args:
        channels: to the parties.
        entrance: admission of parties that reconnect.
        parties: numbers of the parties in other processes, in the order of their channels.
        meters: the holder's meter, and the parties' meters by name.
        tell: receives messages about lost parties.
        show: receives the state of the run, at most every `PULSE` seconds.
        interrupted: whether the user has interrupted the run.
        device: device of the holder's parts.
    """

    def __init__(
        self,
        channels: Channels,
        entrance: Admission,
        parties: Sequence[int],
        meters: tuple[Meter, Mapping[str, Meter]],
        tell: Callable[[str], None],
        show: Callable[[dict[str, Any]], None],
        interrupted: Callable[[], bool],
        device: torch.device = CPU,
    ) -> None:
        self.device = device
        self.channels = channels
        self.entrance = entrance
        self.names = [party(number) for number in parties]
        self.meter, self.meters = meters
        self.tell = tell
        self.show = show
        self.interrupted = interrupted
        self.work: PartiesWork | None = None
        self._here: set[str] = set()
        self._ready: set[str] = set()
        """Parties that have begun the newest turn."""
        self._turn = 0
        self._target = 0
        self._under_way = False
        """Whether a step has begun and is not finished."""
        self._question: Question | None = None
        self._asked = False
        self._answers: dict[str, Any] = {}
        self._check_answer: CheckAnswer = _anything
        self._returns: Counter[str] = Counter()
        """Number of reconnects of each party since the last new step."""
        self._late: Counter[str] = Counter()
        """Number of discarded messages of each party."""
        self._farthest = 0
        """Maximum number of finished steps of the work so far."""
        self._since: dict[str, float] = {}
        """Time since which each awaited party is awaited."""
        self._reasons: dict[str, str] = {}
        self._shown = 0.0
        for name in self.names:
            self._enters(name)

    # Interface for the learner

    def does(self, work: PartiesWork) -> None:
        """Begin another work, from the state that all have saved."""
        self.work = work
        self._farthest = 0
        self._returns.clear()
        self._target = work.done
        self._anew()

    def reach(self, step: int) -> None:
        """Run until `step` steps are finished.

        Raises PartyLostError and LossNotFiniteError; KeyboardInterrupt if interrupted while a party
        is disconnected.
        """
        assert self.work is not None
        self._target = step
        self._goes_on()
        while self.work.done < step or self._under_way or len(self._ready) < len(self.names):
            self._moment()

    def ask(self, question: Question, check: CheckAnswer | None = None) -> dict[str, Any]:
        """Return the answers of all parties, by name. Raises the errors of `reach`.

        check: called with a party's name, the question and the answer; raises ValueError.
        """
        self._question, self._answers, self._asked = question, {}, False
        self._check_answer = check or _anything
        try:
            self._goes_on()
            while len(self._answers) < len(self.names):
                self._moment()
            return self._answers
        finally:
            self._question = None

    # Connected parties

    def _moment(self) -> None:
        event = self.channels.next(MOMENT)
        # Steps are short: an interrupt waits for the end of a step, but not for a lost party.
        if len(self._here) < len(self.names) and self.interrupted():
            raise KeyboardInterrupt
        if event is not None:
            self._happens(event)
        # After a message, more messages may be queued, so check timeouts after other events only.
        self._look(late=not isinstance(event, ClientFrame))

    def _happens(self, event: Event) -> None:
        name = self.names[event.client]
        if isinstance(event, ClientConnected):
            if self.entrance.lets_in(event):
                self._comes(name)
        elif isinstance(event, ClientDisconnected):
            self._here.discard(name)
            self._ready.discard(name)
            self._reasons[name] = event.why
            self._since[name] = time.monotonic()
            self.tell(f"{name} is disconnected, and the server waits for it: {event.why}")
        elif name in self._here:
            self._hears(name, event.frame)

    def _comes(self, name: str) -> None:
        self._returns[name] += 1
        if self._returns[name] > MOST_RETURNS:
            self.channels.reject(self.names.index(name), "it has reconnected too often")
            self._lost(name, f"has reconnected {MOST_RETURNS} times without a new step")
        self._enters(name)
        self._anew()

    def _look(self, late: bool) -> None:
        """Update the display, and raise PartyLostError for a party beyond its deadline.

        late: whether to check deadlines now.
        """
        now = time.monotonic()
        if now - self._shown > PULSE:
            self._shown = now
            self.show(self.look())
        answer_timeout = self.channels.answer_timeout
        for name in self._awaited() if late else ():
            if now - self._since.setdefault(name, now) > answer_timeout:
                gone = (
                    f"has not reconnected within {answer_timeout:g} s: "
                    f"{self._reasons.get(name, '')}"
                )
                self._lost(
                    name, f"said nothing for {answer_timeout:g} s" if name in self._here else gone
                )

    def look(self) -> dict[str, Any]:
        """Return the connected and the awaited parties, for display."""
        awaited = self._awaited()
        now = time.monotonic()
        measuring = isinstance(self._question, Evaluate)
        left = [
            self.channels.answer_timeout - (now - self._since.get(name, now)) for name in awaited
        ]
        return {
            "doing": "measuring" if measuring else "training",
            "round": self._target + int(measuring),
            "here": len(self._here),
            "at_work": [name for name in awaited if name in self._here],
            "missing": [name for name in awaited if name not in self._here],
            "left": max(0.0, min(left)) if left else None,
            "outcomes": {},
            "received": self.meter.counters.bytes_received,
            "sent": self.meter.counters.bytes_sent,
        }

    def _awaited(self) -> list[str]:
        missing = [name for name in self.names if name not in self._ready]
        if missing or self.work is None:
            return missing
        if self._under_way:
            return list(self.work.waits_for)
        return [name for name in self.names if self._asked and name not in self._answers]

    def refuses(self, name: str, why: str) -> NoReturn:
        """Reject a party that has sent an invalid message, and end the run."""
        reason = f"sent an invalid message: {why}"
        self.channels.reject(self.names.index(name), reason)
        self._lost(name, reason)

    def _lost(self, name: str, reason: str) -> NoReturn:
        raise PartyLostError(
            f"{name} {reason}; training needs its columns: resume the run when it is connected "
            "again"
        )

    def _enters(self, name: str) -> None:
        assert self.entrance.roster is not None
        self._here.add(name)
        self._since.pop(name, None)
        self._send(name, RosterMembers(self.entrance.roster.to_json()))

    # Messages

    def _anew(self) -> None:
        """Send all parties back to the state that all have saved."""
        assert self.work is not None
        self._turn += 1
        self._ready.clear()
        self._answers.clear()
        self._asked = self._under_way = False
        step = self.work.back()
        for name in self.names:
            self._send(name, Resume(self._turn, step))

    def _goes_on(self) -> None:
        """Begin the next step or ask the question, if all are ready and no step is in progress."""
        assert self.work is not None
        if self._under_way or len(self._ready) < len(self.names):
            return
        if self.work.done < self._target:
            self._under_way = True
            self._say(self.work.begin())
        elif self._question is not None and not self._asked:
            self._asked = True
            for name in self.names:
                self._send(name, self._question)

    def _hears(self, name: str, content: bytes) -> None:
        try:
            frame = decode(content)
            self._deals(name, frame)
        except EmptyIntersectionError:
            raise
        # A message that cannot be decoded, is not due, or does not have the agreed shape.
        except ValueError as error:
            self.refuses(name, str(error))
        except LossNotFiniteError as error:
            # Parties are in the middle of the step: only the newest state that all saved is intact.
            error.intact = False
            raise

    def _deals(self, name: str, frame: Frame) -> None:
        size = nbytes(frame)
        self.meters[name].sent(size)
        self.meter.received(size)
        if isinstance(frame, ClientFailed):
            self._lost(name, f"cannot continue: its own code raised {frame.reason[:MOST_SHOWN]}")
        elif isinstance(frame, Resumed):
            self._resumes(name, frame)
        elif name not in self._ready:
            # A message of an earlier turn.
            self._late[name] += 1
            if self._late[name] > MOST_LATE:
                raise SplitFrameError(
                    f"{MOST_LATE} messages were received, but Resumed was expected"
                )
        elif isinstance(frame, StateSaved | Evaluated):
            self._answered(name, values_on(frame, self.device))
        else:
            self._trains(name, values_on(frame, self.device))

    def _resumes(self, name: str, frame: Resumed) -> None:
        if frame.turn > self._turn or (frame.turn == self._turn and name in self._ready):
            raise SplitFrameError(f"Resumed of turn {frame.turn} is not expected")
        if frame.turn == self._turn:
            self._since.pop(name, None)
            self._late[name] = 0
            self._ready.add(name)
            self._goes_on()

    def _answered(self, name: str, frame: StateSaved | Evaluated) -> None:
        question = self._question
        if not self._asked or name in self._answers or question is None:
            raise SplitFrameError(f"{type(frame).__name__} was not requested")
        if isinstance(question, SaveState):
            due = isinstance(frame, StateSaved) and frame.step == question.step
        else:
            due = isinstance(frame, Evaluated) and frame.first == question.first
        if not due:
            raise SplitFrameError(f"{type(frame).__name__} is not an answer to {question}")
        self._check_answer(name, question, frame)
        self._since.pop(name, None)
        self._answers[name] = frame

    def _trains(self, name: str, frame: Any) -> None:
        assert self.work is not None
        if not self._under_way:
            raise SplitFrameError(f"{type(frame).__name__} was sent, but no step is in progress")
        began = time.perf_counter()
        done = self.work.done
        said = self.work.receive(name, frame)
        self._since.pop(name, None)
        self.meter.counters.compute_seconds += time.perf_counter() - began
        if self.work.done > done:
            self._under_way = False
        if self.work.done > self._farthest:
            self._farthest = self.work.done
            self._returns.clear()
        self._say(said)
        self._goes_on()

    def _say(self, said: Sequence[tuple[str, Any]]) -> None:
        for name, message in said:
            self._send(name, message)

    def _send(self, name: str, frame: Frame) -> None:
        if name not in self._here:
            return
        size = nbytes(frame)
        if size:
            self.meter.sent(size)
            self.meters[name].received(size)
        self.channels.say(self.names.index(name), encode(frame))
