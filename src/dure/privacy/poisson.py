"""Batches of differential privacy: every example has its own coin in every step.

    an example is in a step's batch with probability q = B / n, whatever the others are in

So a batch has B examples in the mean, and sometimes none: then its step is noise alone. That nobody
knows whether an example was in a batch is what makes little noise do (amplification by sampling);
for shuffled batches nothing of the kind is proven, so they are not offered. Who is in a batch comes
from `dure.randomness.secret`, never from the run's generators.

Sources: M. Abadi et al., "Deep Learning with Differential Privacy", CCS 2016; L. Chua et al., "How
Private are DP-SGD Implementations?", ICML 2024, on shuffled batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dure.randomness.keystream import coins
from dure.randomness.secret import Secret


class PoissonBatches:
    """The batches of n examples; it stands in for `dure.data.batches.Batches`.

    batch_size: B, the mean; None, or n and more, is all the data in every step. secret: answers the
    same question alike where a batch may be asked for twice, by loaders say. where: what tells
    these batches from others of the secret, such as (client, turn).
    """

    def __init__(self, n: int, batch_size: int | None, secret: Secret, *where: int) -> None:
        self.n = n
        self.batch_size = n if batch_size is None else min(batch_size, n)
        self.rate = self.batch_size / n
        self.steps_per_epoch = -(-n // self.batch_size)
        self._secret = secret
        self._where = where

    def at(self, step: int) -> Tensor:
        """The indices of `step`'s batch, int64, in order; perhaps none."""
        if self.rate == 1:
            return torch.arange(self.n)
        key = self._secret.key("dp-sgd batch", *self._where, step)
        return coins(key, self.rate, self.n).nonzero().flatten()
