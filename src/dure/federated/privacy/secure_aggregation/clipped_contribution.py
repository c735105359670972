"""What a client with differential privacy adds to a sum: clipped, weighted by a fixed rule.

    w_k · clip(Δ_k, S')   of weights, statistics of batch norm and extras, as one vector, quantised
    whole numbers         the samples; what the loss has counted in them, and the loss times that

The server sees the sum alone, and so cannot clip: clients do, and nobody can see to it that they
have. Rounding makes a vector longer by at most √d steps, so it is clipped to S' = S - √d · step
before: what is added is no longer than S. n_k is not sent: the denominator is fixed. The loss lies
outside of epsilon, as all that is measured does.

The rule is `dure.federated.privacy.user_level.estimator`'s; the server adds the noise to the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dure.federated.privacy.secure_aggregation.contribution import (
    MIDDLE,
    MOST,
    POINT,
    Total,
)
from dure.federated.privacy.secure_aggregation.quantisation import Quantisation
from dure.federated.privacy.user_level.estimator import Estimator, Roster, weight
from dure.federated.privacy.user_level.settings import UserLevel
from dure.federated.server.global_model import changes
from dure.protocol.messages import Assignment, Update

WHOLES = 3


class Clipping(NamedTuple):
    """What is known of the model, for clipping.

    like: what a contribution looks like; pieces: of each of its tensors, the parameters in it.
    statistics: the places of batch norm's statistics among the buffers.
    """

    settings: UserLevel
    like: Sequence[Tensor]
    pieces: Sequence[Sequence[int]]
    statistics: Sequence[int]


@dataclass(frozen=True)
class ClippedContribution:
    """How updates become vectors. members: of the sum."""

    clipping: Clipping
    members: int

    @property
    def quantisation(self) -> Quantisation:
        return Quantisation(self.clipping.settings.clip, self.members)

    @property
    def values(self) -> int:
        """Numbers that are quantised."""
        return sum(map(sum, self.clipping.pieces))

    @property
    def length(self) -> int:
        """Integers of 32 bits in a vector."""
        return self.values + WHOLES * self.quantisation.digits(MOST)

    @property
    def bound(self) -> float:
        """S', to which a contribution is clipped before it is rounded.

        Raises ValueError where rounding alone is longer than S.
        """
        rounding = math.sqrt(self.values) * self.quantisation.step
        bound = self.clipping.settings.clip - rounding
        if bound <= 0:
            raise ValueError(
                f"a sum of {self.members} clients of {self.values:,} numbers each rounds by more "
                f"than clip, {self.clipping.settings.clip}: sum fewer clients"
            )
        return bound

    def encode(
        self, update: Update, asked: Assignment, share: float, key: Callable[[int], bytes]
    ) -> Tensor:
        """The vector of an update, int32. share: not used, the weight is that of the settings.

        key: for the rounding, by number. Raises ValueError for an update that is not finite.
        """
        settings = self.clipping.settings
        estimator = Estimator(
            replace(settings, noise=0.0), Roster(1.0, 1, 1.0), self.clipping.pieces, self.bound
        )
        clipped = estimator.clipped(self._contribution(update, asked))
        joined = torch.cat([one.reshape(-1).cpu() for one in clipped])
        how = self.quantisation
        values, _ = how.encode(joined, key(0), weight(settings, update.examples))
        count = max(0, round(update.count * POINT))
        loss = round(update.loss * update.count * POINT) + MIDDLE
        return torch.cat([values, how.encode_whole([update.samples, count, loss], MOST)])

    def _contribution(self, update: Update, asked: Assignment) -> list[Tensor]:
        places = self.clipping.statistics
        moved = changes(
            [update.buffers[place] for place in places], [asked.buffers[place] for place in places]
        )
        return [
            torch.view_as_real(one) if one.is_complex() else one
            for one in [*update.delta, *moved, *update.extra]
        ]

    def decode(
        self, total: Tensor, clients: int, asked: Assignment, extras: Sequence[Tensor]
    ) -> Total:
        """What the sum of the vectors of so many clients says."""
        how = self.quantisation
        samples, count, loss = how.decode_whole(total[self.values :], MOST, clients)
        flat = how.decode(total[: self.values], clients)
        like = self.clipping.like
        parts = torch.split(flat, [one.numel() for one in like])
        counted = count / POINT
        return Total(
            clients=clients,
            weight=clients,
            cut=0,
            samples=samples,
            counted=counted,
            loss=(loss - clients * MIDDLE) / POINT / counted if count else 0.0,
            delta=[],
            buffers=[],
            extra=[],
            rises=[],
            clipped=[
                part.view(one.shape).to(one.device) for part, one in zip(parts, like, strict=True)
            ],
        )
