"""What a client does with an assignment: E epochs (or so many steps) of mini-batch SGD from the server's weights.

One model is used for all clients of a process; its parameters live in one flat buffer, so taking over the server's
weights and forming the update are one operation each. The optimizer is a fresh one in every round, as the paper's
clients keep nothing between rounds: momentum starts from zero.

Source: McMahan et al. 2017, algorithm 1, ClientUpdate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dure.data.batches import Batches
from dure.data.examples import Examples
from dure.errors import LossNotFiniteError
from dure.federated.messages import Assignment, Update
from dure.flat import FlatParameters
from dure.randomness import seed_generators
from dure.task import Task


@dataclass(frozen=True)
class LocalWork:
    """How much a client trains in a round.

    epochs: passes over its data; ignored if `steps` is given. batch_size: None is all of the client's data.
    """

    epochs: int = 1
    steps: int | None = None
    batch_size: int | None = 10

    def batches(self, indices: Tensor, seed: int, round: int, client: int) -> Iterator[Tensor]:
        """The client's batches in `round`; `indices` are its examples.

        Its steps count on over the rounds, so that a federation of one client visits the examples in the order in
        which a lone worker does.
        """
        own = Batches(len(indices), self.batch_size, seed, client)
        steps = self.steps if self.steps is not None else self.epochs * own.steps_per_epoch
        for step in range(round * steps, (round + 1) * steps):
            yield indices[own.at(step)]


class LocalTrainer:
    """Trains for one client after another. examples: of all clients, in the model's dtype."""

    def __init__(self, task: Task, model: nn.Module, examples: Examples, work: LocalWork, seed: int) -> None:
        self.task, self.model, self.examples, self.work, self.seed = task, model, examples, work, seed
        self.flat = FlatParameters(model)

    def load(self, assignment: Assignment) -> None:
        """Takes over the server's weights and buffers."""
        self.flat.load(assignment.weights)
        with torch.no_grad():
            for buffer, value in zip(self.model.buffers(), assignment.buffers, strict=True):
                buffer.copy_(value)

    def train(self, assignment: Assignment, indices: Tensor) -> Update:
        """The client's local training on its examples `indices`.

        Raises LossNotFiniteError, which names the client, when a loss is NaN or infinite.
        """
        self.load(assignment)
        client, round = assignment.client, assignment.round
        seed_generators(self.seed, "client", round, client, everything=self.examples.draws)
        self.model.train()
        optimizer = self.task.optimizer(self.model.parameters())
        loss_sum, samples = 0.0, 0
        for step, batch in enumerate(self.work.batches(indices, self.seed, round, client)):
            inputs, targets = self.examples.batch(batch)
            optimizer.zero_grad(set_to_none=True)
            loss = self.task.loss(self.model(inputs), targets)
            value = float(loss.item())
            if not math.isfinite(value):
                when = f"round {round + 1}, local step {step + 1}"
                raise LossNotFiniteError(value, f"client {client}", when)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            loss_sum += value * len(batch)
            samples += len(batch)
        if not all(bool(weights.isfinite().all()) for weights in self.flat.buffers):
            raise LossNotFiniteError(math.nan, f"client {client}", f"round {round + 1}, after its last local step")
        delta = [now - before for now, before in zip(self.flat.buffers, assignment.weights, strict=True)]
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        return Update(round, client, len(indices), samples, loss_sum / samples, delta, buffers)
