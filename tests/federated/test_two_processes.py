"""The two halves of a federation in two processes: nothing but bytes passes between them, and the
bits are those of the simulation."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import nn

import dure
from dure.contracts.strategy import RankContext, seeded_model
from dure.federated.builders import build_clients, build_server
from dure.federated.server.server import FederatedServer
from dure.federated.strategy import Federated
from dure.machine.threads import threads
from dure.protocol.carrier import Assign, AssignmentRecord, Combine, CoordinatorProtocol
from dure.protocol.encoding import from_bytes, to_bytes
from dure.protocol.messages import (
    EvaluationRequest,
    EvaluationResults,
    JoinMessage,
    Message,
    PersonalisedMean,
    PersonalisedRequest,
    Refuse,
    Update,
    UpdateOutcomes,
)
from dure.record.checkpoint import (
    pack_checkpoint,
)
from small import small_task
from written import unpacked

ROUNDS = 4


def with_batch_norm() -> nn.Module:
    """Buffers of floating point and counters, and draws of its own."""
    return nn.Sequential(
        nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 3)
    ).double()


def with_a_frozen_layer() -> nn.Module:
    """Which both halves make by themselves, and no message has."""
    model = with_batch_norm()
    model[0].requires_grad_(False)  # type: ignore[index,operator]
    return model


SOME: dict[str, Any] = {"clients": 5, "fraction": 0.6, "batch_size": 4}

CASES: dict[str, tuple[Federated, Callable[[], dure.Task]]] = {
    "fed-avg": (dure.FedAvg(**SOME, held_out=0.2, fine_tune=1), small_task),
    "batch-norm": (
        dure.FedAvg(clients=4, batch_size=4),
        lambda: small_task(lr=0.1, model=with_batch_norm),
    ),
    "frozen": (
        dure.Ditto(clients=4, batch_size=4),
        lambda: small_task(lr=0.1, model=with_a_frozen_layer),
    ),
    "scaffold": (dure.Scaffold(**SOME), small_task),
    "fed-per": (dure.FedPer(**SOME), small_task),
    "ditto": (dure.Ditto(**SOME), small_task),
    "krum": (dure.FedAvg(clients=5, batch_size=4, aggregate="krum:1"), small_task),  # type: ignore[arg-type]
    "fed-buff": (dure.FedBuff(clients=4, fraction=0.5, buffer=3, batch_size=4), small_task),
}


def live(connection: Connection) -> None:
    """The clients' process: it is told which federation it is of, and answers what comes."""
    while name := connection.recv_bytes().decode():
        strategy, task_of = CASES[name]
        task = task_of()
        conditions = dure.Simulated(engine="loop")
        clients = build_clients(strategy, task, seeded_model(task, 0), conditions, 0)
        torch.set_num_threads(1)  # as the driver does, for steps as small as these
        connection.send_bytes(to_bytes(clients.join()))
        while content := connection.recv_bytes():
            answer = clients.receive(from_bytes(bytearray(content)))
            if answer is not None:
                connection.send_bytes(to_bytes(answer))
        clients.close()


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Connection]:
    """The way to a process that has clients, and nothing of this one."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=live, args=(there,))
    process.start()
    there.close()
    try:
        yield here
        here.send_bytes(b"")
        process.join(30)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()


class Pipe:
    """A carrier over a connection: an assignment goes out at once, and answers come in order."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.now = 0.0
        self.flown: list[AssignmentRecord] = []
        self.checked = False
        self.clock_is = "virtual_seconds"
        self.answer_timeout: float | None = None
        self.patient = False
        self.early: list[Update] = []
        self.arrived: dict[int, Update] = {}
        self.joined: JoinMessage = self.receive(JoinMessage)

    def answers_left(self, different: bool) -> float:
        return math.inf

    def send(self, message: Message) -> None:
        self.connection.send_bytes(to_bytes(message))

    def receive(self, kind: type[Any]) -> Any:
        """The next message of a kind; updates that come before it are kept."""
        while True:
            message = from_bytes(bytearray(self.connection.recv_bytes()))
            if isinstance(message, kind):
                return message
            assert isinstance(message, Update)
            self.early.append(message)

    def join(self) -> JoinMessage:
        return self.joined

    def carry(self, coordinator: CoordinatorProtocol) -> Combine:
        actions = coordinator.tick(self.now)
        while True:
            found = None
            for action in actions:
                if isinstance(action, Assign):
                    self.send(action.assignment)
                elif isinstance(action, Refuse):
                    self.send(action)
                else:
                    found = action
            if found is not None:
                return found
            update = self.early.pop(0) if self.early else self.receive(Update)
            self.arrived[update.ticket] = update
            actions = coordinator.update(update.ticket, self.now)

    def updates(self, coordinator: CoordinatorProtocol, tickets: Sequence[int]) -> Iterator[Update]:
        return iter([self.arrived.pop(ticket) for ticket in tickets])

    def settle(self, settled: UpdateOutcomes) -> None:
        self.send(settled)

    def made(self, number: int, weights: Sequence[Any], buffers: Sequence[Any]) -> None:
        pass

    def ended(self, reason: str) -> None:
        pass

    def measure(self, measure: EvaluationRequest) -> EvaluationResults:
        self.send(measure)
        measured: EvaluationResults = self.receive(EvaluationResults)
        return measured

    def kept(self) -> PersonalisedMean:
        self.send(PersonalisedRequest())
        kept: PersonalisedMean = self.receive(PersonalisedMean)
        return kept

    def facts(self) -> Mapping[str, Any]:
        return {}

    def mark(self) -> Callable[[], None]:
        return lambda: None

    def state(self) -> Any:
        return None

    def restore(self, state: Any) -> None:
        self.arrived = {}


