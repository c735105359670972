"""Who takes part: the server waits until all clients have come, and signs the roster of them.

From then on each client is who it was: the same keys, and as many examples.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dure.contracts.channels import Came, Channels
from dure.record.disk import write_atomically
from dure.record.inside import contents
from dure.split.network.control import Hello
from dure.split.network.frames import FrameError, decode
from dure.wire.boxes import Member
from dure.wire.roster import Roster

ROSTER = "roster.json"
"""In the run folder: who takes part, signed."""

MOST_HELLO = 1 << 16
MOMENT = 0.2


class Entrance:
    """Of a run of so many clients. tell: hears of who is waited for, and of who is turned away."""

    def __init__(self, channels: Channels, clients: int, tell: Callable[[str], None]) -> None:
        self.channels = channels
        self.clients = clients
        self.tell = tell
        self.hellos: dict[int, Hello] = {}
        """What each has said when it came first."""
        self._here = -1
        self._members: dict[int, Member] = {}
        path = channels.folder / ROSTER
        self.roster = Roster.from_json(contents(path)) if path.exists() else None
        if self.roster is not None:
            self._members = {member.number: member for member in self.roster.members}

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
        if self.roster is None:
            members = self._members.values()
            self.roster = Roster.signed(self.channels.run, members, self.channels.key)
            write_atomically(self.channels.folder / ROSTER, self.roster.to_json())
        return self.roster

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
        before = self.hellos.get(number)
        if before is not None and before.examples != hello.examples:
            raise ValueError(
                f"it has begun this run with {before.examples} examples, and has {hello.examples}"
            )
        if hello.examples < 1:
            raise ValueError("it has no examples")
