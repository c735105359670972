"""A group of ranks in one process, which carries the messages of a collective and records them.

The ranks are threads. Each message has the step in which it is received. A rank is in one call at a
time: an exchange, whose sends and receives share a step, or a single send or receive. A message is
received in the later one of the steps that its sender and its receiver have reached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, Queue
from typing import NamedTuple

from torch import Tensor

PATIENCE = 30.0
"""Seconds after which a receive without a message fails."""


class RecordedMessage(NamedTuple):
    """Message of a collective: its step, its ranks, and the numbers that it carried."""

    step: int
    source: int
    target: int
    content: Tensor


class _Sent(NamedTuple):
    step: int
    content: Tensor


@dataclass
class _Recording:
    """Messages of all ranks, and the step that each rank has reached."""

    size: int
    clocks: list[int]
    waiting: dict[tuple[int, int], Queue[_Sent]]
    messages: list[RecordedMessage] = field(default_factory=list)


class RecordingGroup:
    """Group with the methods that all-reduce algorithms use, for the ranks of one process."""

    def __init__(
        self,
        recording: _Recording,
        members: Sequence[int],
        rank: int,
        partition: Sequence[Sequence[int]] = (),
    ) -> None:
        self._recording = recording
        self._members = tuple(members)
        self._partition = tuple(tuple(ranks) for ranks in partition)
        self.rank = rank
        self.size = len(self._members)

    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each host."""
        return self._partition

    def among(self, ranks: Sequence[int]) -> RecordingGroup:
        """Return the group of some ranks, of which this rank is one."""
        members = [self._members[rank] for rank in ranks]
        return RecordingGroup(self._recording, members, list(ranks).index(self.rank))

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a tensor to a rank."""
        self._post(tensor, to)
        self._recording.clocks[self._own] += 1

    def receive(self, into: Tensor, source: int) -> None:
        """Receive a tensor from a rank."""
        clocks = self._recording.clocks
        clocks[self._own] = self._take(into, source) + 1

    def exchange(self, tensor: Tensor, to: int, into: Tensor, source: int) -> None:
        """Send a tensor to a rank, and receive a tensor from a rank, in one step."""
        self.transfer([(tensor, to)], [(into, source)])

    def transfer(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> None:
        """Send and receive in one step; sends without receives leave one after another."""
        if not receives:
            for tensor, to in sends:
                self.send(tensor, to)
            return
        for tensor, to in sends:
            self._post(tensor, to)
        steps = [self._take(into, source) for into, source in receives]
        self._recording.clocks[self._own] = max(steps) + 1

    @property
    def _own(self) -> int:
        return self._members[self.rank]

    def _post(self, tensor: Tensor, to: int) -> None:
        sent = _Sent(self._recording.clocks[self._own], tensor.clone())
        self._recording.waiting[self._own, self._members[to]].put(sent)

    def _take(self, into: Tensor, source: int) -> int:
        """Receive a tensor, record the message, and return its step."""
        sender = self._members[source]
        try:
            sent = self._recording.waiting[sender, self._own].get(timeout=PATIENCE)
        except Empty:
            raise RuntimeError(
                f"rank {self._own} waits for a message of rank {sender}, which sends none"
            ) from None
        into.copy_(sent.content)
        step = max(sent.step, self._recording.clocks[self._own])
        self._recording.messages.append(RecordedMessage(step, sender, self._own, sent.content))
        return step


def recorded(
    collective: Callable[[Tensor, RecordingGroup], None],
    tensors: Sequence[Tensor],
    partition: Sequence[Sequence[int]] = (),
) -> list[RecordedMessage]:
    """Run a collective on all ranks, and return its messages in order of step, source and target.

    Args:
        collective: function of a rank's tensor and group, which changes the tensor in place.
        tensors: the tensor of each rank.
        partition: ranks of each host.
    """
    size = len(tensors)
    ways: dict[tuple[int, int], Queue[_Sent]] = {
        (one, other): Queue() for one in range(size) for other in range(size)
    }
    recording = _Recording(size, [0] * size, ways)
    groups = [RecordingGroup(recording, range(size), rank, partition) for rank in range(size)]
    with ThreadPoolExecutor(size) as ranks:
        list(ranks.map(collective, tensors, groups))
    left = sum(queue.qsize() for queue in ways.values())
    if left:
        raise RuntimeError(f"{left} messages were sent and not received")
    return sorted(recording.messages, key=lambda message: message[:3])