@contextmanager
def federation(name: str, elsewhere: Connection) -> Iterator[Pipe]:
    """The clients of a case, there."""
    elsewhere.send_bytes(name.encode())
    try:
        yield Pipe(elsewhere)
    finally:
        elsewhere.send_bytes(b"")


def in_place(program: Callable[[RankContext], None]) -> None:
    with threads(1):
        dure.Simulated(engine="loop").run(program, lambda event: None)


@pytest.mark.parametrize("name", CASES)
def test_in_two_processes_a_federation_has_the_bits_of_the_simulation(
    name: str, elsewhere: Connection
) -> None:
    strategy, task_of = CASES[name]
    run = dure.train(
        task_of(),
        strategy,
        dure.Simulated(engine="loop", devices="equal:inf:inf:inf"),  # type: ignore[arg-type]
        dure.Stop(rounds=ROUNDS),
        evaluate_every=ROUNDS,
    )
    with federation(name, elsewhere) as pipe:

        def program(context: RankContext) -> None:
            task = task_of()
            server = build_server(strategy, task, seeded_model(task, 0), context, pipe, 0)
            assert isinstance(server, FederatedServer)
            losses = [server.advance(0).loss for _ in range(ROUNDS)]
            assert losses == [step.loss for step in run.history.steps]
            for key, value in server.weights().items():
                assert torch.equal(value, run.model.state_dict()[key]), key
            assert server.evaluate() == run.history.evaluations[-1].metrics

        in_place(program)


@pytest.mark.parametrize("name", ["fed-avg", "scaffold"])
def test_a_server_that_is_started_again_goes_on_while_its_clients_have_lived_on(
    name: str, elsewhere: Connection
) -> None:
    strategy, task_of = CASES[name]
    run = dure.train(task_of(), strategy, dure.Simulated(engine="loop"), dure.Stop(rounds=ROUNDS))
    with federation(name, elsewhere) as pipe:

        def program(context: RankContext) -> None:
            task = task_of()
            first = build_server(strategy, task, seeded_model(task, 0), context, pipe, 0)
            for _ in range(ROUNDS // 2):
                first.advance(0)
            contents = pack_checkpoint(first.weights(), first.state())
            weights, state = unpacked(tuple(map(bytes, contents)))
            again = build_server(strategy, task, seeded_model(task, 0), context, pipe, 0)
            again.restore(weights, state)
            for _ in range(ROUNDS - ROUNDS // 2):
                again.advance(0)
            for key, value in again.weights().items():
                assert torch.equal(value, run.model.state_dict()[key]), key

        in_place(program)
