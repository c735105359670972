"""Per-FedAvg: a global model that is good after a step on a client's own data.

    minimise over w the mean of  F_k(w - α·∇F_k(w))
    client k, each local step with batches D, D', D'':
        w' = w - α·∇f(w; D)
        g  = ∇f(w'; D')                                              first order
        g  = g - α·(∇f(w + δ·g; D'') - ∇f(w - δ·g; D'')) / (2δ)      Hessian-free: (I - α∇²f)·g
        w <- w - β·g,  by the task's optimizer
    server:  FedAvg

With α = 0 and full batches Per-FedAvg is FedAvg. `fine_tune` epochs of steps with α give a client's
personalised model.

Cost of a round: as FedAvg's bytes; two gradients per local step, or four.

Source: A. Fallah, A. Mokhtari, A. Ozdaglar, "Personalized Federated Learning with Theoretical
Guarantees: A Model-Agnostic Meta-Learning Approach", NeurIPS 2020.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from torch import nn

from dure.arguments import at_least
from dure.contracts.strategy import Feature
from dure.contracts.task import Task
from dure.contracts.world import Kind
from dure.federated.algorithm import Algorithm, AlgorithmInputs
from dure.federated.engines.engine_choice import EngineInputs
from dure.federated.engines.job import ClientEngine
from dure.federated.engines.meta import MetaEngine
from dure.federated.strategy import Federated
from dure.settings import suggestion

DerivativeOrder = Literal["first-order", "hessian-free"]


@dataclass(frozen=True)
class PerFedAvg(Federated):
    """FedAvg of models that are trained for adaptation.

    Args:
        alpha: α, size of the adaptation step on a client's own data.
        order: first-order leaves out the second derivative, hessian-free computes it by differences
            of gradients.
    """

    held_out: float = 0.2
    fine_tune: int = 1
    alpha: float = field(default=0.01, metadata=at_least(0, finite=True))
    order: DerivativeOrder = "first-order"

    name: ClassVar[str] = "per-fed-avg"
    trains_by_steps: ClassVar[bool] = False
    title: ClassVar[str] = "Per-FedAvg"
    noises_steps: ClassVar[bool] = False

    def cannot(self, feature: Feature, kind: Kind) -> str | None:
        if feature == "unfreeze":
            return "the step to an adapted model moves all that is trained"
        return super().cannot(feature, kind)

    def check_task(self, task: Task) -> None:
        if self.order not in get_args(DerivativeOrder):
            raise ValueError(
                f"there is no order {self.order!r}"
                f"{suggestion(self.order, get_args(DerivativeOrder))}"
            )

    def algorithm(self, start: AlgorithmInputs) -> Algorithm:
        # Gradients per example of a step, which determine the device's time: two, and two more for
        # the Hessian.
        return AdaptedGradients(4 if self.order == "hessian-free" else 2)

    def check_engine(self, task: Task, wanted: str, model: nn.Module | None = None) -> None:
        if wanted not in ("auto", "loop", MetaEngine.name):
            raise ValueError(f"per-fed-avg has its own engine and cannot use {wanted!r}")

    def engine(self, setting: EngineInputs) -> ClientEngine:
        self.check_engine(setting.task, setting.wanted)
        if setting.objective is not None:
            raise ValueError(
                f"the engine {MetaEngine.name} computes gradients of the task's loss at an "
                "adapted model, but the algorithm has its own objective: use fed-avg"
            )
        return MetaEngine(
            task=setting.task,
            model=setting.model,
            examples=setting.examples,
            batch_size=setting.batch_size,
            seed=setting.seed,
            alpha=self.alpha,
            hessian_free=self.order == "hessian-free",
        )


class AdaptedGradients(Algorithm):
    """FedAvg whose clients compute more gradients per example."""

    def __init__(self, passes: int) -> None:
        self.passes = passes
