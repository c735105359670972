"""Data that lie with the ranks give the path of one worker that has them all.

float64, 1e-12. The one worker visits the examples in the order that the ranks' turns come to, which
is worked out here anew, with exact numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import dure
from dure.data.partition import Partition
from dure.randomness.seeds import shuffled
from small import EXAMPLES, examples, largest_difference, same_bits, small_task

SIZES = (20, 9, 12)
RANKS = len(SIZES)
STARTS = [sum(SIZES[:rank]) for rank in range(RANKS)]
TOLERANCE = 1e-12
EPOCHS = dure.Stop(epochs=2)


def own(rank: int, world: int) -> Any:
    """The rank's alone; where there is one rank, all."""
    data = examples()
    part = slice(STARTS[rank], STARTS[rank] + SIZES[rank]) if world > 1 else slice(None)
    return data.inputs[part], data.targets[part]


class Together(dure.Examples):
    """All examples in one place, visited as the ranks' turns come."""

    def __init__(self) -> None:
        data = examples()
        super().__init__(data.inputs, data.targets)

    def to(self, dtype: torch.dtype) -> dure.Examples:
        return self

    def order(self, part: Tensor | None = None) -> Any:
        return super().order(part) if part is not None else self._order

    def _order(self, seed: int, epoch: int, client: int) -> Tensor:
        turns = sorted(
            (Fraction(2 * j + 1, 2 * size), rank, j)
            for rank, size in enumerate(SIZES)
            for j in range(size)
        )
        orders = [shuffled(size, seed, epoch, rank).tolist() for rank, size in enumerate(SIZES)]
        return torch.tensor([STARTS[rank] + orders[rank][j] for _, rank, j in turns])


class Lying(Together):
    """The same, of whose joint batches each rank takes those that would lie with it."""

    def part(self, indices: Tensor, rank: int, ranks: int) -> Tensor:
        return indices[(indices >= STARTS[rank]) & (indices < STARTS[rank] + SIZES[rank])]


@dataclass(frozen=True)
class AsTheyLie(Partition):
    name = "as-they-lie"

    def _divide(self, *_: Any) -> Any:
        return list(torch.arange(EXAMPLES).split(SIZES))

    def divide(self, *_: Any, **__: Any) -> Any:
        return list(torch.arange(EXAMPLES).split(SIZES))


def trained(strategy: dure.Strategy, train: Any, ranks: int = RANKS, **changes: Any) -> dure.Run:
    world = dure.Processes(ranks) if ranks > 1 else None
    return dure.train(small_task(train=train, **changes), strategy, world, EPOCHS, seed=3)


WEIGHTED = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)


def weighted(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(outputs, targets, WEIGHTED, reduction="sum")
    return total, WEIGHTED[targets].sum()


@pytest.mark.parametrize(
    "strategy",
    [
        dure.DataParallel(8),
        dure.DataParallel(3, accumulate=2),
        dure.DataParallel(None),
        dure.ZeRO(3, batch_size=3, accumulate=2),
    ],
    ids=str,
)
def test_joint_batches_are_those_of_one_worker(strategy):
    many = trained(strategy, own)
    assert many.summary["examples_of_ranks"] == list(SIZES)
    assert many.summary["epochs"] == 2
    assert many.summary["samples"] == 2 * EXAMPLES
    one = trained(dure.SingleWorker(strategy.batch_size), Together(), ranks=1)
    assert largest_difference(many, one) < TOLERANCE


@pytest.mark.parametrize(
    "loss", [torch.nn.CrossEntropyLoss(WEIGHTED), weighted], ids=["torch", "own"]
)
def test_what_a_loss_counts_is_counted_over_all_ranks(loss):
    many = trained(dure.DataParallel(8), own, loss=loss)
    one = trained(dure.SingleWorker(8), Together(), ranks=1, loss=loss)
    assert largest_difference(many, one) < TOLERANCE


@pytest.mark.parametrize("strategy", [dure.LocalSGD(8, 2), dure.DiLoCo(8, 3)], ids=str)
def test_rounds_of_joint_batches_are_those_of_ranks_that_have_all(strategy):
    assert largest_difference(trained(strategy, own), trained(strategy, Lying())) < TOLERANCE


@pytest.mark.parametrize("kind", [dure.ParallelSGD, dure.ADMM])
def test_a_rank_that_trains_on_its_own_has_a_part_of_the_data(kind):
    many = trained(kind(8), own)
    same = trained(kind(8, partition=AsTheyLie()), examples())
    assert largest_difference(many, same) < TOLERANCE


def test_a_world_of_one_process_has_all():
    for strategy, world in [
        (dure.SingleWorker(8), None),
        (dure.DataParallel(8), dure.Threads(2)),
        (dure.Hogwild(8), dure.Threads(1)),
    ]:
        runs = [
            dure.train(small_task(train=train), strategy, world, EPOCHS, seed=3)
            for train in (own, examples())
        ]
        assert same_bits(*runs)


def test_shards_of_each_rank_are_examples_of_each_rank(tmp_path: Path):
    for rank in range(RANKS):
        folder = tmp_path / str(rank)
        folder.mkdir()
        inputs, targets = own(rank, RANKS)
        numpy.save(folder / "0.inputs.npy", inputs[:5])
        numpy.save(folder / "0.targets.npy", targets[:5])
        numpy.save(folder / "1.inputs.npy", inputs[5:])
        numpy.save(folder / "1.targets.npy", targets[5:])

    def whole(rank: int, world: int) -> dure.Shards:
        return dure.Shards(tmp_path / str(rank))

    def in_windows(rank: int, world: int) -> dure.Shards:
        return dure.Shards(tmp_path / str(rank), window=4)

    assert same_bits(trained(dure.DataParallel(8), whole), trained(dure.DataParallel(8), own))
    mixed = trained(dure.DataParallel(8), in_windows)
    assert mixed.summary["samples"] == 2 * EXAMPLES
    assert not same_bits(mixed, trained(dure.DataParallel(8), own))
