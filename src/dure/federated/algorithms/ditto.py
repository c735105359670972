"""Ditto: besides the global model, every client trains a personalised model close to it.

    global:    FedAvg, with the rule `aggregate`
    client k:  v_k <- as many local steps on  F_k(v) + λ/2·|v - w_t|²,  from its stored v_k

λ = 0 is local training alone, a large λ is the global model. v_k never travels, and depends on
other clients only through w.

Cost of a round: as FedAvg's; clients compute twice as much and store d elements, and the buffers of
their personalised model.

Source: T. Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML
2021, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from msgspec.structs import replace
from torch import Tensor

from dure.arguments import at_least
from dure.federated.algorithm import Algorithm, AlgorithmInputs, ClientMemory, PersonalisedModel
from dure.federated.engines.job import ClientJob, JobResult
from dure.federated.strategy import Federated
from dure.protocol.messages import Assignment


@dataclass(frozen=True)
class Ditto(Federated):
    """FedAvg, and a personalised model for every client.

    Args:
        lam: λ, strength of the pull of a personalised model towards the global model.
    """

    held_out: float = 0.2
    lam: float = field(default=0.1, metadata=at_least(0, finite=True))

    name: ClassVar[str] = "ditto"
    title: ClassVar[str] = "Ditto"
    noises_steps: ClassVar[bool] = False

    def algorithm(self, start: AlgorithmInputs) -> Algorithm:
        return PersonalisedModels(self.lam)


class PersonalisedModels(Algorithm):
    """Algorithm with a second job per client, whose weights and buffers the client stores."""

    passes = 2

    def __init__(self, lam: float) -> None:
        self.lam = lam

    def jobs(
        self, job: ClientJob, assignment: Assignment, memory: ClientMemory | None
    ) -> list[ClientJob]:
        weights, buffers = (
            self._parts(memory, job.weights) if memory else (job.weights, job.buffers)
        )
        # The pull is towards the received weights, and not towards the start of the personalised
        # model.
        return [
            job,
            replace(job, weights=weights, buffers=buffers, mu=self.lam, anchor=assignment.weights),
        ]

    def answer(
        self,
        jobs: list[ClientJob],
        trained: list[JobResult],
        assignment: Assignment,
        memory: ClientMemory | None,
    ) -> tuple[Sequence[Tensor], Sequence[Tensor], ClientMemory | None]:
        own = [w + d for w, d in zip(jobs[1].weights, trained[1].delta, strict=True)]
        return trained[0].delta, (), [*own, *trained[1].buffers]

    def own(
        self, shared: Sequence[Tensor], memory: ClientMemory | None
    ) -> PersonalisedModel | None:
        return (
            PersonalisedModel(*self._parts(memory, shared))
            if memory is not None
            else PersonalisedModel(shared)
        )

    @staticmethod
    def _parts(
        memory: ClientMemory, weights: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return (weights, buffers) of a client's state.

        weights: as many tensors as the model has.
        """
        return memory[: len(weights)], memory[len(weights) :]
