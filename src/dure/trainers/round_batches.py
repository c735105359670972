"""The examples of a round, as the batches of a data loader.

The examples of a step are divided evenly over the trainer's ranks, and those of a rank into batches
of b, which it accumulates. The loader repeats a pass over the data, with another order each time; a
round that is no whole number of passes is a single pass of the loader.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from dure.contracts.trainer import TrainerRound


class RoundBatches(Sampler[list[int]]):
    """Batch sampler of a round.

    Args:
        round: the round.
        batch_size: examples of a batch, at most those of a step.
        rank: of the trainer, whose part of each step it has.
        ranks: number of ranks.

    `drop_last` and `batch_size` are read by libraries.
    """

    drop_last = False

    def __init__(self, round: TrainerRound, batch_size: int, rank: int = 0, ranks: int = 1) -> None:
        self.batch_size = batch_size
        passes = round.passes or 1
        steps = len(round.batches) // passes
        own = [torch.chunk(step, ranks)[rank] for step in round.batches]
        self._passes = [
            _micro_batches(own[one * steps : (one + 1) * steps], batch_size)
            for one in range(passes)
        ]
        self._next = 0

    def __len__(self) -> int:
        return len(self._passes[0])

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._passes[self._next % len(self._passes)]
        self._next += 1
        return iter(batches)


def _micro_batches(steps: Sequence[Tensor], size: int) -> list[list[int]]:
    return [part.tolist() for step in steps for part in torch.split(step, size)]


def cannot_divide(
    round: TrainerRound, batch_size: int, accumulated: int, ranks: int = 1
) -> str | None:
    """Return why a round cannot be divided into batches; None if it can.

    A step that the ranks share unevenly would have the mean of their means as its gradient. A
    shorter step in the middle of a pass of the loader would be joined with the next.

    Args:
        round: the round.
        batch_size: examples of a batch.
        accumulated: batches of a step, of each rank.
        ranks: number of ranks.
    """
    uneven = next((len(step) for step in round.batches if len(step) % ranks), None)
    if uneven is not None:
        return (
            f"a step of {uneven} examples cannot be shared evenly by {ranks} ranks: give the "
            f"client a multiple of {ranks} examples, or use one rank"
        )
    if accumulated == 1 or round.passes is not None:
        return None
    counts = [-(-len(step) // (batch_size * ranks)) for step in round.batches[:-1]]
    if all(count == accumulated for count in counts):
        return None
    return (
        "local_steps ends a pass over the data with a smaller step, and the trainer would "
        "accumulate it with the next: use local_epochs, or no accumulation"
    )


def loader_like(loader: DataLoader[object], batches: RoundBatches) -> DataLoader[object]:
    """Return a loader with the settings of `loader`, and other batches."""
    # Without a generator of its own a loader draws a seed from torch's, which a model may use.
    own = torch.Generator().manual_seed(torch.initial_seed())
    more: dict[str, Any] = (
        {} if not loader.num_workers else {"prefetch_factor": loader.prefetch_factor}
    )
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=own,
        **more,
    )
