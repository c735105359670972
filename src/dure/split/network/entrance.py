"""Who takes part: the server waits until all clients have come, and signs the roster of them.

From then on each client is who it was: the same keys, and as many examples, also in a run that was
resumed. A client that says something that cannot be is turned away, and another one waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from dure.contracts.channels import Came, Channels, Said
from dure.record.disk import write_atomically
from dure.record.inside import contents
from dure.split.network.checks import MOST_EXAMPLES
from dure.split.network.control import Failed, Hello
from dure.split.network.frames import FrameError, decode
from dure.wire.boxes import Member
from dure.wire.roster import Roster

ROSTER = "roster.json"
"""In the run folder: who takes part, signed."""

EXAMPLES = "examples.json"
"""In the run folder: how many examples each client has, by its number."""

MOST_HELLO = 1 << 16
MOST_HEAD = 1 << 34
MOMENT = 0.2

MOST_RETURNS = 8
"""Times that a client may come again until something counts: a turn, or a step of all parties."""

MOST_SHOWN = 500
"""Characters of a client's reason that are shown."""

Check = Callable[[Hello], None]
"""Raises ValueError for what a client says of itself, and cannot be in this run."""


def anything(hello: Hello) -> None:
    """Whatever a client says of itself may be."""


class Entrance:
    """Of a run of so many clients. tell: hears of who is waited for, and of who is turned away.

    check: of what clients say of themselves, besides what holds in all runs.
    """

    def __init__(
        self,
        channels: Channels,
        clients: int,
        tell: Callable[[str], None],
        check: Check = anything,
    ) -> None:
        self.channels = channels
        self._check_more = check
        self.clients = clients
        self.tell = tell
        self.hellos: dict[int, Hello] = {}
        """What each has said when it came first."""
        self._examples: dict[int, int] = {}
        """How many examples each has, in this process or one before."""
        self._here = -1
        self._members: dict[int, Member] = {}
        path = channels.folder / ROSTER
        self.roster = Roster.from_json(contents(path)) if path.exists() else None
        if self.roster is not None:
            self._members = {member.number: member for member in self.roster.members}
            self._examples = _read(channels.folder / EXAMPLES)

    def wait(self, interrupted: Callable[[], bool]) -> Roster:
        """Until all are there; the roster. Raises KeyboardInterrupt."""
        here: set[int] = set()
        while len(here) < self.clients:
            self._waits(len(here))
            event = self.channels.next(MOMENT)
            if interrupted():
                raise KeyboardInterrupt
            if isinstance(event, Came):
                if self.lets_in(event):
                    here.add(event.client)
            elif event is not None:
                here.discard(event.client)
                if isinstance(event, Said):
                    self._too_early(event)
        write_atomically(self.channels.folder / EXAMPLES, msgspec.json.encode(self._examples))
        if self.roster is None:
            members = self._members.values()
            self.roster = Roster.signed(self.channels.run, members, self.channels.key)
            write_atomically(self.channels.folder / ROSTER, self.roster.to_json())
        return self.roster

    def _too_early(self, event: Said) -> None:
        """Turns a client away that says something before all are there."""
        try:
            frame = decode(event.frame)
            said = type(frame).__name__
            reason = (
                f"its own code raised: {frame.reason[:MOST_SHOWN]}"
                if isinstance(frame, Failed)
                else ""
            )
        except ValueError as error:
            said, reason = str(error), ""
        reason = reason or f"nothing is due before all clients are there, and it said: {said}"
        self.tell(f"client {event.client} is turned away: {reason}")
        self.channels.turn_away(event.client, reason)

    def _waits(self, here: int) -> None:
        if here != self._here:
            self._here = here
            self.tell(f"waiting for clients: {here} of {self.clients} are here")

    def lets_in(self, event: Came) -> bool:
        """Whether a client is who it was; others are turned away."""
        try:
            hello = decode(event.hello, MOST_HELLO)
            if not isinstance(hello, Hello):
                raise FrameError("a client begins with Hello")
            member = msgspec.json.decode(hello.member, type=Member)
            self._check(event.client, hello, member)
        except (ValueError, msgspec.MsgspecError) as error:
            reason = str(error)
            self.tell(f"client {event.client} is turned away: {reason}")
            self.channels.turn_away(event.client, reason)
            return False
        self.hellos.setdefault(event.client, hello)
        self._examples.setdefault(event.client, hello.examples)
        self._members.setdefault(event.client, member)
        return True

    def _check(self, number: int, hello: Hello, member: Member) -> None:
        """Raises ValueError for a client that is not who it was."""
        key, _ = self.channels.identity(number)
        itself = member.number == number and member.identity == key
        if not itself or not member.is_true(self.channels.run):
            raise ValueError(f"it is client {number}, and says to be {member} with other keys")
        if member != self._members.get(number, member):
            raise ValueError(
                "it has begun this run with other keys, or another name: go on with the --state "
                "folder that it had"
            )
        before = self._examples.get(number)
        if before is not None and before != hello.examples:
            raise ValueError(
                f"it has begun this run with {before} examples, and has {hello.examples}: go on "
                f"with the same"
            )
        if not 1 <= hello.examples <= MOST_EXAMPLES:
            raise ValueError(
                f"it says that it has {hello.examples:,} examples, and may have 1 to "
                f"{MOST_EXAMPLES:,}"
            )
        if not 0 <= hello.head <= MOST_HEAD:
            raise ValueError(f"it says that its head has {hello.head:,} bytes")
        if not -1 <= hello.tests <= MOST_EXAMPLES:
            raise ValueError(f"it says that it has {hello.tests:,} test examples")
        if len(hello.digest) > 128 or not hello.digest.isalnum():
            raise ValueError("the digest of its weights is none")
        self._check_more(hello)


def _read(path: Path) -> dict[int, int]:
    """The numbers of examples that were written down; nothing by earlier versions."""
    if not path.exists():
        return {}
    return msgspec.json.decode(contents(path), type=dict[int, int])
