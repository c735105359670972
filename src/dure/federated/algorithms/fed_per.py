"""FedPer: the lower layers are shared; the last layers belong to each client and never travel.

    client k:  trains (shared, personal_k), sends the change of the shared part, stores personal_k
    server:    FedAvg of the shared part alone

Without personal layers FedPer is FedAvg. A client that has not taken part yet has the initial
personal layers. The model that is evaluated as a whole has the mean of the personal layers of all
clients that took part so far, which only a simulation can know.

Cost of a round: the shared elements alone, down and up per client.

Source: M. G. Arivazhagan et al., "Federated Learning with Personalization Layers", 2019.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from dure.contracts.strategy import Feature
from dure.contracts.task import Task
from dure.contracts.world import Kind, World
from dure.federated.algorithm import Algorithm, AlgorithmInputs, ClientMemory, PersonalisedModel
from dure.federated.engines.job import ClientJob, JobResult
from dure.federated.server.update_validation import same_shapes
from dure.federated.strategy import DIVIDED_MODEL_WITHOUT_EMA, Federated
from dure.protocol.messages import Assignment
from dure.tensors.flat import by_dtype, trainable_parameters


@dataclass(frozen=True)
class FedPer(Federated):
    """FedAvg of all layers except the last, which are personalised.

    Args:
        personal_layers: number of personalised modules, counted from the last module with trained
            parameters.
    """

    held_out: float = 0.2
    personal_layers: int = 1

    name: ClassVar[str] = "fed-per"
    title: ClassVar[str] = "FedPer"

    def cannot(self, feature: Feature, kind: Kind) -> str | None:
        if feature == "ema":
            return DIVIDED_MODEL_WITHOUT_EMA
        return super().cannot(feature, kind)

    def check_model(self, task: Task, model: nn.Module, world: World) -> None:
        super().check_model(task, model, world)
        # Frozen layers are shared, so that every trained layer above them may be personalised.
        layers = sum(1 for module in model.modules() if list(module.parameters(recurse=False)))
        trained = len(_layers(model))
        if not 0 <= self.personal_layers < layers:
            raise ValueError(
                f"personal_layers is {self.personal_layers}, but the model has {layers} layers, "
                "of which some have to be shared"
            )
        if self.personal_layers > trained:
            raise ValueError(
                f"personal_layers is {self.personal_layers}, but only {trained} of the model's "
                f"{layers} layers are trained"
            )

    def algorithm(self, start: AlgorithmInputs) -> Algorithm:
        return PersonalLayers(start, self.personal_layers)


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules with trained parameters of their own, in the model's order."""
    return [
        module
        for module in model.modules()
        if any(one.requires_grad for one in module.parameters(recurse=False))
    ]


class PersonalLayers(Algorithm):
    """Algorithm that splits flat weights in two by a mask of personalised elements per tensor."""

    def __init__(self, start: AlgorithmInputs, layers: int) -> None:
        chosen = _layers(start.model)[-layers:] if layers else []
        own: set[int] = set()
        for module in chosen:
            own.update(map(id, module.parameters(recurse=False)))

        def mask(group: Sequence[Tensor]) -> Tensor:
            return torch.cat([torch.full((one.numel(),), id(one) in own) for one in group])

        self.masks = [mask(group) for group in by_dtype(trainable_parameters(start.model)).values()]
        # Server and clients agree on it without a message: all start from the initial model.
        self.initial = self._personal(start.weights)

    def _personal(self, weights: Sequence[Tensor]) -> list[Tensor]:
        return [w[mask] for w, mask in zip(weights, self.masks, strict=True)]

    def shared(self, weights: Sequence[Tensor]) -> list[Tensor]:
        return [w[~mask] for w, mask in zip(weights, self.masks, strict=True)]

    def _joined(self, shared: Sequence[Tensor], personal: Sequence[Tensor]) -> list[Tensor]:
        whole = []
        for mask, rest, own in zip(self.masks, shared, personal, strict=True):
            weights = rest.new_empty(len(mask))
            weights[mask] = own
            weights[~mask] = rest
            whole.append(weights)
        return whole

    def whole(self, shared: Sequence[Tensor], kept: Sequence[Tensor]) -> list[Tensor]:
        # Before any client has taken part there is no mean; tensors of other shapes are no mean
        # either.
        return self._joined(shared, kept if same_shapes(kept, self.initial) else self.initial)

    def jobs(
        self, job: ClientJob, assignment: Assignment, memory: ClientMemory | None
    ) -> list[ClientJob]:
        return [replace(job, weights=self._joined(job.weights, memory or self.initial))]

    def answer(
        self,
        jobs: list[ClientJob],
        trained: list[JobResult],
        assignment: Assignment,
        memory: ClientMemory | None,
    ) -> tuple[Sequence[Tensor], Sequence[Tensor], ClientMemory | None]:
        delta = trained[0].delta
        # Both parts were trained together; only the shared part travels.
        moved = zip(self._personal(jobs[0].weights), self._personal(delta), strict=True)
        return self.shared(delta), (), [before + change for before, change in moved]

    def own(
        self, shared: Sequence[Tensor], memory: ClientMemory | None
    ) -> PersonalisedModel | None:
        return PersonalisedModel(self._joined(shared, memory or self.initial))

    def kept(self, memories: Mapping[int, ClientMemory]) -> Sequence[Tensor]:
        # Sorted, so that the sum's rounding does not depend on the order of arrival.
        parts = [memories[client] for client in sorted(memories)]
        return [torch.stack(tensors).mean(0) for tensors in zip(*parts, strict=True)]
