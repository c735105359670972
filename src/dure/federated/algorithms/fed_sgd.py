"""FedSGD: a step of gradient descent per round, on the joint data of the round's clients.

    each k in S_t:  g_k <- gradient of its loss over all its n_k examples, at w
    w <- w - η · (sum of n_k·g_k) / (sum of n_k)

FedSGD is FedAvg with a local epoch of a single full batch; with C = 1 it is gradient descent,
whatever the n_k.

Cost of a round: as FedAvg's, d elements down and d up per client; FedSGD needs 10 to 100 times as
many rounds.

Source: McMahan et al. 2017, section 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from dure.contracts.task import Task
from dure.federated.engines.optimizers import check_gradients
from dure.federated.strategy import Federated


@dataclass(frozen=True)
class FedSGD(Federated):
    """Clients send gradients of all their data; the server makes a step."""

    batch_size: int | None = None

    name: ClassVar[str] = "fed-sgd"
    trains_by_steps: ClassVar[bool] = False
    title: ClassVar[str] = "FedSGD"

    def batches_of_step(self, task: Task, workers: int | None) -> Fraction | None:
        return None

    def check_task(self, task: Task) -> None:
        one_step = (
            self.batch_size is None and self.local_epochs == 1 and self.local_steps in (None, 1)
        )
        if not one_step:
            raise ValueError(
                "fed-sgd makes one step over all of a client's data; for local epochs and "
                "batches use fed-avg"
            )
        check_gradients(task, self.name)
