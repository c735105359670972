"""A trainer that runs on several ranks, as one client.

    rank 0     talks to the server; sends each round and its weights to the others, and trains
    others     wait for an order; train with rank 0, or take part in gathering its weights

The ranks are those that the trainer's launcher has started, such as torchrun or accelerate. Each
has the whole model, or its part of a model that FSDP2 or DeepSpeed divides; then whole weights are
gathered in rank 0 alone, one tensor at a time. A rank that fails ends the training by the timeout
of the process group.

Cost: a broadcast of the weights that travel, and of the algorithm's terms, once a round; one
gathering of a divided model.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from dure.contracts.trainer import ClientTrainer, GradientTerms, TrainerResult, TrainerRound


class RankTrainer(ClientTrainer, Protocol):
    """Trainer that can run on several ranks."""

    @property
    def device(self) -> torch.device:
        """Device of this rank, with which the process group communicates."""

    @property
    def is_divided(self) -> bool:
        """Whether the ranks hold parts of the weights."""

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor that belongs to a parameter."""


class _Train(NamedTuple):
    """Order to train a round; its tensors follow: (name, shape, dtype) each."""

    round: TrainerRound
    seed: int
    mu: float | None
    weights: Sequence[tuple[str, torch.Size, torch.dtype]]
    anchor: Sequence[tuple[str, torch.Size, torch.dtype]]
    correction: Sequence[tuple[str, torch.Size, torch.dtype]]


class _Gather(NamedTuple):
    """Order to take part in gathering weights."""

    names: Sequence[str]


def ranks() -> int:
    """Return the number of ranks of this process's group; 1 without a group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class RankedTrainer:
    """Trainer of rank 0, whose rounds all ranks train."""

    def __init__(self, trainer: RankTrainer) -> None:
        self._trainer = trainer
        self._loaded: dict[str, Tensor] = {}

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
        self._loaded.update(tensors)

    def tensors(self, names: Iterable[str]) -> Mapping[str, Tensor]:
        names = list(names)
        if self._trainer.is_divided:
            _sent(_Gather(names))
        return self._trainer.tensors(names)

    def cannot(self, round: TrainerRound) -> str | None:
        return self._trainer.cannot(round)

    def run(self, round: TrainerRound) -> TrainerResult:
        # Only this rank could stop in the middle, and the others would wait for it.
        round = replace(round, look=None)
        terms = round.terms
        anchor: Mapping[str, Tensor] = {} if terms is None else terms.anchor
        correction: Mapping[str, Tensor] = {} if terms is None else terms.correction
        _sent(
            _Train(
                replace(round, terms=None),
                torch.initial_seed(),
                None if terms is None else terms.mu,
                *(_headers(named) for named in (self._loaded, anchor, correction)),
            )
        )
        for named in (self._loaded, anchor, correction):
            for tensor in named.values():
                dist.broadcast(tensor.detach().to(self._trainer.device).contiguous(), src=0)
        self._loaded.clear()
        return self._trainer.run(round)

    def close(self) -> None:
        _sent(None)
        self._trainer.close()


def follow(trainer: RankTrainer) -> None:
    """Train the rounds of rank 0, until it ends."""
    while (order := _sent(None)) is not None:
        if isinstance(order, _Gather):
            # Whole tensors are dropped here, one by one.
            for name in order.names:
                trainer.tensors([name])
            continue
        for name, tensor in _received(order.weights, trainer.device):
            trainer.load({name: tensor})
        anchor, correction = (
            {name: trainer.part(name, one) for name, one in _received(headers, trainer.device)}
            for headers in (order.anchor, order.correction)
        )
        terms = None if order.mu is None else GradientTerms(order.mu, anchor, correction)
        _seed(order.seed)
        trainer.run(replace(order.round, terms=terms))
    trainer.close()


def _headers(named: Mapping[str, Tensor]) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, one.shape, one.dtype) for name, one in named.items()]


def _received(
    headers: Sequence[tuple[str, torch.Size, torch.dtype]], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors that rank 0 broadcasts, each with its name."""
    for name, shape, dtype in headers:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(tensor, src=0)
        yield name, tensor


def _seed(seed: int) -> None:
    """Seed the generators of a rank, all ranks alike.

    Libraries derive the order of the data from this seed, and divide it over the ranks.
    """
    torch.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)


def _sent(order: Any) -> Any:
    """Return rank 0's order on all ranks, which are one program on machines of one owner."""
    box = [order]
    dist.broadcast_object_list(box, src=0)
    return box[0]
