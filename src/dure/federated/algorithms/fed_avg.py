"""FedAvg: in each round some clients train locally, and the server averages their updates.

    S_t <- max(C·K, 1) clients at random
    each k in S_t:  w_k <- E epochs of SGD with batch size B on its n_k examples, from w
    w <- w + server_lr · (sum of n_k·(w_k - w)) / (sum of n_k), both sums over S_t

Cost of a round: d elements down and d up for each of the m clients of the round (and the model's
buffers).

Source: McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized
Data".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dure.federated.server.server_optimizer import ServerOptimizer
from dure.federated.strategy import Federated


@dataclass(frozen=True)
class FedAvg(Federated):
    """Clients train locally; the server averages their updates.

    Args:
        server_lr: step size of the global model along the mean update; 1 is plain averaging.
    """

    server_lr: float = 1.0

    name: ClassVar[str] = "fed-avg"
    title: ClassVar[str] = "FedAvg"

    def optimizer(self) -> ServerOptimizer:
        return ServerOptimizer(lr=self.server_lr)
