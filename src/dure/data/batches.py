"""Batches of a step as indices: the joint batch of all workers, or a client's batch.

An epoch visits every example exactly once, in the order of `dure.randomness.seeds.shuffled`, or in
an order that follows the layout of the data (`Examples.order`); its last batch is smaller if the
batch size does not divide. A full batch keeps the data's own order. A batch depends on (seed, step,
client) alone, never on the number of workers: this makes one worker and many comparable.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from dure.data.block_shuffling import Order
from dure.randomness.seeds import shuffled


class Batches:
    """The batches of n examples.

    Args:
        n: number of examples.
        batch_size: examples of a batch; None takes all the data in every step.
        seed: seed of the order.
        client: owner of the examples, 0 for a joint batch.
        joins: as in `batches_per_epoch`.
        order: order of an epoch; None takes `shuffled`.
        drop_last: an epoch ends before a last batch that is not full.
    """

    def __init__(
        self,
        n: int,
        batch_size: int | None,
        seed: int,
        client: int = 0,
        joins: bool = False,
        order: Order | None = None,
        drop_last: bool = False,
    ) -> None:
        self.n = n
        self.batch_size = n if batch_size is None else min(batch_size, n)
        self.shuffles = batch_size is not None
        self.seed = seed
        self.client = client
        self.drop_last = drop_last
        self.steps_per_epoch = batches_per_epoch(n, self.batch_size, joins)
        if drop_last:
            # `batch_size` is at most n, so an epoch has at least one batch.
            self.steps_per_epoch = n // self.batch_size
        self._order = partial(shuffled, n) if order is None else order
        self._sizes = [self.batch_size] * (self.steps_per_epoch - 1)
        self._sizes.append(self.batch_size if drop_last else n - sum(self._sizes))
        self.visited = sum(self._sizes)
        self._epoch = -1
        self._batches: tuple[Tensor, ...] = torch.split(torch.arange(self.visited), self._sizes)

    def at(self, step: int) -> Tensor:
        """Return the indices of `step`'s batch, int64 of shape (b,), b <= batch_size.

        Steps count from 0.
        """
        epoch, position = divmod(step, self.steps_per_epoch)
        # The order of an epoch is cached, since steps are consecutive.
        if self.shuffles and epoch != self._epoch:
            order = self._order(self.seed, epoch, self.client)
            self._epoch = epoch
            self._batches = torch.split(order[: self.visited], self._sizes)
        return self._batches[position]


def batches_per_epoch(n: int, batch_size: int, joins: bool = False) -> int:
    """Return the number of batches in a pass over n examples; the last has the remainder.

    joins: a remaining single example joins the batch before it, for models that cannot train on a
    single example.
    """
    whole, left = divmod(n, batch_size)
    return whole if left == 0 or (joins and left == 1 and whole) else whole + 1


def check_batch_size(batch_size: int | None) -> None:
    """Raise ValueError unless `batch_size` is None or at least 1."""
    if batch_size is not None and batch_size < 1:
        raise ValueError(
            f"batch_size is {batch_size}, but it has to be 1 or more (None: all the data)"
        )


def check_joint_batch(batch_size: int | None, examples: int, workers: int | None) -> None:
    """Raise ValueError if a joint batch, or the data, cannot be divided over the workers."""
    check_batch_size(batch_size)
    if workers is not None and workers > examples:
        raise ValueError(f"the run has {workers} workers, but only {examples} training examples")
    if workers is not None and batch_size is not None and workers > batch_size:
        raise ValueError(
            f"a joint batch of {batch_size} cannot be divided over {workers} workers: use fewer "
            f"workers, or a batch_size of {workers} or more"
        )


def largest_piece(batch_size: int | None, examples: int, workers: int | None, pieces: int) -> int:
    """Return the examples of the largest piece, after dividing over workers and into pieces."""
    batch = examples if batch_size is None else min(batch_size, examples)
    part = -(-batch // (workers or 1))
    return -(-part // pieces)
