"""Local noise: each client adds noise to its update, so that the server need not be trusted.

    client     sends clip(Δ_k) + N(0, (z·S)²)       of weights, statistics of batch norm, extras
    server     sums w_k · update, over q·W

The server sees each message, so each round of a client counts as if no other client existed:
sampling amplifies nothing, and the account is that of the client with the most assignments.
Neighbours are any two contributions, which are 2S apart. The sum of n has noise of deviation
z·S·√n, √n times that of noise on the server: the cost of trusting no party.

The client does not send its loss, which is measured without noise. The client does send a failure,
such as a loss that is not finite.

Source: S. Kasiviswanathan et al., "What Can We Learn Privately?", SIAM Journal on Computing 2011.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from dure.federated.privacy.user_level.estimator import ClientPopulation, Estimator
from dure.federated.privacy.user_level.settings import UserLevel
from dure.federated.server.global_model import buffer_changes
from dure.protocol.messages import Assignment, Update
from dure.randomness.keystream import normal, to_grid
from dure.randomness.secret import Secret


class LocalNoise:
    """Clipping and noise of a client's update before it is sent.

    Args:
        settings: settings of user-level privacy.
        pieces: sizes of the pieces of a contribution's tensors.
        statistics: positions of batch norm's statistics among the buffers.
        secret: source of the noise.
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
        # Only the estimator's clipping is used, not its sums.
        self.estimator = Estimator(settings, ClientPopulation(1.0, 1, 1.0), pieces, settings.clip)

    def __call__(self, update: Update, asked: Assignment) -> Update:
        """Return the noisy update to send; a failed update is returned unchanged."""
        if update.failure is not None:
            return update
        before = [asked.buffers[place] for place in self.statistics]
        moved = buffer_changes([update.buffers[place] for place in self.statistics], before)
        tensors = [*update.delta, *moved, *update.extra]
        noised = self._noised(tensors, self.secret.key("local noise", asked.client, asked.round))
        weights, rest = len(update.delta), len(moved)
        # Buffers without noise are sent as received.
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
