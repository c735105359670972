"""FedBuff: asynchronous clients; the server makes a step whenever it has K updates.

    client i:  gets (x_τ, τ), trains to y_i, sends Δ_i = y_i - x_τ
    server:    x <- x + η_g·(1/K)·(sum over the buffer of s(t - τ_i)·Δ_i),   s(a) = 1 / √(1 + a)

Δ_i is the difference from the model that the client *started from*; t - τ_i is its staleness.

The sum is divided by K and not by the sum of s: stale updates move the model less. Clients count
alike. With all clients at work, a buffer for all of them and no delays it is FedAvg with clients
that count alike.

Cost of an update: d elements down and d up, as FedAvg's. A "round" is one step of the server.

Source: J. Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from dure.contracts.task import Task
from dure.federated.algorithm import Algorithm, Start
from dure.federated.algorithms.fed_async import check_no_rounds
from dure.federated.server.pacing import Buffered, Pacing
from dure.federated.server.sampling import clients_per_round
from dure.federated.server.server_optimizer import ServerOptimizer
from dure.federated.strategy import Federated
from dure.protocol.messages import Update


@dataclass(frozen=True)
class FedBuff(Federated):
    """Asynchronous clients and a buffer of updates.

    Args:
        buffer: K, the updates of one step of the server.
        server_lr: η_g, how far it moves along their mean.
    """

    fraction: float = 0.1
    buffer: int = 10
    server_lr: float = 1.0

    name: ClassVar[str] = "fed-buff"
    title: ClassVar[str] = "FedBuff"

    def check_task(self, task: Task) -> None:
        if self.buffer < 1:
            raise ValueError(f"buffer is {self.buffer}, but a step takes at least one update")
        check_no_rounds(self)

    def pacing(self, clients: int) -> Pacing:
        return Buffered(clients_per_round(clients, self.fraction), self.buffer)

    def optimizer(self) -> ServerOptimizer:
        return ServerOptimizer(lr=self.server_lr)

    def algorithm(self, start: Start) -> Algorithm:
        return Discounted()


class Discounted(Algorithm):
    """Stale updates count for less."""

    def share(self, update: Update, staleness: int) -> tuple[float, float]:
        # s is a scale and no weight: weights would be divided out again by the mean.
        # A square root, and no power: all processors round it alike.
        return 1 / math.sqrt(1 + staleness), 1.0
