"""What a client with differential privacy adds to a sum: clipped, weighted by a fixed rule.

    v = w_k · clip(Δ_k, S)  of weights, statistics of batch norm and extras, as one vector
    server adds noise:      v, quantised
    clients add noise:      v, rotated and rounded, and a share of noise (`user_level.distributed`)
    whole numbers           1, 1, and the loss

The server sees the sum alone, and so cannot clip: clients do, and nobody can see to it that they
have. Quantising makes a vector longer by at most √d steps, so it is clipped to S - √d · step
before: what is added is no longer than S. Nothing that n_k follows from is sent: the denominator is
fixed, the round's loss is the mean over clients, and in place of samples passes over the data are
counted, which a client makes as many of as it is asked to. The loss lies outside of epsilon, as all
that is measured does.

The rule is `dure.federated.privacy.user_level.estimator`'s, which gets the sum.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dure.federated.privacy.secure_aggregation.contribution import (
    MIDDLE,
    MOST,
    POINT,
    Key,
    Total,
)
from dure.federated.privacy.secure_aggregation.quantisation import Quantisation
from dure.federated.privacy.user_level import distributed
from dure.federated.privacy.user_level.estimator import Estimator, Roster, weight
from dure.federated.privacy.user_level.settings import UserLevel
from dure.federated.server.global_model import changes
from dure.protocol.messages import Assignment, Update

WHOLES = 3


class Clipping(NamedTuple):
    """What is known of the model, for clipping.

    like: what a contribution looks like; pieces: of each of its tensors, the parameters in it.
    statistics: the places of batch norm's statistics among the buffers. passes: of a client over
    its data, in a round.
    """

    settings: UserLevel
    like: Sequence[Tensor]
    pieces: Sequence[Sequence[int]]
    statistics: Sequence[int]
    passes: int = 1


@dataclass(frozen=True)
class ClippedContribution:
    """How updates become vectors.

    members: of the sum; fewest: that it is made of. turn: names the round, for its rotation, which
    all know.
    """

    clipping: Clipping
    members: int
    fewest: int
    turn: str

    @property
    def elements(self) -> int:
        """d, numbers of a contribution."""
        return sum(map(sum, self.clipping.pieces))

    @property
    def values(self) -> int:
        """Integers that stand for them."""
        return self._noised.padded if self._noised is not None else self.elements

    @property
    def length(self) -> int:
        """Integers of 32 bits in a vector."""
        return self.values + WHOLES * self._quantisation.digits(MOST)

    @property
    def _quantisation(self) -> Quantisation:
        return Quantisation(self.clipping.settings.clip, self.members)

    @property
    def _noised(self) -> distributed.Plan | None:
        """Where clients add the noise: how."""
        settings = self.clipping.settings
        if settings.where != "distributed":
            return None
        return distributed.Plan(
            self.elements, settings.clip, settings.noise, self.members, self.fewest
        )

    @property
    def _signs(self) -> bytes:
        return hashlib.sha256(f"dure rotation of {self.turn}".encode()).digest()

    @property
    def bound(self) -> float:
        """To which a contribution is clipped. Raises ValueError where rounding alone is longer."""
        clip = self.clipping.settings.clip
        if self._noised is not None:  # whose plan has room for rounding
            return clip
        bound = clip - math.sqrt(self.elements) * self._quantisation.step
        if bound <= 0:
            raise ValueError(
                f"a sum of {self.members} clients of {self.elements:,} numbers each rounds by more "
                f"than clip, {clip}: sum fewer clients"
            )
        return bound

    def encode(self, update: Update, asked: Assignment, share: float, key: Key) -> Tensor:
        """The vector of an update, int32. share: not used, the weight is that of the settings.

        key: for this vector alone. Raises ValueError for an update that is not finite.
        """
        settings = self.clipping.settings
        estimator = Estimator(
            replace(settings, noise=0.0), Roster(1.0, 1, 1.0), self.clipping.pieces, self.bound
        )
        clipped = estimator.clipped(self._contribution(update, asked))
        joined = torch.cat([one.reshape(-1).cpu() for one in clipped])
        if not bool(joined.isfinite().all()):
            raise ValueError("an update is not finite")
        weighs = weight(settings, update.examples)
        how = self._quantisation
        if self._noised is not None:
            values = distributed.encode(self._noised, joined * weighs, self._signs, key).int()
        else:
            values, _ = how.encode(joined, key("rounding", 0), weighs)
        counts = update.count > 0
        loss = (round(update.loss * POINT) if counts else 0) + MIDDLE
        return torch.cat([values, how.encode_whole([1, POINT if counts else 0, loss], MOST)])

    def _contribution(self, update: Update, asked: Assignment) -> list[Tensor]:
        places = self.clipping.statistics
        moved = changes(
            [update.buffers[place] for place in places], [asked.buffers[place] for place in places]
        )
        return [
            torch.view_as_real(one) if one.is_complex() else one
            for one in [*update.delta, *moved, *update.extra]
        ]

    def check(self, total: Tensor, clients: int) -> None:
        """Raises ValueError for a sum that no vectors of so many clients have."""
        self._quantisation.decode_whole(total[self.values :], MOST, clients)
        # Noise that clients have added may be of any size.
        if self._noised is None:
            self._quantisation.check(total[: self.values], clients)

    def decode(
        self, total: Tensor, clients: int, asked: Assignment, extras: Sequence[Tensor]
    ) -> Total:
        """What the sum of the vectors of so many clients says."""
        how = self._quantisation
        # The first is of clients of dure up to 0.1, who sent their samples.
        _, count, loss = how.decode_whole(total[self.values :], MOST, clients)
        if self._noised is not None:
            flat = distributed.decode(self._noised, total[: self.values], self._signs)
        else:
            flat = how.decode(total[: self.values], clients)
        like = self.clipping.like
        parts = torch.split(flat, [one.numel() for one in like])
        counted = count / POINT
        return Total(
            clients=clients,
            weight=clients,
            cut=0,
            samples=clients * self.clipping.passes,
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
