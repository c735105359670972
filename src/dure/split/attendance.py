"""Clients of a simulation who are not always there, and what becomes of the turns of those who go.

    a turn is to begin    and its client is away: it takes no part in the round
    a client leaves       or drops out in a turn: all of the turn is taken back, at the server and
                          at the client, which takes no part in the round any more
    then                  what can begin without it begins (`dure.split.orders`): in turn, the next
                          client from the head of the one before; in rounds of all at once, the
                          round

Where clients hand heads on among themselves, and whoever has the newest one is away, all wait for
it. Where nobody is there at the beginning of a round, all wait for the first who is.

A client leaves by its `Availability`, and drops out with a probability for each round, behind the
values of a step of its turn that is drawn too. Both are functions of the seed: a client that would
have gone goes in the same round and step, however often the round begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dure.errors import TooFewClientsError
from dure.fleet.conditions import Conditions
from dure.fleet.virtual import Envelope, Message, Node
from dure.randomness.chance import uniform
from dure.split.messages import Ended, Pass, Smashed, Turn
from dure.split.server import Server


class Attendance:
    """The server, which knows who is there.

    seen: the server as messages reach it. lost: called with the name of a client that is gone: of
    what it says and is told, nothing is on its way any more.
    """

    def __init__(
        self,
        server: Server,
        seen: Node,
        conditions: Conditions,
        seed: int,
        lost: Callable[[str], None],
    ) -> None:
        self.server = server
        self.seen = seen
        self.conditions = conditions
        self.seed = seed
        self.lost = lost
        self.gone: set[str] = set()
        """Those who went in the midst of a turn of this round."""
        self.failed = 0
        """Turns that ended so, since somebody took them."""
        self._away: set[str] = set()
        """Those who were not there for their turn."""
        self._leaves: dict[str, float] = {}
        """When those leave who are needed."""
        self._drops: dict[str, int] = {}
        """Behind which step of its turn a client drops out."""
        self._passing: str | None = None
        """Who hands the head on."""
        self._resumes = math.inf
        """When whoever is waited for is there again."""
        server.keeps = True

    # Who is there

    def opens(self, now: float) -> float:
        """When a round can begin: once there is somebody to begin it.

        Raises TooFewClientsError if there never is.
        """
        steps = self.server.order.amounts.steps
        first = min(
            self._next(name, now)
            for name, own in zip(self.server.order.everyone, steps, strict=True)
            if own
        )
        if first == math.inf:
            raise TooFewClientsError(
                f"no client will be there again after {now:g} seconds: by the availability "
                f"{self.conditions.availability} all have left for the last time"
            )
        return first

    def begin(self, round: int, now: float) -> list[Envelope]:
        """A round begins."""
        self.gone.clear()
        self._away.clear()
        self._released()
        return self._open(self.server.begin(round), now)

    def _number(self, name: str) -> int:
        return self.server.order.everyone.index(name)

    def _next(self, name: str, now: float) -> float:
        return self.conditions.availability.next(self._number(name), now, self.seed)

    def _is_there(self, name: str, now: float) -> bool:
        return self._next(name, now) <= now

    def _stays(self, name: str, now: float) -> None:
        """Somebody is needed, and there."""
        number = self._number(name)
        self._leaves[name] = self.conditions.availability.until(number, now, self.seed)

    def _released(self) -> None:
        """Nobody is needed."""
        self._leaves.clear()
        self._drops.clear()
        self._passing = None
        self._resumes = math.inf

    # A node

    @property
    def wake(self) -> float:
        return min(self.seen.wake, self._resumes, *self._leaves.values(), math.inf)

    def tick(self, now: float) -> list[Envelope]:
        if self._resumes <= now:
            return self._resume(now)
        for name, leaves in self._leaves.items():
            if leaves <= now:
                return self._fail(name, now)
        return self._open(self.seen.tick(now), now)

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """What the server says to a message. Raises TooFewClientsError."""
        order = self.server.order
        if getattr(message, "turn", None) != order.turns.get(sender):
            return []
        if isinstance(message, Smashed):
            if self._drops.get(sender) == message.step:
                return self._fail(sender, now)
            # The head is with it: whoever had it before is not needed any more.
            if self._passing is not None:
                self._leaves.pop(self._passing)
                self._passing = None
        if isinstance(message, Ended):
            # All of its turn is here: it may leave.
            self._leaves.pop(sender, None)
        return self._open(self.seen.receive(sender, message, now), now)

    # Turns

    def _open(self, said: list[Envelope], now: float) -> list[Envelope]:
        """What is said once everybody whose turn begins is there."""
        while turns := _named(said, Turn):
            away = [name for name in turns if not self._is_there(name, now)]
            if not away:
                break
            self._away.update(away)
            said = self._again()
        for name, message in said:
            if isinstance(message, Pass) and not self._is_there(name, now):
                return self._wait_for(name, now)
        for name, message in said:
            if isinstance(message, Pass):
                self._passing = name
                self._stays(name, now)
        for name in turns:
            self._stays(name, now)
            self._draw(name)
        return said

    def _draw(self, name: str) -> None:
        """Whether a client drops out in its turn, and behind which step."""
        order = self.server.order
        place = order.round, self._number(name)
        if uniform(self.seed, "drop out", *place) < self.conditions.drop_out:
            steps = order.amounts.steps[place[1]]
            self._drops[name] = int(uniform(self.seed, "dropped out when", *place) * steps)

    def _fail(self, name: str, now: float) -> list[Envelope]:
        """A client is gone that was needed."""
        self.lost(name)
        # Whoever has the head, and no turn, has nothing that would be taken back.
        if name != self._passing:
            self.gone.add(name)
            self.failed += 1
        return self._open(self._again(), now)

    def _again(self) -> list[Envelope]:
        """What can begin without those who are not there."""
        self._released()
        self.server.back()
        return self.server.again(frozenset(self.gone | self._away))

    def _wait_for(self, name: str, now: float) -> list[Envelope]:
        """Nothing goes on without the newest head."""
        self._released()
        self.server.back()
        self._resumes = self._next(name, now)
        if self._resumes == math.inf:
            raise TooFewClientsError(
                f"{name} has the newest head, and will not be there again after {now:g} seconds: "
                f"have heads handed on through the server (handover=server)"
            )
        return []

    def _resume(self, now: float) -> list[Envelope]:
        # Who was away when this began may be there by now.
        self._away.clear()
        return self._open(self._again(), now)


def _named(said: Sequence[Envelope], kind: type[Message]) -> list[str]:
    """To whom messages of a kind go."""
    return [name for name, message in said if isinstance(message, kind)]
