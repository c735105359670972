"""Availability of clients in a simulation, and rollback of the turns of clients that leave.

    a turn is to begin    and its client is away: it takes no part in the round
    a client leaves       or drops out in a turn: the whole turn is rolled back, at the server and
                          at the client, which takes no further part in the round
    then                  whatever can begin without it begins (`dure.split.orders`): in turn, the
                          next client from the head of the client before; in parallel rounds, the
                          round

If clients pass heads to each other, and the client with the newest head is away, all wait for it.
If no client is available at the beginning of a round, all wait for the first client to return.

A client leaves by its `Availability`, and drops out with a probability for each round, after the
values of a step of its turn that is drawn too. Both are functions of the seed: a client leaves in
the same round and step, however often the round begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dure.errors import TooFewClientsError
from dure.fleet.conditions import Conditions
from dure.fleet.virtual_network import Envelope, Message, Node
from dure.randomness.hashed_numbers import uniform
from dure.split.messages import Ended, Pass, Smashed, Turn
from dure.split.server import TailServer


class AvailabilityTracker:
    """Wrapper around the server that tracks which clients are available.

    Args:
        server: the server's state machine.
        seen: the server with its wrappers, which gets the messages.
        conditions: availability and probability of a dropout.
        seed: the run's seed.
        lost: called with the name of a lost client; drops its messages in transit.
    """

    def __init__(
        self,
        server: TailServer,
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
        """Clients that left during a turn of this round."""
        self.failed = 0
        """Number of turns that were rolled back since a caller last reset the number."""
        self._away: set[str] = set()
        """Clients that were not available for their turn."""
        self._leaves: dict[str, float] = {}
        """Time at which each needed client leaves."""
        self._drops: dict[str, int] = {}
        """Step of its turn after which a client drops out."""
        self._passing: str | None = None
        """Client that passes the head on; None if there is none."""
        self._resumes = math.inf
        """Time at which an awaited client returns."""
        server.keeps = True

    # Availability

    def opens(self, now: float) -> float:
        """Return the time at which a round can begin: once a client is available.

        Raises TooFewClientsError if no client ever returns.
        """
        steps = self.server.order.amounts.steps
        first = min(
            self._next(name, now)
            for name, own in zip(self.server.order.everyone, steps, strict=True)
            if own
        )
        if first == math.inf:
            raise TooFewClientsError(
                f"no client is available after {now:g} seconds: by the availability "
                f"{self.conditions.availability} all have left for the last time"
            )
        return first

    def begin(self, round: int, now: float) -> list[Envelope]:
        """Begin a round; return the first messages."""
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
        """Record the time at which a needed client leaves."""
        number = self._number(name)
        self._leaves[name] = self.conditions.availability.until(number, now, self.seed)

    def _released(self) -> None:
        """Clear the record of needed clients."""
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
        """Return the server's replies to a message. Raises TooFewClientsError."""
        order = self.server.order
        if getattr(message, "turn", None) != order.turns.get(sender):
            return []
        if isinstance(message, Smashed):
            if self._drops.get(sender) == message.step:
                return self._fail(sender, now)
            # The head has arrived there: the client that had it before is not needed any more.
            if self._passing is not None:
                self._leaves.pop(self._passing)
                self._passing = None
        if isinstance(message, Ended):
            # The whole turn has arrived: the client may leave.
            self._leaves.pop(sender, None)
        return self._open(self.seen.receive(sender, message, now), now)

    # Turns

    def _open(self, said: list[Envelope], now: float) -> list[Envelope]:
        """Return the messages once all clients whose turn begins are available."""
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
        """Draw whether a client drops out in its turn, and after which step."""
        order = self.server.order
        place = order.round, self._number(name)
        if uniform(self.seed, "drop out", *place) < self.conditions.drop_out:
            steps = order.amounts.steps[place[1]]
            self._drops[name] = int(uniform(self.seed, "dropped out when", *place) * steps)

    def _fail(self, name: str, now: float) -> list[Envelope]:
        """Roll back after the loss of a needed client."""
        self.lost(name)
        # A client that only passes the head on has no turn to roll back.
        if name != self._passing:
            self.gone.add(name)
            self.failed += 1
        return self._open(self._again(), now)

    def _again(self) -> list[Envelope]:
        """Roll back, and return the messages of a start without the lost clients."""
        self._released()
        self.server.back()
        return self.server.again(frozenset(self.gone | self._away))

    def _wait_for(self, name: str, now: float) -> list[Envelope]:
        """Roll back, and wait for the client with the newest head."""
        self._released()
        self.server.back()
        self._resumes = self._next(name, now)
        if self._resumes == math.inf:
            raise TooFewClientsError(
                f"{name} has the newest head, but is not available after {now:g} seconds: send "
                "heads through the server (handover=server)"
            )
        return []

    def _resume(self, now: float) -> list[Envelope]:
        # Clients that were away before may have returned.
        self._away.clear()
        return self._open(self._again(), now)


def _named(said: Sequence[Envelope], kind: type[Message]) -> list[str]:
    """Return the receivers of messages of a type."""
    return [name for name, message in said if isinstance(message, kind)]
