"""FedAvg: in each round a fraction of the clients trains locally and the server averages their updates.

    S_t <- max(C·K, 1) clients at random
    each k in S_t:  w_k <- E epochs of SGD with batch size B on its n_k examples, from w
    w <- w + server_lr · (sum of n_k·(w_k - w)) / (sum of n_k), both sums over S_t

FedSGD is its case E=1, B=None: one gradient step over all of a client's data.

Cost of a round: d elements down and d up for each of the m clients of the round (and the model's buffers).

Source: McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data".
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from dure.data.batches import check_batch_size
from dure.data.partition import IID, Description, NaturalKey, Partition, describe
from dure.errors import DureError, WorkerFailedError
from dure.evaluation import evaluate
from dure.federated.coordinator import Coordinator
from dure.federated.local import LocalTrainer, LocalWork
from dure.federated.messages import Assignment, Update
from dure.flat import FlatParameters
from dure.record.meter import Meter
from dure.strategy import (
    Kind,
    Learner,
    Place,
    Progress,
    examples_for,
    load_passing_buffers,
    passing_buffers,
    seeded_model,
)
from dure.task import Task
from dure.threads import flops_per_step


@dataclass(frozen=True)
class FedAvg:
    """Clients train locally, a server averages.

    Args:
        clients: K; with the partition natural-key None is one client a key.
        fraction: C, the share of the clients that takes part in a round, in (0, 1].
        local_epochs: E, passes of a client over its data in a round.
        local_steps: steps of a client in a round instead of epochs.
        batch_size: B, of a client's step; None is all of its data.
        partition: how examples are divided over clients: iid, label-shards:2, dirichlet:0.5, quantity-skew:1, or
            natural-key.
        server_lr: how far the global model moves along the mean update; 1 is plain averaging.
    """

    clients: int | None = 10
    fraction: float = 1.0
    local_epochs: int = 1
    local_steps: int | None = None
    batch_size: int | None = 10
    partition: Partition = field(default_factory=IID)
    server_lr: float = 1.0

    name: ClassVar[str] = "fed-avg"
    kind: ClassVar[Kind] = "clients"
    unit: ClassVar[str] = "round"

    @property
    def label(self) -> str:
        default = FedAvg()
        shown = {"K": "clients", "C": "fraction", "E": "local_epochs", "steps": "local_steps", "B": "batch_size"}
        parts = [
            f"{letter}={getattr(self, field)}"
            for letter, field in {**shown, "server lr": "server_lr"}.items()
            if getattr(self, field) != getattr(default, field) and not (field == "clients" and self.clients is None)
        ]
        return " ".join(["FedAvg", str(self.partition), *parts])

    def check(self, task: Task, workers: int | None) -> None:
        check_batch_size(self.batch_size)
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction is {self.fraction}, but a share of the clients is in (0, 1]")
        if self.clients is not None and self.clients < 1:
            raise ValueError(f"clients is {self.clients}, but a federation has at least one")
        if self.clients is None and not isinstance(self.partition, NaturalKey):
            raise ValueError("clients is not given; only the partition natural-key knows how many there are")
        if self.local_epochs < 1:
            raise ValueError(f"local_epochs is {self.local_epochs}, but a client makes at least one pass")
        if self.local_steps is not None and self.local_steps < 1:
            raise ValueError(f"local_steps is {self.local_steps}, but a client makes at least one step")
        if self.server_lr <= 0:
            raise ValueError(f"server_lr is {self.server_lr}, but the model has to move: it is above 0")
        examples = len(task.train)
        if self.clients is not None and self.clients > examples:
            raise ValueError(f"{self.clients} clients are more than the {examples} training examples")

    def divide(self, task: Task, seed: int) -> list[Tensor]:
        """The examples of each client. Raises ValueError if the partition does not fit the data."""
        train = task.train
        return self.partition.divide(self.clients, len(train), train.labels(), train.keys, seed)

    def division(self, task: Task, seed: int) -> Description | None:
        return describe(self.partition, self.divide(task, seed), task.train.labels(), task.train.classes)

    def learner(self, task: Task, place: Place, seed: int) -> Learner:
        return FedAvgLearner(task, place, seed, self)


class FedAvgLearner:
    """The server, and the clients' work as the place gets it done."""

    unit = "round"
    units_per_epoch = 1
    where = "server"

    def __init__(self, task: Task, place: Place, seed: int, strategy: FedAvg) -> None:
        self.task, self.place = task, place
        self.model = seeded_model(task, seed)
        self.flat = FlatParameters(self.model)
        train, self.test_examples = examples_for(self.model, task)
        self.parts = strategy.divide(task, seed)
        work = LocalWork(strategy.local_epochs, strategy.local_steps, strategy.batch_size)
        self.trainer = LocalTrainer(task, seeded_model(task, seed), train, work, seed)
        self.server = place.group.meter
        self.server.name = "server"
        self.clients = [Meter(f"client {client}", place.trace) for client in range(len(self.parts))]
        self.coordinator = Coordinator(
            self.flat.copy(),
            [buffer.clone() for buffer in self.model.buffers()],
            len(self.parts),
            strategy.fraction,
            seed,
            strategy.server_lr,
        )

    def flops_per_step(self) -> float:
        typical = sum(map(len, self.parts)) / len(self.parts)
        batch = min(self.trainer.work.batch_size or typical, typical)
        return flops_per_step(self.model, self.trainer.examples, batch)

    def advance(self, wish: int) -> Progress:
        """One round: assignments down, local training, updates up, the new global model."""
        assignments = self.coordinator.begin_round()
        result = None
        for update in self.place.visit(self._client, assignments):
            self._deliver(update)
            started = time.perf_counter()
            result = self.coordinator.receive(update)
            self.server.compute("aggregate", started, time.perf_counter(), update.round + 1)
        assert result is not None, "a round ends with the last of its updates"
        return Progress(result.loss, result.samples, wish)

    def _client(self, assignment: Assignment) -> Update:
        """What happens on the client's side, from the assignment's arrival to the update."""
        meter = self.clients[assignment.client]
        self.server.sent(assignment.nbytes)
        meter.received(assignment.nbytes)
        started = time.perf_counter()
        try:
            update = self.trainer.train(assignment, self.parts[assignment.client])
        except DureError:
            raise
        except Exception as error:
            who, step = f"client {assignment.client}", f"round {assignment.round + 1}"
            raise WorkerFailedError(who, step, f"{type(error).__name__}: {error}") from error
        meter.compute("local training", started, time.perf_counter(), assignment.round + 1)
        return update

    def _deliver(self, update: Update) -> None:
        self.clients[update.client].sent(update.nbytes)
        self.server.received(update.nbytes)

    def _load_global(self) -> None:
        self.flat.load(self.coordinator.weights)
        with torch.no_grad():
            for buffer, value in zip(self.model.buffers(), self.coordinator.buffers, strict=True):
                buffer.copy_(value)

    def evaluate(self) -> dict[str, float]:
        self._load_global()
        return evaluate(self.task, self.model, self.test_examples, self.place.group, self.coordinator.round)

    def weights(self) -> dict[str, Tensor]:
        self._load_global()
        return dict(self.model.state_dict())

    def state(self) -> dict[str, Any]:
        self._load_global()
        return {"round": self.coordinator.round, "buffers": passing_buffers(self.model)}

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(weights)
        load_passing_buffers(self.model, state["buffers"])
        self.coordinator.weights = self.flat.copy()
        self.coordinator.buffers = [buffer.clone() for buffer in self.model.buffers()]
        self.coordinator.round = state["round"]

    def meters(self) -> Sequence[Meter]:
        return [self.server, *self.clients]
