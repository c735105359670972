"""SCAFFOLD: control variates remove the clients' drift from local steps.

    client i:  y <- x;  K times:  y <- y - η_l·(g_i(y) - c_i + c)
               c_i⁺ = c_i - c + (x - y)/(K·η_l)              (option II)
               sends Δy = y - x and Δc = c_i⁺ - c_i, and stores c_i⁺ after the server has accepted
                   the update
    server:    x <- x + η_g·(mean of Δy over S)
               c <- c + (1/N)·(sum of Δc over S)             N: all clients, not |S|

K counts local steps. All controls start at 0, so that c is the mean of the c_i after every round,
whichever clients took part. All updates weigh the same, as in the paper. The changes of controls
are always combined by a plain mean, whatever `aggregate` is: a robust rule does not protect them.

Cost of a round: 2d elements down and 2d up per client, twice FedAvg's. Clients store d elements
between rounds.

Source: S. P. Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated
Learning", ICML 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from dure.contracts.strategy import Feature
from dure.contracts.task import Task
from dure.contracts.world import Kind, World
from dure.federated.aggregate.mean import wide
from dure.federated.algorithm import Algorithm, AlgorithmInputs, ClientMemory
from dure.federated.engines.job import ClientJob, JobResult
from dure.federated.engines.optimizers import optimizer_of
from dure.federated.server.server_optimizer import ServerOptimizer
from dure.federated.strategy import Federated
from dure.protocol.messages import Assignment, Update
from dure.tensors.unfused_multiply_add import add_multiple


@dataclass(frozen=True)
class Scaffold(Federated):
    """FedAvg with control variates.

    Args:
        server_lr: η_g, step size of the global model along the mean update.
        by_examples: weigh updates by the examples of their clients instead of equally; controls
            still weigh the same.
    """

    server_lr: float = 1.0
    by_examples: bool = False

    name: ClassVar[str] = "scaffold"
    title: ClassVar[str] = "SCAFFOLD"

    def optimizer(self) -> ServerOptimizer:
        return ServerOptimizer(lr=self.server_lr)

    def cannot(self, feature: Feature, kind: Kind) -> str | None:
        if feature == "clip_norm":
            return "option II takes a client's gradient from its way, which clipping shortens"
        return super().cannot(feature, kind)

    def check_model(self, task: Task, model: nn.Module, world: World) -> None:
        super().check_model(task, model, world)
        optimizer = optimizer_of(task, list(model.parameters()))
        groups = optimizer.param_groups
        extras = ("momentum", "weight_decay", "maximize")
        if type(optimizer) is not torch.optim.SGD or any(
            group[extra] for group in groups for extra in extras
        ):
            raise ValueError(
                "scaffold needs clients with plain SGD: option II is wrong with momentum, decay or "
                "Adam"
            )
        rates = sorted({float(group["lr"]) for group in groups})
        if len(rates) > 1:
            raise ValueError(
                f"scaffold needs clients with plain SGD: option II has one learning rate, not "
                f"{rates}"
            )

    def algorithm(self, start: AlgorithmInputs) -> Algorithm:
        return ControlVariates(start.weights, start.clients, start.lr, self.by_examples)


class ControlVariates(Algorithm):
    """Control variates: c on the server, c_i on the clients."""

    def __init__(
        self, weights: Sequence[Tensor], clients: int, lr: float, by_examples: bool = False
    ) -> None:
        self.clients = clients
        self.lr = lr
        self.by_examples = by_examples
        self.alike = not by_examples
        self.control = [torch.zeros_like(w) for w in weights]

    def down(self) -> Sequence[Tensor]:
        return self.control

    def share(self, update: Update, staleness: int) -> tuple[float, float]:
        return 1.0, update.weight if self.by_examples else 1.0

    def absorb(self, extra: list[Tensor], updates: float) -> None:
        if extra:
            # The mean is over the accepted updates; times their number it is the sum, divided by N
            # as in the rule.
            share = updates / self.clients
            self.control = [
                add_multiple(c.to(wide(c.dtype), copy=True), mean, share).to(c.dtype)
                for c, mean in zip(self.control, extra, strict=True)
            ]

    def state(self) -> Any:
        return self.control

    def restore(self, state: Any) -> None:
        self.control = list(state)

    def jobs(
        self, job: ClientJob, assignment: Assignment, memory: ClientMemory | None
    ) -> list[ClientJob]:
        own = memory or [torch.zeros_like(c) for c in assignment.extra]
        return [
            replace(
                job, correction=[c - mine for c, mine in zip(assignment.extra, own, strict=True)]
            )
        ]

    def answer(
        self,
        jobs: list[ClientJob],
        trained: list[JobResult],
        assignment: Assignment,
        memory: ClientMemory | None,
    ) -> tuple[Sequence[Tensor], Sequence[Tensor], ClientMemory | None]:
        (job,) = jobs
        (result,) = trained
        assert job.correction is not None
        # With a schedule η_l is the rate of this round.
        steps = job.steps * self.lr * job.lr_factor
        if not steps:  # a learning rate of 0 reveals nothing of the gradient
            return result.delta, [torch.zeros_like(c) for c in assignment.extra], memory
        # Δc = c_i⁺ - c_i = -c + (x - y)/(K·η_l), and delta is y - x.
        change = [
            -c - delta / steps for c, delta in zip(assignment.extra, result.delta, strict=True)
        ]
        own = memory or [torch.zeros_like(c) for c in assignment.extra]
        return result.delta, change, [mine + moved for mine, moved in zip(own, change, strict=True)]
