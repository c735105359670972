"""MOON: a client's representation is held near the global model's, and away from its own before.

Q. Li, B. He, D. Song, "Model-Contrastive Federated Learning", CVPR 2021:

    minimise  the task's loss + μ·ℓ,    ℓ = -log(e^(a/τ) / (e^(a/τ) + e^(b/τ)))
    a = cosine of z and z_glob,  b = cosine of z and z_prev

z is what the layers before the last one give: those of the model that is trained, of the one that
was received, and of the client's own after its round before."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from msgspec.structs import replace as changed
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy

import dure
from dure.federated.algorithm import Algorithm, AlgorithmInputs
from dure.federated.engines.job import Reference


@dataclass(frozen=True)
class Moon(dure.FedAvg):
    """FedAvg with a model-contrastive loss.

    Args:
        mu: μ, how much the contrast counts.
        temperature: τ.
    """

    mu: float = 1.0
    temperature: float = 0.5

    name: ClassVar[str] = "moon"
    title: ClassVar[str] = "MOON"

    def algorithm(self, start: AlgorithmInputs) -> Algorithm:
        return Contrast(self.mu, self.temperature)


class Contrast(Algorithm):
    passes = 2  # forward through two models more costs about a step

    def __init__(self, mu, temperature):
        self.mu, self.temperature = mu, temperature

    def jobs(self, job, assignment, memory):
        if memory is None:
            return [job]  # without a model of before both are the global one, and ℓ has no gradient
        count = len(job.weights)
        before = Reference(memory[:count], memory[count:])
        return [changed(job, references=[Reference(job.weights, job.buffers), before])]

    def objective(self, batch):
        z = batch.model[:-1](batch.inputs)
        loss = batch.loss(batch.model[-1](z))
        if not batch.references:
            return loss
        others = [model[:-1](batch.inputs) for model in batch.references]
        likeness = torch.stack([cosine_similarity(z, other) for other in others], 1)
        first = torch.zeros(len(z), dtype=torch.long)
        return loss + self.mu * cross_entropy(likeness / self.temperature, first)

    def answer(self, jobs, trained, assignment, memory):
        (one,) = trained
        own = [w + d for w, d in zip(jobs[0].weights, one.delta, strict=True)]
        return one.delta, (), [*own, *one.buffers]


def model() -> nn.Module:
    projected = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)
    return nn.Sequential(nn.Flatten(), *projected, nn.Linear(32, 10))


task = replace(dure.load_task("digits", lr=0.1), model=model)
for kind in (dure.FedAvg, Moon):
    strategy = kind(clients=10, fraction=0.5, local_epochs=3, partition="dirichlet:0.3")
    run = dure.train(task, strategy, stop=dure.Stop(rounds=15))
    print(f"{strategy.label}: accuracy {run.summary['test_accuracy']:.2f}")
