"""Ranks of an averaging system, looked at after every round."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import dure
from dure.contracts.strategy import Strategy
from dure.contracts.world import RankContext
from small import CLASSES, FEATURES


def watched(
    task: dure.Task,
    strategy: Strategy,
    ranks: int,
    rounds: int,
    look: Callable[[Any], Any],
    seed: int = 0,
) -> list[list[Any]]:
    """look(learner) after every round, for every rank in order."""

    def program(context: RankContext) -> list[Any]:
        learner = strategy.learner(task, context, seed)
        seen = []
        for _ in range(rounds):
            learner.advance(0)
            seen.append(look(learner))
        return [pickle.loads(part) for part in context.group.gather_bytes(pickle.dumps(seen))]

    result: list[list[Any]] = dure.Processes(ranks).run(program, lambda event: None)
    return result


def hashed(tensors: Sequence[Tensor]) -> str:
    """A fingerprint of their bits."""
    digest = hashlib.blake2b()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Regular(nn.Module):
    """Batch norm, whose statistics are buffers of two dtypes, and dropout; a frozen parameter and a
    tied one; buffers that never change."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.body = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, CLASSES)
        )
        self.again = self.body[3]
        self.register_buffer("mask", torch.tensor([-torch.inf, 0.1, 0.7]))
        self.register_buffer("expanded", torch.tensor(0.3).expand(2, 2), persistent=False)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.body(self.frozen(inputs))
        return scores


def run_on(
    task: dure.Task, strategy: Strategy, ranks: int, rounds: int, seed: int = 3, **settings: Any
) -> dure.Run:
    return dure.train(
        task, strategy, dure.Processes(ranks), dure.Stop(rounds=rounds), seed=seed, **settings
    )


def alone(task: dure.Task, batch_size: int | None, steps: int, seed: int = 3) -> dure.Run:
    return dure.train(task, dure.SingleWorker(batch_size), stop=dure.Stop(steps=steps), seed=seed)
