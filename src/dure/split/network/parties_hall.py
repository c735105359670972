"""The holder of the labels, parties elsewhere, and who is there.

    a party comes      Hello; the roster; all begin anew from the newest step that all have kept
    a party speaks     what it says is dealt with, and the answers go out
    a party is gone    it is waited for: nobody can train without its columns
    it stays away for `lasts`, says nothing for so long, says what cannot be, or its code raises:
                       the run ends with an error that names it, and can be resumed

Steps that were made after the newest that all have kept are made once more, by the same bits. What
parties have said before they heard of it is dropped. Only what is due puts a party's deadline off,
and a party that comes again more than `MOST_RETURNS` times without a new step is not waited for.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from dure.contracts.channels import Came, Channels, Event, Gone, Said
from dure.errors import DureError, LossNotFiniteError
from dure.fleet.virtual import nbytes
from dure.record.meter import Meter
from dure.split.alignment import NobodyError
from dure.split.network.control import Failed, Members
from dure.split.network.entrance import MOST_RETURNS, MOST_SHOWN, Entrance
from dure.split.network.frames import Frame, FrameError, decode, encode
from dure.split.network.parties_control import (
    Evaluate,
    Evaluated,
    Keep,
    Kept,
    Resume,
    Resumed,
)
from dure.split.parties.messages import party

MOMENT = 0.2
"""Seconds between two looks at the clock and at wishes to end."""

MOST_LATE = 1 << 13
"""Messages of a party that are dropped, as of a turn before, until it has begun the newest one."""

PULSE = 0.5
"""Seconds between two looks that a terminal gets."""


Question = Keep | Evaluate
CheckAnswer = Callable[[str, Any, Any], None]
"""check(name, question, answer) raises ValueError for an answer that cannot be."""


def _anything(name: str, question: Any, answer: Any) -> None:
    """Whatever has the right kind may be an answer."""


class PartyLostError(DureError):
    """A party is needed, and does not take part."""


class Work(Protocol):
    """What is done with the parties, one step after another.

    done: steps that are made.
    """

    @property
    def done(self) -> int: ...

    @property
    def waits_for(self) -> Sequence[str]:
        """Whose message is next."""

    def back(self) -> int:
        """Back to what all have kept; what they are told: `Resume.step`."""

    def begin(self) -> list[tuple[str, Any]]:
        """The next step begins."""

    def receive(self, sender: str, message: Any) -> list[tuple[str, Any]]:
        """What is said to a message. Raises ValueError for one that cannot be."""


class PartiesHall:
    """Of one run.

    parties: the numbers of those who are elsewhere, in the order of their channels. meters: of the
    holder, and by name of the parties. tell: hears of what goes wrong; show, now and then, of who
    is there. interrupted: whether the user wants it to end.
    """

    def __init__(
        self,
        channels: Channels,
        entrance: Entrance,
        parties: Sequence[int],
        meters: tuple[Meter, Mapping[str, Meter]],
        tell: Callable[[str], None],
        show: Callable[[dict[str, Any]], None],
        interrupted: Callable[[], bool],
    ) -> None:
        self.channels = channels
        self.entrance = entrance
        self.names = [party(number) for number in parties]
        self.meter, self.meters = meters
        self.tell = tell
        self.show = show
        self.interrupted = interrupted
        self.work: Work | None = None
        self._here: set[str] = set()
        self._ready: set[str] = set()
        """Those who have begun the newest turn."""
        self._turn = 0
        self._target = 0
        self._under_way = False
        """Whether a step has begun and is not over."""
        self._question: Question | None = None
        self._asked = False
        self._answers: dict[str, Any] = {}
        self._check_answer: CheckAnswer = _anything
        self._returns: Counter[str] = Counter()
        """How often each has come again since there was a new step."""
        self._late: Counter[str] = Counter()
        """Messages of each that were dropped."""
        self._farthest = 0
        """The most steps of the work that were made."""
        self._since: dict[str, float] = {}
        """Since when somebody is waited for."""
        self._reasons: dict[str, str] = {}
        self._shown = 0.0
        for name in self.names:
            self._enters(name)

    # What the learner asks for

    def does(self, work: Work) -> None:
        """Begins something else, from what all have kept of it."""
        self.work = work
        self._farthest = 0
        self._returns.clear()
        self._target = work.done
        self._anew()

    def reach(self, step: int) -> None:
        """Until so many steps are made.

        Raises PartyLostError, LossNotFiniteError, and KeyboardInterrupt where it is interrupted
        while somebody is waited for.
        """
        assert self.work is not None
        self._target = step
        self._goes_on()
        while self.work.done < step or self._under_way or len(self._ready) < len(self.names):
            self._moment()

    def ask(self, question: Question, check: CheckAnswer | None = None) -> dict[str, Any]:
        """What all parties answer, by name. Raises as `reach` does.

        check: of an answer, by the name of a party and the question; raises ValueError.
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

    # Who is there

    def _moment(self) -> None:
        event = self.channels.next(MOMENT)
        # Steps are short: an interrupt waits for the end of one, but not for who is gone.
        if len(self._here) < len(self.names) and self.interrupted():
            raise KeyboardInterrupt
        if event is not None:
            self._happens(event)
        # Nobody is late whose message only waits to be heard; who comes and goes says nothing.
        self._look(late=not isinstance(event, Said))

    def _happens(self, event: Event) -> None:
        name = self.names[event.client]
        if isinstance(event, Came):
            if self.entrance.lets_in(event):
                self._comes(name)
        elif isinstance(event, Gone):
            self._here.discard(name)
            self._ready.discard(name)
            self._reasons[name] = event.why
            self._since[name] = time.monotonic()
            self.tell(f"{name} is gone, and waited for: {event.why}")
        elif name in self._here:
            self._hears(name, event.frame)

    def _comes(self, name: str) -> None:
        self._returns[name] += 1
        if self._returns[name] > MOST_RETURNS:
            self.channels.turn_away(self.names.index(name), "it has come again too often")
            self._lost(name, f"has come again {MOST_RETURNS} times without a new step")
        self._enters(name)
        self._anew()

    def _look(self, late: bool) -> None:
        """Who has been waited for long enough? late: whether that is asked now."""
        now = time.monotonic()
        if now - self._shown > PULSE:
            self._shown = now
            self.show(self.look())
        lasts = self.channels.lasts
        for name in self._awaited() if late else ():
            if now - self._since.setdefault(name, now) > lasts:
                gone = f"has not come again within {lasts:g} s: {self._reasons.get(name, '')}"
                self._lost(name, f"said nothing for {lasts:g} s" if name in self._here else gone)

    def look(self) -> dict[str, Any]:
        """Who is there and what is waited for, as terminals show it."""
        awaited = self._awaited()
        now = time.monotonic()
        measuring = isinstance(self._question, Evaluate)
        left = [self.channels.lasts - (now - self._since.get(name, now)) for name in awaited]
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
        """A party has said what cannot be: it hears so, and the run ends."""
        reason = f"sent what cannot be: {why}"
        self.channels.turn_away(self.names.index(name), reason)
        self._lost(name, reason)

    def _lost(self, name: str, reason: str) -> NoReturn:
        raise PartyLostError(
            f"{name} {reason}; nobody can train without its columns: resume the run when it is "
            f"there again"
        )

    def _enters(self, name: str) -> None:
        assert self.entrance.roster is not None
        self._here.add(name)
        self._since.pop(name, None)
        self._send(name, Members(self.entrance.roster.to_json()))

    # What is said

    def _anew(self) -> None:
        """Everybody goes back to what all have kept."""
        assert self.work is not None
        self._turn += 1
        self._ready.clear()
        self._answers.clear()
        self._asked = self._under_way = False
        step = self.work.back()
        for name in self.names:
            self._send(name, Resume(self._turn, step))

    def _goes_on(self) -> None:
        """The next step, or the question, if all are there and nothing is under way."""
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
        except NobodyError:
            raise
        # What cannot be decoded, is not due, or has another shape than was agreed upon.
        except ValueError as error:
            self.refuses(name, str(error))
        except LossNotFiniteError as error:
            # Parties are in the midst of the step: the newest that all have kept is what is kept.
            error.intact = False
            raise

    def _deals(self, name: str, frame: Frame) -> None:
        size = nbytes(frame)
        self.meters[name].sent(size)
        self.meter.received(size)
        if isinstance(frame, Failed):
            self._lost(name, f"cannot go on: its own code raised {frame.reason[:MOST_SHOWN]}")
        elif isinstance(frame, Resumed):
            self._resumes(name, frame)
        elif name not in self._ready:
            # Of a turn before.
            self._late[name] += 1
            if self._late[name] > MOST_LATE:
                raise FrameError(f"{MOST_LATE} messages came, and Resumed is due")
        elif isinstance(frame, Kept | Evaluated):
            self._answered(name, frame)
        else:
            self._trains(name, frame)

    def _resumes(self, name: str, frame: Resumed) -> None:
        if frame.turn > self._turn or (frame.turn == self._turn and name in self._ready):
            raise FrameError(f"Resumed of turn {frame.turn} is not due")
        if frame.turn == self._turn:
            self._since.pop(name, None)
            self._late[name] = 0
            self._ready.add(name)
            self._goes_on()

    def _answered(self, name: str, frame: Kept | Evaluated) -> None:
        question = self._question
        if not self._asked or name in self._answers or question is None:
            raise FrameError(f"{type(frame).__name__} was not asked for")
        if isinstance(question, Keep):
            due = isinstance(frame, Kept) and frame.step == question.step
        else:
            due = isinstance(frame, Evaluated) and frame.first == question.first
        if not due:
            raise FrameError(f"{type(frame).__name__} is no answer to {question}")
        self._check_answer(name, question, frame)
        self._since.pop(name, None)
        self._answers[name] = frame

    def _trains(self, name: str, frame: Any) -> None:
        assert self.work is not None
        if not self._under_way:
            raise FrameError(f"{type(frame).__name__} came, and no step is under way")
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
