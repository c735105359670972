"""Contribution of a client with differential privacy to a sum: clipped, with a fixed weight.

    v = w_k · clip(Δ_k, S)  for weights, statistics of batch norm and extras, as one vector
    server adds noise:      v, quantised
    clients add noise:      v, rotated and rounded, and a share of noise (`user_level.distributed`)
    whole numbers           1, 1, and the loss

The server sees only the sum and cannot clip. The clients clip, and the guarantee relies on their
honesty. Quantisation lengthens a vector by at most √d steps, so the vector is first clipped to S -
√d · step: the contribution is then no longer than S. No message reveals n_k: the denominator is
fixed, the round's loss is the mean over clients, and the count of samples is replaced by passes
over the data, whose number the server prescribes. Epsilon does not cover the loss, nor any other
measurement.

The rule is that of `dure.federated.privacy.user_level.estimator`, which takes the sum.
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
    DecodedSum,
    Key,
)
from dure.federated.privacy.secure_aggregation.quantisation import Quantisation
from dure.federated.privacy.user_level import distributed
from dure.federated.privacy.user_level.estimator import ClientPopulation, Estimator, weight
from dure.federated.privacy.user_level.settings import UserLevel
from dure.federated.server.global_model import buffer_changes
from dure.protocol.messages import Assignment, Update

WHOLES = 3


class ContributionClipping(NamedTuple):
    """The model's facts that clipping needs.

    Args:
        settings: settings of user-level privacy.
        like: tensors of the shapes of a contribution.
        pieces: sizes of the parameters in each of these tensors.
        statistics: positions of batch norm's statistics among the buffers.
        passes: passes of a client over its data in a round.
    """

    settings: UserLevel
    like: Sequence[Tensor]
    pieces: Sequence[Sequence[int]]
    statistics: Sequence[int]
    passes: int = 1


@dataclass(frozen=True)
class ClippedContribution:
    """Encoder of updates as integer vectors, and decoder of their sum.

    Args:
        clipping: facts for clipping.
        members: number of members of the sum.
        fewest: fewest clients in the sum.
        turn: name of the round, known to all; seeds the rotation.
    """

    clipping: ContributionClipping
    members: int
    fewest: int
    turn: str

    @property
    def elements(self) -> int:
        """d, the number of real numbers in a contribution."""
        return sum(map(sum, self.clipping.pieces))

    @property
    def values(self) -> int:
        """Number of integers that encode the real numbers."""
        return self._noised.padded if self._noised is not None else self.elements

    @property
    def length(self) -> int:
        """Number of 32-bit integers in a vector."""
        return self.values + WHOLES * self._quantisation.digits(MOST)

    @property
    def _quantisation(self) -> Quantisation:
        return Quantisation(self.clipping.settings.clip, self.members)

    @property
    def _noised(self) -> distributed.DistributedNoisePlan | None:
        """Plan of the clients' noise; None if the server adds the noise."""
        settings = self.clipping.settings
        if settings.where != "distributed":
            return None
        return distributed.DistributedNoisePlan(
            self.elements, settings.clip, settings.noise, self.members, self.fewest
        )

    @property
    def _signs(self) -> bytes:
        return hashlib.sha256(f"dure rotation of {self.turn}".encode()).digest()

    @property
    def bound(self) -> float:
        """Norm to which a contribution is clipped.

        Raises ValueError if rounding alone exceeds it.
        """
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
        """Return the int32 vector of an update.

        Args:
            update: the client's update.
            asked: assignment that the update answers.
            share: not used; the settings define the weight.
            key: draws keys for this vector alone.

        Raises ValueError for an update that is not finite.
        """
        settings = self.clipping.settings
        estimator = Estimator(
            replace(settings, noise=0.0),
            ClientPopulation(1.0, 1, 1.0),
            self.clipping.pieces,
            self.bound,
        )
        clipped = estimator.clipped(self._contribution(update, asked))
        joined = torch.cat([one.reshape(-1).cpu() for one in clipped])
        if not bool(joined.isfinite().all()):
            raise ValueError("an update contains values that are not finite")
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
        moved = buffer_changes(
            [update.buffers[place] for place in places], [asked.buffers[place] for place in places]
        )
        return [
            torch.view_as_real(one) if one.is_complex() else one
            for one in [*update.delta, *moved, *update.extra]
        ]

    def check(self, total: Tensor, clients: int) -> None:
        """Check that `clients` vectors can have this sum; raises ValueError if not."""
        self._quantisation.decode_whole(total[self.values :], MOST, clients)
        # Noise from clients is unbounded, so the values have no range to check.
        if self._noised is None:
            self._quantisation.check(total[: self.values], clients)

    def decode(
        self, total: Tensor, clients: int, asked: Assignment, extras: Sequence[Tensor]
    ) -> DecodedSum:
        """Return the contents of the sum of `clients` vectors."""
        how = self._quantisation
        # The first number is not used: clients of dure up to 0.1 sent their samples in it.
        _, count, loss = how.decode_whole(total[self.values :], MOST, clients)
        if self._noised is not None:
            flat = distributed.decode(self._noised, total[: self.values], self._signs)
        else:
            flat = how.decode(total[: self.values], clients)
        like = self.clipping.like
        parts = torch.split(flat, [one.numel() for one in like])
        counted = count / POINT
        return DecodedSum(
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
