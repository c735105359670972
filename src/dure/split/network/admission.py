"""Admission of clients: the server waits for all clients, and signs the roster.

From then on a client has the same keys and the same number of examples, also in a resumed run. A
client with an invalid first message is rejected, and the server waits for another client.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from dure.protocol.channels import Channels, ClientConnected, ClientFrame
from dure.record.disk import write_atomically
from dure.record.untrusted_files import contents
from dure.split.network.checks import MOST_EXAMPLES
from dure.split.network.control import ClientFailed, Hello
from dure.split.network.frames import SplitFrameError, decode
from dure.wire.boxes import Member
from dure.wire.roster import Roster

ROSTER = "roster.json"
"""File in the run folder: the signed roster."""

EXAMPLES = "examples.json"
"""File in the run folder: the number of examples of each client, by its number."""

MOST_HELLO = 1 << 16
MOST_HEAD = 1 << 34
MOMENT = 0.2

MOST_RETURNS = 8
"""Maximum number of reconnects of a client until a turn, or a step of all parties, is complete."""

MOST_SHOWN = 500
"""Maximum number of characters shown of a client's reason."""

Check = Callable[[Hello], None]
"""Raises ValueError for a `Hello` that is invalid in this run."""


def accept_every_hello(hello: Hello) -> None:
    """Accept every `Hello`."""


class Admission:
    """Admission of the clients of a run.

    channels: to the clients. clients: number of clients. tell: receives messages about missing and
    rejected clients. check: checks of a `Hello` in addition to the checks of all runs.
    """

    def __init__(
        self,
        channels: Channels,
        clients: int,
        tell: Callable[[str], None],
        check: Check = accept_every_hello,
    ) -> None:
        self.channels = channels
        self._check_more = check
        self.clients = clients
        self.tell = tell
        self.hellos: dict[int, Hello] = {}
        """First `Hello` of each client."""
        self._examples: dict[int, int] = {}
        """Number of examples of each client, in this process or an earlier process of the run."""
        self._here = -1
        self._members: dict[int, Member] = {}
        path = channels.folder / ROSTER
        self.roster = Roster.from_json(contents(path)) if path.exists() else None
        if self.roster is not None:
            self._members = {member.number: member for member in self.roster.members}
            self._examples = _read(channels.folder / EXAMPLES)

    def wait(self, interrupted: Callable[[], bool]) -> Roster:
        """Wait for all clients; return the roster. Raises KeyboardInterrupt."""
        here: set[int] = set()
        while len(here) < self.clients:
            self._waits(len(here))
            event = self.channels.next(MOMENT)
            if interrupted():
                raise KeyboardInterrupt
            if isinstance(event, ClientConnected):
                if self.lets_in(event):
                    here.add(event.client)
            elif event is not None:
                here.discard(event.client)
                if isinstance(event, ClientFrame):
                    self._too_early(event)
        write_atomically(self.channels.folder / EXAMPLES, msgspec.json.encode(self._examples))
        if self.roster is None:
            members = self._members.values()
            self.roster = Roster.signed(self.channels.run, members, self.channels.key)
            write_atomically(self.channels.folder / ROSTER, self.roster.to_json())
        return self.roster

    def _too_early(self, event: ClientFrame) -> None:
        """Reject a client that sends a message before all clients have joined."""
        try:
            frame = decode(event.frame)
            said = type(frame).__name__
            reason = (
                f"its own code raised: {frame.reason[:MOST_SHOWN]}"
                if isinstance(frame, ClientFailed)
                else ""
            )
        except ValueError as error:
            said, reason = str(error), ""
        reason = reason or f"it sent a message before all clients were connected: {said}"
        self.tell(f"client {event.client} is rejected: {reason}")
        self.channels.reject(event.client, reason)

    def _waits(self, here: int) -> None:
        if here != self._here:
            self._here = here
            self.tell(f"waiting for clients: {here} of {self.clients} are connected")

    def lets_in(self, event: ClientConnected) -> bool:
        """Return whether a client may join; reject a client whose identity has changed."""
        try:
            hello = decode(event.hello, MOST_HELLO)
            if not isinstance(hello, Hello):
                raise SplitFrameError("the first message of a client has to be Hello")
            member = msgspec.json.decode(hello.member, type=Member)
            self._check(event.client, hello, member)
        except (ValueError, msgspec.MsgspecError) as error:
            reason = str(error)
            self.tell(f"client {event.client} is rejected: {reason}")
            self.channels.reject(event.client, reason)
            return False
        self.hellos.setdefault(event.client, hello)
        self._examples.setdefault(event.client, hello.examples)
        self._members.setdefault(event.client, member)
        return True

    def _check(self, number: int, hello: Hello, member: Member) -> None:
        """Raise ValueError for an invalid `Hello`, or a client whose identity has changed."""
        key, _ = self.channels.identity(number)
        itself = member.number == number and member.identity == key
        if not itself or not member.is_true(self.channels.run):
            raise ValueError(f"it is client {number}, but identifies as {member} with other keys")
        if member != self._members.get(number, member):
            raise ValueError(
                "it started this run with other keys, or another name: use its former --state "
                "folder"
            )
        before = self._examples.get(number)
        if before is not None and before != hello.examples:
            raise ValueError(
                f"it started this run with {before} examples, but has {hello.examples} now: use "
                "the same examples"
            )
        if not 1 <= hello.examples <= MOST_EXAMPLES:
            raise ValueError(
                f"it reports {hello.examples:,} examples, but can have 1 to {MOST_EXAMPLES:,}"
            )
        if not 0 <= hello.head <= MOST_HEAD:
            raise ValueError(f"it reports that its head has {hello.head:,} bytes")
        if not -1 <= hello.tests <= MOST_EXAMPLES:
            raise ValueError(f"it reports {hello.tests:,} test examples")
        if len(hello.digest) > 128 or not hello.digest.isalnum():
            raise ValueError("the digest of its weights is invalid")
        self._check_more(hello)


def _read(path: Path) -> dict[int, int]:
    """Return the recorded numbers of examples; empty in a run folder of an earlier version."""
    if not path.exists():
        return {}
    return msgspec.json.decode(contents(path), type=dict[int, int])
