"""FedBuff: asynchronous clients; the server makes a step for every K updates.

    client i:  gets (x_τ, τ), trains to y_i, sends Δ_i = y_i - x_τ
    server:    x <- x + η_g·(1/K)·(sum over the buffer of s(t - τ_i)·Δ_i),   s(a) = 1 / √(1 + a)

Δ_i is the difference from the model that the client *started from*; t - τ_i is its staleness.

The sum is divided by K and not by the sum of s: stale updates move the model less. All clients
weigh the same. With all clients at work, a buffer for all of them and no delays, FedBuff is FedAvg
with equal weights.

Cost of an update: d elements down and d up, as FedAvg's. A "round" is a step of the server.

Source: J. Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from dure.arguments import at_least
from dure.contracts.stop import Stop
from dure.contracts.task import Task
from dure.federated.algorithm import Algorithm, AlgorithmInputs
from dure.federated.algorithms.fed_async import check_no_rounds
from dure.federated.server.pacing import BufferedPacing, Pacing
from dure.federated.server.sampling import clients_per_round
from dure.federated.server.server_optimizer import ServerOptimizer
from dure.federated.strategy import Federated
from dure.protocol.messages import Update

if TYPE_CHECKING:
    # `typing.Self` is newer than Python 3.10.
    from typing_extensions import Self


MOST_UPDATES = 1000
"""Largest number of updates of a client in a server step: all start from the same model."""


@dataclass(frozen=True)
class FedBuff(Federated):
    """Asynchronous clients and a buffer of updates.

    Args:
        buffer: K, the updates of a server step, at most 1000 times the clients.
        server_lr: η_g, step size of the model along the mean of the buffer.
    """

    fraction: float = 0.1
    buffer: int = field(default=10, metadata=at_least(1))
    server_lr: float = 1.0

    name: ClassVar[str] = "fed-buff"
    title: ClassVar[str] = "FedBuff"

    def check_task(self, task: Task) -> None:
        check_no_rounds(self)

    def planned(self, task: Task, stop: Stop) -> Self:
        clients = self.count(task)
        if clients is not None:
            self._check_fills(clients, stop)
        return super().planned(task, stop)

    def _check_fills(self, clients: int, stop: Stop) -> None:
        """Raise ValueError for a buffer that is larger than the clients' updates in the run."""
        most = MOST_UPDATES * clients
        when = f"{clients} clients send at most {MOST_UPDATES} updates each for one model"
        epochs = self.work().steps is None and stop.epochs
        if epochs:
            # Each client sends at least one update, however short the run is.
            least = clients * max(1.0, epochs / self.local_epochs)
            if least < most:
                most = math.ceil(least)
                when = f"in {epochs:g} epochs {clients} clients send about {most} updates"
        if self.buffer > most:
            raise ValueError(
                f"buffer is {self.buffer}, but {when}: the buffer would never fill; give a buffer "
                f"of at most {most}"
            )

    def pacing(self, clients: int) -> Pacing:
        return BufferedPacing(clients_per_round(clients, self.fraction), self.buffer)

    def optimizer(self) -> ServerOptimizer:
        return ServerOptimizer(lr=self.server_lr)

    def algorithm(self, start: AlgorithmInputs) -> Algorithm:
        return StalenessDiscount()


class StalenessDiscount(Algorithm):
    """Algorithm in which stale updates count for less."""

    def share(self, update: Update, staleness: int) -> tuple[float, float]:
        # s is a scale and no weight: the mean would divide weights out again. A square root and no
        # power: all processors round a square root alike.
        return 1 / math.sqrt(1 + staleness), 1.0
