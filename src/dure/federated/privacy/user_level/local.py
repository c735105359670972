"""Noise that each client adds to what it sends: the server need not be trusted with anything.

    client     sends clip(Δ_k) + N(0, (z·S)²)       of weights, statistics of batch norm, extras
    server     sums w_k · what came, over q·W

Whatever a client sends may be seen, so each of its rounds counts, as if no other client were there:
nothing is amplified by sampling, and the account is that of the client that was asked most often.
Neighbours are any two contributions, which are 2S apart. The sum of n has noise of deviation
z·S·√n, √n times that of noise on the server: it is the price of trusting nobody.

The loss is not sent, as it is measured without noise; that a client had no update at all (its loss
became not finite, say) is.

Source: S. Kasiviswanathan et al., "What Can We Learn Privately?", SIAM Journal on Computing 2011.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from dure.federated.privacy.user_level.estimator import Estimator, Roster
from dure.federated.privacy.user_level.settings import UserLevel
from dure.federated.server.global_model import changes
from dure.protocol.messages import Assignment, Update
from dure.randomness.keystream import normal, to_grid
from dure.randomness.secret import Secret


class LocalNoise:
    """What a client does to an update before it is sent.

    pieces: of the tensors of a contribution. statistics: places of batch norm's among the buffers.
    """

    def __init__(
        self,
        settings: UserLevel,
        pieces: Sequence[Sequence[int]],
        statistics: Sequence[int],
        secret: Secret,
    ) -> None:
        self.statistics = statistics
        self.secret = secret
        # Its sums are not used: a client clips its own.
        self.estimator = Estimator(settings, Roster(1.0, 1, 1.0), pieces, settings.clip)

    def __call__(self, update: Update, asked: Assignment) -> Update:
        """The update as it is sent; one that failed says so."""
        if update.failure is not None:
            return update
        before = [asked.buffers[place] for place in self.statistics]
        moved = changes([update.buffers[place] for place in self.statistics], before)
        tensors = [*update.delta, *moved, *update.extra]
        noised = self._noised(tensors, self.secret.key("local noise", asked.client, asked.round))
        weights, rest = len(update.delta), len(moved)
        # Buffers that are not noised are as they came.
        buffers = list(asked.buffers)
        for place, old, change in zip(
            self.statistics, before, noised[weights : weights + rest], strict=True
        ):
            buffers[place] = old + change
        return replace(
            update,
            delta=noised[:weights],
            buffers=buffers,
            extra=noised[weights + rest :],
            loss=0.0,
            counted=0.0,
        )

    def _noised(self, tensors: Sequence[Tensor], key: bytes) -> list[Tensor]:
        real = [torch.view_as_real(one) if one.is_complex() else one for one in tensors]
        clipped = self.estimator.clipped(real)
        deviation = self.estimator.deviation
        if deviation:
            drawn = normal(key, (self.estimator.elements,)).mul_(deviation).to(clipped[0].device)
            pieces = torch.split(drawn, [one.numel() for one in clipped])
            clipped = [
                to_grid(one + piece.view(one.shape), deviation)
                for one, piece in zip(clipped, pieces, strict=True)
            ]
        return [
            (torch.view_as_complex(one) if like.is_complex() else one).to(like.dtype)
            for one, like in zip(clipped, tensors, strict=True)
        ]
