"""Virtual network: nodes in a process that send each other messages, under a virtual clock.

    departure        when the sender's link is free: bytes / its speed later
    arrival          bytes / the receiver's speed after that, when the receiver's link is free; in
                     order of departure
    processing       at arrival, if the receiver is not stopped
    a node's `wake`  the network calls the node's `tick`

So many workers wait for each other at a server's link. A calendar has the wake times of nodes, so
that an event does not scan all nodes. Links between distinct nodes preserve the order of messages;
a `MessageFaults` may lose, repeat or delay each message. The history is a function of the nodes and
fates.
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
"""(receiver, message)."""

HEADER = 64
"""Bytes of a message in addition to its tensors."""


class Node(Protocol):
    """A participant of the network, under a name."""

    @property
    def wake(self) -> float:
        """Time of the next call of `tick`."""

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """Return the messages that the node sends in response to a message."""

    def tick(self, now: float) -> list[Envelope]:
        """Return the messages that the node sends after time has passed."""


@dataclass(frozen=True)
class NodeLink:
    """Bytes per second out of a node and into it; with infinity transfers take no time."""

    out: float = math.inf
    into: float = math.inf


MessageFaults = Callable[[str, str, Message, float], Sequence[float]]
"""fate(sender, receiver, message, now) -> extra delays in seconds, one per delivery."""


def arrives(sender: str, receiver: str, message: Message, now: float) -> Sequence[float]:
    """Deliver every message once, without extra delay."""
    return (0.0,)


@dataclass
class Traffic:
    """Payload bytes of single messages, and the seconds of a node's links.

    seconds: both directions together.
    """

    sent: list[int]
    received: list[int]
    seconds: float = 0.0

    def tell(self, meter: Meter, computed: float, elapsed: float) -> None:
        """Report the traffic and the seconds of a node to its meter.

        The rest of `elapsed` besides computation and transfers counts as idle time (0 elapsed
        seconds: no participation); a server has no idle time.
        """
        meter.exchanged(sent=self.sent, received=self.received)
        meter.counters.compute_seconds += computed
        meter.counters.communication_seconds += self.seconds
        if meter.is_worker:
            meter.counters.idle_seconds += max(0.0, elapsed - computed - self.seconds)


class Transmission(NamedTuple):
    """A message with a payload, and the times at which links were busy with it.

    nbytes: of the payload. left, gone: start and end at the sender. arriving, there: earliest start
    and end at the receiver.
    """

    sender: str
    receiver: str
    message: Message
    nbytes: int
    left: float
    gone: float
    arriving: float
    there: float


TransmissionCallback = Callable[[Transmission], None]
"""Callback for every message with a payload."""


def ignore_transmission(passage: Transmission) -> None:
    """Ignore the passage of a message."""


@dataclass
class _Inhabitant:
    """A node with the times at which its links are free. gone: whether the node is disconnected."""

    node: Node
    link: NodeLink
    place: int
    """Order of nodes that wake at the same time, the lowest place first."""
    wakes: float = math.inf
    """Wake time in the calendar."""
    out_free: float = 0.0
    in_free: float = 0.0
    traffic: Traffic = field(default_factory=lambda: Traffic([], []))
    gone: bool = False
    until: float = -math.inf
    """End of the node's stop; messages wait until then."""
    held: list[tuple[str, Message]] = field(default_factory=list)


class VirtualNetwork:
    """Nodes by name, and the messages between them."""

    def __init__(
        self, fate: MessageFaults = arrives, watch: TransmissionCallback = ignore_transmission
    ) -> None:
        self.now = 0.0
        self.fate = fate
        self.watch = watch
        self._nodes: dict[str, _Inhabitant] = {}
        self._queue: list[tuple[float, int, str, str, Callable[[], None]]] = []
        """(time, number of the event, sender, receiver, action)."""
        self._made = 0
        self._calendar: list[tuple[float, int, str]] = []
        """(time, place, name): wake times of all nodes, including outdated entries."""

    def add(self, name: str, node: Node, link: NodeLink = NodeLink()) -> None:
        """Add a node to the network; it replaces an earlier node with this name."""
        before = self._nodes.get(name)
        place = len(self._nodes) if before is None else before.place
        self._nodes[name] = _Inhabitant(node, link, place, out_free=self.now, in_free=self.now)
        self._note(name)

    def kill(self, name: str) -> None:
        """Disconnect a node, without notice to other nodes."""
        self._nodes[name].gone = True

    def lose(self, name: str) -> None:
        """Drop all messages on their way from or to a node."""
        self._queue = [event for event in self._queue if name not in event[2:4]]
        heapq.heapify(self._queue)
        one = self._nodes[name]
        one.out_free = one.in_free = self.now

    def stop(self, name: str, seconds: float) -> None:
        """Stop a node for a time; messages wait until then."""
        self._nodes[name].until = self.now + seconds
        self._note(name)

    def send(self, sender: str, said: Sequence[Envelope]) -> None:
        """Send the messages of a node."""
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
        """Start the arrival of a departed message, as soon as the receiver's link is free."""
        there = self._nodes[receiver]
        if size > HEADER:
            arriving = max(there.in_free, self.now)
            over = arriving + size / there.link.into
            payload = size - HEADER
            self.watch(
                Transmission(sender, receiver, message, payload, began, self.now, arriving, over)
            )
        for delay in delays:
            there.in_free = max(there.in_free, self.now) + size / there.link.into
            there.traffic.seconds += size / there.link.into
            arrived = partial(self._deliver, sender, receiver, message)
            self._later(there.in_free + delay, sender, receiver, arrived)

    def _later(self, when: float, sender: str, receiver: str, done: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when, self._made, sender, receiver, done))
        self._made += 1

    def run(self, until: Callable[[], bool], limit: float) -> bool:
        """Advance time until `until` holds; return False if it does not hold by `limit`."""
        # Nodes may have changed since the last call, outside of the network.
        for name in self._nodes:
            self._note(name)
        while not until():
            if not self._step(limit):
                return False
        return True

    def _step(self, limit: float) -> bool:
        """Process the next event; return False if there is none until `limit`."""
        wakes, name = self._first()
        arrives = self._queue[0][0] if self._queue else math.inf
        if min(wakes, arrives) > limit or min(wakes, arrives) == math.inf:
            return False
        # At equal times arrivals come before wake-ups.
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
        """Return the traffic of a node since the last call."""
        one = self._nodes[name]
        found = one.traffic
        one.traffic = Traffic([], [])
        return found

    def _first(self) -> tuple[float, str]:
        """Return the wake time and name of the first node to wake; inf if no node wakes."""
        while self._calendar:
            when, _, name = self._calendar[0]
            one = self._nodes[name]
            if not one.gone and one.wakes == when:
                return when, name
            heapq.heappop(self._calendar)
        return math.inf, ""

    def _note(self, name: str) -> None:
        """Add a node's wake time to the calendar, if it has changed."""
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
    """Return the payload of a message: bytes of its tensors."""
    if isinstance(node, Tensor):
        return node.nbytes
    if isinstance(node, msgspec.Struct):
        return sum(nbytes(getattr(node, name)) for name in node.__struct_fields__)
    if isinstance(node, dict):
        return sum(map(nbytes, node.values()))
    if isinstance(node, list | tuple):
        return sum(map(nbytes, node))
    return 0
