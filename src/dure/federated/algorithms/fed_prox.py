"""FedProx: FedAvg with a proximal term on the clients, and partial work of slow clients.

    client k minimises  F_k(w) + μ/2·|w - w_t|²:  every local gradient gets + μ·(w - w_t)

A device that would miss the round's deadline sends the work done until then; FedAvg drops the
device. With μ = 0 and no stragglers FedProx is FedAvg.

Cost of a round: as FedAvg's.

Source: T. Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020. The paper
samples clients with probability ~ n_k and averages them with equal weights (`selection="weighted"`,
`equal_weights=True`); uniform sampling with weights n_k, the default here, is the paper's other
scheme.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from msgspec.structs import replace

from dure.arguments import at_least
from dure.federated.algorithm import Algorithm, AlgorithmInputs, ClientMemory
from dure.federated.engines.job import ClientJob
from dure.federated.strategy import Federated
from dure.protocol.messages import Assignment, Update


@dataclass(frozen=True)
class FedProx(Federated):
    """FedAvg with a proximal term, and partial work.

    Args:
        mu: μ, strength of the pull of clients towards the global model.
        equal_weights: give all updates the same weight, instead of the number of examples.
    """

    mu: float = field(default=0.01, metadata=at_least(0, finite=True))
    equal_weights: bool = False

    name: ClassVar[str] = "fed-prox"
    title: ClassVar[str] = "FedProx"
    sends_partial_work: ClassVar[bool] = True

    def algorithm(self, start: AlgorithmInputs) -> Algorithm:
        return Proximal(self.mu, self.equal_weights)


class Proximal(Algorithm):
    """Algorithm with a pull towards the received model."""

    def __init__(self, mu: float, equal_weights: bool = False) -> None:
        self.mu = mu
        self.equal_weights = equal_weights
        self.alike = equal_weights

    def jobs(
        self, job: ClientJob, assignment: Assignment, memory: ClientMemory | None
    ) -> list[ClientJob]:
        # Without an anchor the job is pulled towards its start weights.
        return [replace(job, mu=self.mu)]

    def share(self, update: Update, staleness: int) -> tuple[float, float]:
        return 1.0, 1.0 if self.equal_weights else update.weight
