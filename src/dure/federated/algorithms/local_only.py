"""Local only: every client trains alone, and nothing that is learned travels.

    client k:  w_k <- E epochs of SGD on its own data, from its stored w_k
    server:    does nothing

Local training is the baseline that every federated method has to beat: the reference "each client
alone" beside the reference "all data pooled" (`single-worker`). Clients start from the same initial
model and follow the same schedule as FedAvg's, so that a difference is the effect of taking part. A
client's model is measured on the client's held-out data. The model that is evaluated as a whole has
the mean of the clients' weights, which only a simulation can know.

Cost of a round: no element in either direction; a client stores d.

Source: T. Yu, E. Bagdasaryan, V. Shmatikov, "Salvaging Federated Learning by Local Adaptation",
2020, which compares participants' federated models with models that they train alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from dure.contracts.strategy import Feature, Traits
from dure.contracts.task import Task
from dure.contracts.world import Kind, World
from dure.federated.aggregate import Mean
from dure.federated.algorithm import Algorithm, AlgorithmInputs, ClientMemory, PersonalisedModel
from dure.federated.engines.job import ClientJob, JobResult
from dure.federated.privacy.privacy_settings import NOTHING
from dure.federated.server.update_validation import same_shapes
from dure.federated.strategy import DIVIDED_MODEL_WITHOUT_EMA, Federated
from dure.fleet.conditions import conditions_of
from dure.protocol.messages import Assignment


@dataclass(frozen=True)
class LocalOnly(Federated):
    """Every client trains alone: the baseline of federated training."""

    held_out: float = 0.2

    name: ClassVar[str] = "local-only"
    title: ClassVar[str] = "Local only"
    traits: ClassVar[Traits] = dataclasses.replace(
        Federated.traits, mean_of="models that never met"
    )

    def cannot(self, feature: Feature, kind: Kind) -> str | None:
        return DIVIDED_MODEL_WITHOUT_EMA if feature == "ema" else super().cannot(feature, kind)

    def check_task(self, task: Task) -> None:
        if self.aggregate != Mean():
            raise ValueError(
                f"{self.name} combines nothing of its clients: leave aggregate ({self.aggregate}) "
                "out"
            )
        if self.privacy != NOTHING:
            raise ValueError(
                f"clients of {self.name} send nothing that needs protection: leave privacy "
                f"({self.privacy}) out"
            )

    def check_model(self, task: Task, model: nn.Module, world: World) -> None:
        super().check_model(task, model, world)
        # The server would average a round's buffers, and this system sends nothing.
        buffer = next((name for name, _ in model.named_buffers()), None)
        if buffer is not None:
            raise ValueError(
                f"{self.name} sends nothing, but buffers, such as {buffer}, are averaged over "
                "clients: use a model without buffers, or ditto with lam=0"
            )
        conditions = conditions_of(world)
        if conditions and conditions.attackers and not conditions.attack.poisons:
            raise ValueError(
                f"clients of {self.name} send nothing that {conditions.attack} could change: "
                "leave attack out, or use an attack on data, such as label-flip"
            )

    def algorithm(self, start: AlgorithmInputs) -> Algorithm:
        return IsolatedTraining(start)


class IsolatedTraining(Algorithm):
    """Algorithm in which all weights belong to the clients, and the shared part has no element."""

    def __init__(self, start: AlgorithmInputs) -> None:
        # Server and clients agree on it without a message: all start from the initial model.
        self.initial = list(start.weights)

    def shared(self, weights: Sequence[Tensor]) -> list[Tensor]:
        return [w[:0] for w in weights]

    def whole(self, shared: Sequence[Tensor], kept: Sequence[Tensor]) -> list[Tensor]:
        # Before any client has trained there is no mean; tensors of other shapes are no mean
        # either.
        return list(kept if same_shapes(kept, self.initial) else self.initial)

    def jobs(
        self, job: ClientJob, assignment: Assignment, memory: ClientMemory | None
    ) -> list[ClientJob]:
        return [replace(job, weights=memory or self.initial)]

    def answer(
        self,
        jobs: list[ClientJob],
        trained: list[JobResult],
        assignment: Assignment,
        memory: ClientMemory | None,
    ) -> tuple[Sequence[Tensor], Sequence[Tensor], ClientMemory | None]:
        delta = trained[0].delta
        own = [w + d for w, d in zip(jobs[0].weights, delta, strict=True)]
        return self.shared(delta), (), own

    def own(
        self, shared: Sequence[Tensor], memory: ClientMemory | None
    ) -> PersonalisedModel | None:
        return PersonalisedModel(memory or self.initial)

    def kept(self, memories: Mapping[int, ClientMemory]) -> Sequence[Tensor]:
        # Sorted, so that the sum's rounding does not depend on the order of arrival.
        parts = [memories[client] for client in sorted(memories)]
        return [torch.stack(tensors).mean(0) for tensors in zip(*parts, strict=True)]
