"""FedNova: clients that make more steps do not pull the model further than their share.

J. Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization", NeurIPS 2020; for clients with plain SGD, of which one of τ_k steps has ‖a_k‖ = τ_k:

    w <- w + τ_eff · sum of p_k·(w_k - w) / τ_k        τ_eff = sum of p_k·τ_k,  p_k = n_k / n"""

from dataclasses import dataclass
from typing import ClassVar

import dure
from dure.federated.algorithm import Algorithm, AlgorithmInputs


@dataclass(frozen=True)
class FedNova(dure.FedAvg):
    """FedAvg of what clients change in a step, and not in a round."""

    name: ClassVar[str] = "fed-nova"
    title: ClassVar[str] = "FedNova"

    def algorithm(self, start: AlgorithmInputs) -> Algorithm:
        return Normalised()


class Normalised(Algorithm):
    def share(self, update, staleness):
        return 1 / update.steps, update.weight  # (scale of the update, weight in the mean)

    def step(self, weights, mean, updates):
        n = sum(update.weight for update in updates)
        effective = sum(update.weight * update.steps for update in updates) / n
        return [w + effective * d for w, d in zip(weights, mean, strict=True)]


task = dure.load_task("digits", lr=0.1)
for kind in (dure.FedAvg, FedNova):
    strategy = kind(clients=10, local_epochs=3, partition="quantity-skew:0.5")
    run = dure.train(task, strategy, stop=dure.Stop(rounds=10))
    print(f"{strategy.label}: accuracy {run.summary['test_accuracy']:.2f}")
