"""Byzantine gradient descent: the geometric median of means of the clients' gradients.

    each client j:  g_j <- gradient of its loss over all its data, at θ (malicious: any vector)
    server:         divides the clients into k groups at random, in every round
                    Z_l <- mean of the gradients of group l
                    θ <- θ - η·(geometric median of Z_1 ... Z_k)

The rule withstands q malicious clients per round if 2(1 + ε)q <= k <= m, even if they know
everything and change from round to round. k = 1 is gradient descent and withstands none; k = m is
the geometric median of all gradients. More groups are more robust, fewer groups more precise: the
error is of the order of √(d(2q + 1)/N) for N examples.

Cost of a round: d elements down and d up per client; the server computes O(m·d) for the means and
O(k·d) for each iteration of Weiszfeld.

Source: Y. Chen, L. Su, J. Xu, "Distributed Statistical Machine Learning in Adversarial Settings:
Byzantine Gradient Descent", POMACS 2017.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from dure.contracts.task import Task
from dure.federated.aggregate import Aggregator, GeometricMedianOfMeans, Mean
from dure.federated.engines.optimizers import check_gradients
from dure.federated.server.sampling import clients_per_round
from dure.federated.server.server_optimizer import ServerOptimizer
from dure.federated.strategy import Federated


@dataclass(frozen=True)
class ByzantineGD(Federated):
    """Gradient descent by the geometric median of means.

    A batch_size makes the step of a round one of stochastic gradient descent: a batch of every
    client.

    Args:
        groups: k, more than twice the number of malicious clients in a round.
        server_lr: step size of the model along the median.
    """

    batch_size: int | None = None
    groups: int = 5
    server_lr: float = 1.0

    name: ClassVar[str] = "byzantine"
    trains_by_steps: ClassVar[bool] = False
    title: ClassVar[str] = "Byzantine GD"

    def __post_init__(self) -> None:
        super().__post_init__()
        # An epoch of batches would be several steps.
        if self.batch_size is not None and self.local_steps is None:
            object.__setattr__(self, "local_steps", 1)

    def batches_of_step(self, task: Task, workers: int | None) -> Fraction | None:
        return Fraction(clients_per_round(self.count(task) or 1, self.fraction))

    def check_task(self, task: Task) -> None:
        if self.aggregate != Mean():
            raise ValueError(
                "byzantine has its own aggregation rule; for another rule use fed-avg with "
                "--aggregate"
            )
        if self.local_epochs != 1 or self.local_steps not in (None, 1):
            raise ValueError(
                "byzantine makes one step per round; for local epochs use fed-avg with "
                "--aggregate geometric-median-of-means"
            )
        check_gradients(task, self.name)

    def rule(self) -> Aggregator:
        return GeometricMedianOfMeans(self.groups)

    def optimizer(self) -> ServerOptimizer:
        return ServerOptimizer(lr=self.server_lr)
