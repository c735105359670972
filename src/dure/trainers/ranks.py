"""A trainer that runs on several ranks, as one client.

    rank 0     talks to the server; sends each round and its weights to the others, and trains
    others     wait for a round, take the weights, and train with rank 0

The ranks are those that the trainer's launcher has started, such as torchrun or accelerate; each
has the whole model. A rank that fails ends the training by the timeout of the process group.

Cost: a broadcast of the weights that travel, once a round.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from dure.contracts.trainer import ClientTrainer, TrainerResult, TrainerRound


def ranks() -> int:
    """Return the number of ranks of this process's group; 1 without a group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class RankedTrainer:
    """Trainer of rank 0, whose rounds all ranks train."""

    def __init__(self, trainer: ClientTrainer) -> None:
        self._trainer = trainer
        self._names: set[str] = set()

    @property
    def name(self) -> str:
        return self._trainer.name

    @property
    def batch_size(self) -> int:
        return self._trainer.batch_size

    @property
    def examples(self) -> int:
        return self._trainer.examples

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self._trainer.load(tensors)
        self._names |= tensors.keys()

    def tensors(self, names: Iterable[str]) -> Mapping[str, Tensor]:
        return self._trainer.tensors(names)

    def cannot(self, round: TrainerRound) -> str | None:
        if round.terms is not None:
            return "the algorithm's terms are not sent to the other ranks: use one rank"
        return self._trainer.cannot(round)

    def run(self, round: TrainerRound) -> TrainerResult:
        # Only this rank could stop in the middle, and the others would wait for it.
        round = replace(round, look=None)
        tensors = self._trainer.tensors(sorted(self._names))
        _sent((round, torch.initial_seed(), tensors))
        self._names.clear()
        return self._trainer.run(round)

    def close(self) -> None:
        _sent(None)
        self._trainer.close()


def follow(trainer: ClientTrainer) -> None:
    """Train the rounds of rank 0, until it ends."""
    while (order := _sent(None)) is not None:
        round, seed, tensors = order
        trainer.load(tensors)
        _seed(seed + dist.get_rank())
        trainer.run(round)
    trainer.close()


def _seed(seed: int) -> None:
    """Seed the generators of a rank, each rank with other numbers."""
    torch.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)


def _sent(order: Any) -> Any:
    """Return rank 0's order on all ranks, which are one program on machines of one owner."""
    box = [order]
    dist.broadcast_object_list(box, src=0)
    return box[0]
