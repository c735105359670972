"""Nodes in one process that send each other messages, under a virtual clock.

    a message leaves                  when the sender's link is free: bytes / its speed later
    it arrives                        bytes / the receiver's speed after that, its link being free;
                                      what has left first comes in first
    it is dealt with                  when the receiver has dealt with what came before
    a node's `wake`                   it is told that time has passed

So many workers at one server's link wait for each other, as they would. A calendar has when each
node wakes, so that an event costs no look at all nodes. Links between distinct
nodes carry messages in order; a `Fate` may lose, repeat or delay each of them. Everything is a
function of what is put in: the same nodes and fates have the same history.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec
from torch import Tensor

from dure.record.meter import Meter

Message: TypeAlias = Any
"""A struct of msgspec, whose tensors are its payload."""
Envelope = tuple[str, Message]
"""(to whom, what)."""

HEADER = 64
"""Bytes that a message takes besides its tensors."""


class Node(Protocol):
    """What lives at a name."""

    @property
    def wake(self) -> float:
        """When it is to be told that time has passed."""

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """What it says to a message."""

    def tick(self, now: float) -> list[Envelope]:
        """What it says when time has passed."""


@dataclass(frozen=True)
class Link:
    """Bytes a second out of a node and into it; infinity is no time at all."""

    out: float = math.inf
    into: float = math.inf


Fate = Callable[[str, str, Message, float], Sequence[float]]
"""fate(sender, receiver, message, now): after how many more seconds it arrives, for each time."""


def arrives(sender: str, receiver: str, message: Message, now: float) -> Sequence[float]:
    """Every message arrives, once, at once."""
    return (0.0,)


@dataclass
class Traffic:
    """The payload bytes of messages, one by one, and how long a node's links were busy, in seconds
    of one direction and of the other together."""

    sent: list[int]
    received: list[int]
    seconds: float = 0.0

    def tell(self, meter: Meter, computed: float, elapsed: float) -> None:
        """Tells a node's meter what it did in so many seconds, of which it has computed some.

        What is left besides its links it has waited (0 seconds: it took no part); that of a server
        counts for nothing.
        """
        meter.exchanged(sent=self.sent, received=self.received)
        meter.counters.compute_seconds += computed
        meter.counters.communication_seconds += self.seconds
        if meter.is_worker:
            meter.counters.idle_seconds += max(0.0, elapsed - computed - self.seconds)


class Passage(NamedTuple):
    """A message with a payload of so many bytes, and when links were busy with it.

    left, gone: the sender's. arriving, there: the receiver's, at the earliest.
    """

    sender: str
    receiver: str
    message: Message
    nbytes: int
    left: float
    gone: float
    arriving: float
    there: float


Watch = Callable[[Passage], None]
"""Is told of every message that has a payload."""


def unwatched(passage: Passage) -> None:
    """Nobody looks."""


@dataclass
class _Inhabitant:
    """A node, and when its links are free. gone: it hears and says nothing any more."""

    node: Node
    link: Link
    place: int
    """Of those that wake at one time, the one of the lowest place is the first."""
    wakes: float = math.inf
    """When it wakes, as the calendar has it."""
    out_free: float = 0.0
    in_free: float = 0.0
    traffic: Traffic = field(default_factory=lambda: Traffic([], []))
    gone: bool = False
    until: float = -math.inf
    """Until when it is stopped, and hears nothing but later."""
    held: list[tuple[str, Message]] = field(default_factory=list)


class VirtualNetwork:
    """Nodes by name, and the messages between them."""

    def __init__(self, fate: Fate = arrives, watch: Watch = unwatched) -> None:
        self.now = 0.0
        self.fate = fate
        self.watch = watch
        self._nodes: dict[str, _Inhabitant] = {}
        self._queue: list[tuple[float, int, str, str, Callable[[], None]]] = []
        """(when, which in the order of making, from, to, what is to be done)."""
        self._made = 0
        self._calendar: list[tuple[float, int, str]] = []
        """(when, place, who): of every node when it wakes, and much that is not so any more."""

    def add(self, name: str, node: Node, link: Link = Link()) -> None:
        """A node begins to live here; one of that name before is gone."""
        before = self._nodes.get(name)
        place = len(self._nodes) if before is None else before.place
        self._nodes[name] = _Inhabitant(node, link, place, out_free=self.now, in_free=self.now)
        self._note(name)

    def kill(self, name: str) -> None:
        """A node is gone, without a word."""
        self._nodes[name].gone = True

    def lose(self, name: str) -> None:
        """Of what a node has said and is told, nothing is on its way any more."""
        self._queue = [event for event in self._queue if name not in event[2:4]]
        heapq.heapify(self._queue)
        one = self._nodes[name]
        one.out_free = one.in_free = self.now

    def stop(self, name: str, seconds: float) -> None:
        """A node hears and does nothing for a time; what comes meanwhile waits for it."""
        self._nodes[name].until = self.now + seconds
        self._note(name)

    def send(self, sender: str, said: Sequence[Envelope]) -> None:
        """What a node says, on its way."""
        for receiver, message in said:
            here = self._nodes.get(sender)
            if receiver not in self._nodes or here is None or here.gone:
                continue
            size = HEADER + nbytes(message)
            began = max(here.out_free, self.now)
            here.out_free = began + size / here.link.out
            here.traffic.seconds += size / here.link.out
            if size > HEADER:
                here.traffic.sent.append(size - HEADER)
            delays = self.fate(sender, receiver, message, self.now)
            left = partial(self._left, sender, receiver, message, size, began, delays)
            # The receiver's link is free for others until then.
            if here.out_free > self.now:
                self._later(here.out_free, sender, receiver, left)
            else:
                left()

    def _left(
        self,
        sender: str,
        receiver: str,
        message: Message,
        size: int,
        began: float,
        delays: Sequence[float],
    ) -> None:
        """A message has left, and begins to come in as soon as the receiver's link is free."""
        there = self._nodes[receiver]
        if size > HEADER:
            arriving = max(there.in_free, self.now)
            over = arriving + size / there.link.into
            payload = size - HEADER
            self.watch(Passage(sender, receiver, message, payload, began, self.now, arriving, over))
        for delay in delays:
            there.in_free = max(there.in_free, self.now) + size / there.link.into
            there.traffic.seconds += size / there.link.into
            arrived = partial(self._deliver, sender, receiver, message)
            self._later(there.in_free + delay, sender, receiver, arrived)

    def _later(self, when: float, sender: str, receiver: str, done: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when, self._made, sender, receiver, done))
        self._made += 1

    def run(self, until: Callable[[], bool], limit: float) -> bool:
        """Lets time pass until `until` holds; whether it did before `limit`."""
        # Nodes may have been told something since, past the network.
        for name in self._nodes:
            self._note(name)
        while not until():
            if not self._step(limit):
                return False
        return True

    def _step(self, limit: float) -> bool:
        """The next thing that happens; False where nothing does before `limit`."""
        wakes, name = self._first()
        arrives = self._queue[0][0] if self._queue else math.inf
        if min(wakes, arrives) > limit or min(wakes, arrives) == math.inf:
            return False
        if arrives <= wakes:
            when, _, _, _, done = heapq.heappop(self._queue)
            self.now = max(self.now, when)
            done()
        else:
            self.now = max(self.now, wakes)
            one = self._nodes[name]
            held = one.held
            one.held = []
            for sender, message in held:
                self._deliver(sender, name, message)
            self.send(name, one.node.tick(self.now))
            self._note(name)
        return True

    def traffic(self, name: str) -> Traffic:
        """What a node has sent and received since this was asked last."""
        one = self._nodes[name]
        found = one.traffic
        one.traffic = Traffic([], [])
        return found

    def _first(self) -> tuple[float, str]:
        """Who wakes first, and when; nobody where that is never."""
        while self._calendar:
            when, _, name = self._calendar[0]
            one = self._nodes[name]
            if not one.gone and one.wakes == when:
                return when, name
            heapq.heappop(self._calendar)
        return math.inf, ""

    def _note(self, name: str) -> None:
        """Writes into the calendar when a node wakes, if that has changed."""
        one = self._nodes[name]
        wakes = max(one.node.wake, one.until)
        if wakes != one.wakes:
            one.wakes = wakes
            heapq.heappush(self._calendar, (wakes, one.place, name))

    def _deliver(self, sender: str, receiver: str, message: Message) -> None:
        one = self._nodes[receiver]
        if one.gone:
            return
        if self.now < one.until:
            one.held.append((sender, message))
            return
        if size := nbytes(message):
            one.traffic.received.append(size)
        self.send(receiver, one.node.receive(sender, message, self.now))
        self._note(receiver)


def nbytes(node: Any) -> int:
    """Bytes of the tensors in a message: its payload."""
    if isinstance(node, Tensor):
        return node.nbytes
    if isinstance(node, msgspec.Struct):
        return sum(nbytes(getattr(node, name)) for name in node.__struct_fields__)
    if isinstance(node, dict):
        return sum(map(nbytes, node.values()))
    if isinstance(node, list | tuple):
        return sum(map(nbytes, node))
    return 0
