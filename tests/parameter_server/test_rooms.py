"""Rooms: nothing is written where somebody reads, and nothing read where somebody may write."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor, nn

from dure.parameter_server.keys import KeyRange
from dure.parameter_server.layout import ShardLayout, ShardLocation
from dure.parameter_server.members import WorkerMembers
from dure.parameter_server.messages import Acknowledged, Envelope, Pull, Values
from dure.parameter_server.processes.buffers import GradientBuffers, WeightBuffers
from dure.parameter_server.worker import RetryTimes, WorkerProtocol
from dure.tensors.flat import FlatParameters

SHARDS = [KeyRange(0, 0, 3), KeyRange(0, 3, 8)]


def layout(version: int, owners: tuple[int, int], epochs: tuple[int, int]) -> ShardLayout:
    placed = (ShardLocation(o, None, e) for o, e in zip(owners, epochs, strict=True))
    return ShardLayout(version, tuple(placed), (WorkerMembers.of([0]),))


class Pulling(RuleBasedStateMachine):
    """A worker that pulls from servers; any of them may be replaced, and wake up later.

    A server has what it was told in order, and answers each question once: where it is to, or in a
    message of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(7, 1)
        self.flat = FlatParameters(self.model)
        self.slots = WeightBuffers(self.flat, SHARDS)
        self.owners = [0, 1]
        self.epochs = [0, 0]
        self.version = 0
        portions = [(n, keys.start, keys.stop) for n, keys in enumerate(SHARDS)]
        self.side = WorkerProtocol(
            0, self.layout(), portions, times=RetryTimes(1.0, None), into=lambda: self.slots.ask(0)
        )
        self.told: dict[str, list[Pull]] = {}
        """What the servers have been asked, and did not answer yet."""
        self.now = 0.0
        self.taken = 0
        self.replaced = 0

    def layout(self) -> ShardLayout:
        owners, epochs = self.owners, self.epochs
        return layout(self.version, (owners[0], owners[1]), (epochs[0], epochs[1]))

    def say(self, said: Sequence[Envelope]) -> None:
        for to, message in said:
            assert isinstance(message, Pull)
            self.slots.said(to, message)
            self.told.setdefault(to, []).append(message)

    @precondition(lambda self: self.side.asked is None)
    @rule()
    def ask(self) -> None:
        self.say(self.side.pull(self.now, None))

    @rule()
    def ask_again(self) -> None:
        self.now += 10
        self.say(self.side.tick(self.now))

    @rule(shard=st.integers(0, 1))
    def replace(self, shard: int) -> None:
        if self.replaced < 3:
            self.replaced += 1
            self.owners[shard] += 2
            self.epochs[shard] += 1
            self.version += 1
            self.say(self.side.receive("manager", self.layout(), self.now))

    @rule(choice=st.integers(0, 9))
    def answer(self, choice: int) -> None:
        """Some server, dead or alive, deals with what it was asked first."""
        busy = [name for name in sorted(self.told) if self.told[name]]
        if not busy:
            return
        name = busy[choice % len(busy)]
        pull = self.told[name].pop(0)
        value = torch.full((pull.stop - pull.start,), float(pull.number))
        if pull.into is not None:
            # Nobody may be using what is written now.
            before = self.weights().clone()
            pull.into.copy_(value)
            assert torch.equal(before, self.weights()), "weights in use were written to"
            value = pull.into
        said = Values(pull.shard, 0, pull.number, value, 0, 0, None, 0)
        self.slots.heard(name, said)
        self.side.receive(name, said, self.now)

    @precondition(lambda self: self.side.arrived)
    @rule()
    def take(self) -> None:
        number = self.side.asked
        self.slots.take(0, self.side.take())
        self.taken = number or 0

    def weights(self) -> Tensor:
        return torch.cat([one.detach().reshape(-1) for one in self.model.parameters()])

    @invariant()
    def the_model_has_what_was_taken(self) -> None:
        if self.taken:
            assert self.weights().tolist() == [self.taken] * 8

    @invariant()
    def memory_is_used_again(self) -> None:
        """Two rooms, and one for each that a replaced server may still write to."""
        assert len(self.slots._slots) <= 3 + self.replaced


TestPulling = Pulling.TestCase
TestPulling.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_rooms_alternate() -> None:
    slots = WeightBuffers(FlatParameters(nn.Linear(7, 1)), SHARDS)
    places = []
    for number in range(1, 7):
        parts = slots.ask(0)
        for shard, (part, keys) in enumerate(zip(parts, SHARDS, strict=True)):
            slots.said("server 0", Pull(shard, 0, 0, 0, number, keys.start, keys.stop, into=part))
        for shard, part in enumerate(parts):
            slots.heard("server 0", Values(shard, 0, number, part, 0, 0, None, 0))
        slots.take(0, parts)
        places.append(parts[0].data_ptr())
    assert places == places[:2] * 3
    assert len(set(places)) == 2


def test_a_room_that_a_replaced_server_was_told_of_is_never_given_out_again() -> None:
    slots = WeightBuffers(FlatParameters(nn.Linear(7, 1)), SHARDS)
    lost = slots.ask(0)
    slots.said("server 0", Pull(0, 0, 0, 0, 1, 0, 3, into=lost[0]))
    for number in range(2, 6):
        # Another answers from now on, also the question that the first did not.
        slots.heard("server 1", Values(0, 0, number, torch.ones(3), 0, 0, None, 0))
        slots.take(0, [torch.ones(3), torch.ones(5)])
        assert slots.ask(0)[0].data_ptr() != lost[0].data_ptr()


def test_a_gradient_lies_where_it_is_until_every_server_has_acknowledged_it() -> None:
    side = WorkerProtocol(
        0, layout(0, (0, 1), (0, 0)), [(0, 0, 3), (1, 3, 8)], times=RetryTimes(beat=None)
    )
    outbox = GradientBuffers([torch.zeros(8)])

    def push() -> int:
        (room,) = outbox.room(side)
        side.push([room[:3], room[3:]], 1.0, 0.0)
        return room.data_ptr()

    first, second = push(), push()
    assert first != second
    side.receive("server 0", Acknowledged(0, 0, 0, 2), 0.0)
    third = push()
    assert third not in (first, second)  # one server has not said anything
    side.receive("server 1", Acknowledged(1, 0, 3, 1), 0.0)
    assert push() == first
    assert push() not in (first, second, third)
