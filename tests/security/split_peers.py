"""A served run of split learning in one process: the server's learner, its clients, and no socket.

A client says what its state machine says, unless it lies: `lie` gets each frame that it is about to
send, and gives those that it sends instead.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

import dure
from dure.collectives.group import Group
from dure.contracts.fresh_model import seeded_model
from dure.contracts.world import RankContext
from dure.data.client_part import divide
from dure.protocol.channels import (
    ClientConnected,
    ClientDisconnected,
    ClientFrame,
    Event,
    HostedRun,
)
from dure.split.builders import SplitBuilder
from dure.split.client import HeadError
from dure.split.compressed import CompressedNode, exchange_of
from dure.split.cutting import TracedDividedModel
from dure.split.head_checks import HeadChecks
from dure.split.messages import SERVER, Message
from dure.split.network import server_setup
from dure.split.network.control import (
    HeadRefused,
    Hello,
    MeasureModel,
    ModelMeasured,
    Query,
    QueryAnswer,
    RosterMembers,
    SealedHead,
)
from dure.split.network.cut_model import CutClientPart
from dure.split.network.frames import Frame, decode, encode
from dure.split.network.served import ServedSplitLearner
from dure.tasks.loss_shares import CountedLoss
from dure.tasks.measurement import Measurement
from dure.wire.boxes import BoxKey
from dure.wire.signatures import Key

RUN = "0123456789abcdef"
LASTS = 0.3
SECONDS = 20.0
"""That a run may take here, on a busy machine."""

Lie = Callable[[Frame], Sequence[Frame]]


def honest(frame: Frame) -> Sequence[Frame]:
    return [frame]


@cache
def cut_of(
    strategy: Any, task: Callable[[], dure.Task]
) -> tuple[TracedDividedModel, dict[str, Tensor]]:
    """The model, cut once, and the weights with which every run begins."""
    made = task()
    plan = strategy.of(made).plan
    model = seeded_model(made, 0).train()
    parts = divide(plan.partition, plan.clients, made.train, plan.batch_size, 0, False)
    largest = max(one.batches.batch_size for one in parts)
    cut = TracedDividedModel(made, model, plan.at, largest, 0, CountedLoss(made.loss, made.train))
    return cut, {name: one.clone() for name, one in model.state_dict().items()}


def begun_anew(strategy: Any, task: Callable[[], dure.Task]) -> TracedDividedModel:
    cut, weights = cut_of(strategy, task)
    model = cut.cut.model
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor.data = weights[name].clone()
        tensor.grad = None
    # Neither side holds what an earlier run has left.
    vars(cut).pop("heads", None)
    vars(cut).pop("tails", None)
    return cut


class Peer:
    """A client. lie: what it makes of each frame that it would send."""

    def __init__(
        self, number: int, cut: TracedDividedModel, system: Any, task: dure.Task, lie: Lie
    ) -> None:
        plan = system.of(task).plan
        part = divide(plan.partition, plan.clients, task.train, plan.batch_size, 0, False)[number]
        self.number = number
        self.lie = lie
        self.task = task
        # Of its own: the parts of the model are those of the server's process, taken in turn.
        self.machine = SplitBuilder(cut, plan, task.train, 0).client(number, cut.heads.own(), part)
        self.machine.heads = HeadChecks(cut.heads)
        exchange = exchange_of(plan.compression, cut.cut)
        self.node = self.machine if exchange is None else CompressedNode(self.machine, exchange)
        self.at_client = CutClientPart(cut.cut, plan.compression, self.machine.end)
        self.key = Key.make()
        member = BoxKey.make().member(self.key, number, f"client {number}", RUN)
        self.hello = Hello(
            examples=len(part.indices),
            member=msgspec.json.encode(member),
            digest="0" * 64,
            tests=len(task.test),  # type: ignore[arg-type]
        )
        self._measuring = MeasureModel(0, -1)

    def hears(self, frame: Frame) -> list[Frame]:
        return [lied for said in self._says(frame) for lied in self.lie(said)]

    def _says(self, frame: Frame) -> list[Frame]:
        if isinstance(frame, RosterMembers):
            return []
        if isinstance(frame, MeasureModel):
            self._measuring = frame
            return [self._query()]
        if isinstance(frame, QueryAnswer):
            return [ModelMeasured(self._measuring.round, self._measured(frame))]
        sender = SERVER
        message: Any = frame
        if isinstance(frame, SealedHead):
            sender = f"client {frame.peer}"
            message = decode(bytearray(frame.content.numpy().tobytes()))
        if not isinstance(message, Message):
            return []
        try:
            said = self.node.receive(sender, message, 0.0)
        except HeadError as error:
            return [HeadRefused(error.turn, error.reason)]
        return [message if to == SERVER else _sealed(message, to) for to, message in said]

    def _batch(self) -> tuple[Any, Any]:
        test = self.task.test
        assert isinstance(test, dure.Examples)
        return test.batch(torch.arange(len(test)))

    def _query(self) -> Query:
        own = self._measuring.head or self.machine.after(self._measuring.since).own
        self.machine.party.side.take(own)
        inputs, targets = self._batch()
        self.machine.party.side.stages.model.eval()
        found = self.at_client.query(inputs, targets, len(targets), len(targets))
        self.machine.party.side.stages.model.train()
        return found

    def _measured(self, answer: QueryAnswer) -> dict[str, float]:
        inputs, targets = self._batch()
        outputs = self.at_client.outputs(answer, inputs, len(targets))
        measurement = Measurement(self.task, len(targets), len(targets))
        measurement.add(outputs, targets, len(targets))
        return {f"test_{name}": one for name, one in measurement.values(Group()).items()}


def _sealed(message: Any, to: str) -> SealedHead:
    content = torch.frombuffer(bytearray(_joined(message)), dtype=torch.uint8)
    return SealedHead(message.turn, int(to.removeprefix("client ")), content)


class Channels:
    """In memory. answer_timeout: seconds until somebody silent is late."""

    def __init__(self, folder: Path, peers: Sequence[Peer], answer_timeout: float = LASTS) -> None:
        self.run = RUN
        self.folder = folder
        self.key = Key.make()
        self.answer_timeout = answer_timeout
        self._until = time.monotonic() + SECONDS
        self.peers = list(peers)
        self.events: deque[Event] = deque()
        self.turned_away: dict[int, str] = {}
        self.after: Callable[[int, str], None] = lambda number, reason: None
        """Called when a client is turned away."""
        for one in self.peers:
            self.comes(one)

    def comes(self, peer: Peer) -> None:
        self.turned_away.pop(peer.number, None)
        self.events.append(ClientConnected(peer.number, _joined(peer.hello)))

    def says(self, number: int, frame: Frame) -> None:
        self.events.append(ClientFrame(number, _joined(frame)))

    def goes(self, number: int) -> None:
        self.events.append(ClientDisconnected(number, "the connection broke"))

    # As the server has them

    def next(self, seconds: float) -> Event | None:
        assert time.monotonic() < self._until, "the run neither goes on nor ends"
        if self.events:
            return self.events.popleft()
        time.sleep(min(seconds, 0.01))
        return None

    def say(self, client: int, frame: Sequence[Any]) -> None:
        if client in self.turned_away:
            return
        peer = self.peers[client]
        for said in peer.hears(decode(bytearray(b"".join(map(bytes, frame))))):
            self.says(client, said)

    def identity(self, client: int) -> tuple[str, str]:
        return self.peers[client].key.public, f"client {client}"

    def reject(self, client: int, reason: str) -> None:
        self.turned_away[client] = reason
        self.events.append(ClientDisconnected(client, reason[:120]))
        self.after(client, reason)

    def over(self, reason: str) -> None:
        pass

    def allow(self, most: int) -> None:
        pass


def _joined(frame: Frame) -> bytes:
    return b"".join(map(bytes, encode(frame)))


@dataclass
class Served:
    """What a run came to. told: what its user was told."""

    learner: ServedSplitLearner
    channels: Channels
    losses: list[float | None]
    measured: list[dict[str, float]]
    told: list[str]

    @property
    def refused(self) -> dict[int, str]:
        return self.channels.turned_away

    def tail(self) -> list[Tensor]:
        return list(self.learner.order.tails[0].own.weights)

    def head(self, number: int) -> list[Tensor]:
        """The newest head of a client that counts."""
        machine = self.channels.peers[number].machine
        since = self.learner.order.since.get(f"client {number}", -1)
        return list(machine.after(since).own.weights)


def served(
    folder: Path,
    strategy: Any,
    task: Callable[[], dure.Task],
    lies: dict[int, Lie],
    rounds: int = 2,
    answer_timeout: float = LASTS,
    prepare: Callable[[Channels], None] = lambda channels: None,
    before: Callable[[Channels], None] = lambda channels: None,
) -> Served:
    """Serves a run. lies: of clients, by their numbers. prepare: called before the first round;
    before: before any client has come in."""
    made = task()
    plan = strategy.of(made).plan
    cut = begun_anew(strategy, task)
    told: list[str] = []
    context = RankContext(
        Group(),
        folder=folder,
        prepared=lambda: cut.cut.model,
        report=lambda event: told.append(str(event.get("waiting", ""))),
    )
    peers = [
        Peer(number, cut, strategy, made, lies.get(number, honest))
        for number in range(plan.clients)
    ]
    folder.mkdir(exist_ok=True)
    channels = Channels(folder, peers, answer_timeout)
    before(channels)

    def connect(hosted: HostedRun) -> Any:
        return channels

    made_by = server_setup.TracedDividedModel
    server_setup.TracedDividedModel = lambda *_: cut  # type: ignore[assignment,misc]
    try:
        learner = ServedSplitLearner(made, context, 0, plan, connect)
    finally:
        server_setup.TracedDividedModel = made_by  # type: ignore[misc]
    prepare(channels)
    losses: list[float | None] = []
    measured: list[dict[str, float]] = []
    for _ in range(rounds):
        losses.append(learner.advance(0).loss)
        measured.append(learner.evaluate())
    return Served(learner, channels, losses, measured, told)
