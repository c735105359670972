"""Poisson sampling: every example is in every step's batch independently with the same probability.

    an example is in a step's batch with probability q = B / n, independently of the others

So a batch has B examples in expectation, and sometimes none: then its step is noise alone. Little
noise suffices because the participation of an example is secret (amplification by sampling);
shuffled batches have no such proof, so they are not supported. Samples come from
`dure.randomness.secret`, never from the run's generators.

Sources: M. Abadi et al., "Deep Learning with Differential Privacy", CCS 2016; L. Chua et al., "How
Private are DP-SGD Implementations?", ICML 2024, on shuffled batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dure.randomness.keystream import bernoulli_samples
from dure.randomness.secret import Secret


class PoissonBatches:
    """Poisson-sampled batches of n examples; replaces `dure.data.batches.Batches`.

    batch_size: B, the expected size; None, or n and more, is all the data in every step. secret:
    source of the samples; the same request has the same answer, as loaders may request a batch
    twice. where: identifies these batches among others of the secret, such as (client, turn).
    """

    def __init__(self, n: int, batch_size: int | None, secret: Secret, *where: int) -> None:
        self.n = n
        self.batch_size = n if batch_size is None else min(batch_size, n)
        self.rate = self.batch_size / n
        self.steps_per_epoch = -(-n // self.batch_size)
        self._secret = secret
        self._where = where

    def at(self, step: int) -> Tensor:
        """Return the indices of `step`'s batch, int64, in order; possibly empty."""
        if self.rate == 1:
            return torch.arange(self.n)
        key = self._secret.key("dp-sgd batch", *self._where, step)
        return bernoulli_samples(key, self.rate, self.n).nonzero().flatten()
