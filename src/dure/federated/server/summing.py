"""What a server asks of secure aggregation (`dure.federated.privacy.secure_aggregation.rounds`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from dure.federated.server.combining import Summed
from dure.protocol.carrier import Draft
from dure.protocol.messages import Answer, Assignment, Say

Exchange = Callable[[Sequence[Say]], Iterator[Answer]]
"""`Carrier.exchange`."""


class Summing(Protocol):
    """It sums a round's updates, which stay with their clients."""

    @property
    def fewest(self) -> int:
        """The fewest clients of a sum."""

    def sums_of(
        self,
        asked: Mapping[int, Assignment],
        extras: Sequence[Tensor],
        exchange: Exchange,
        draft: Draft | None = None,
    ) -> dict[str, Any]:
        """The sums, as a tree, with

            lost      ticket to the reason why its update is in none
            guilty    client to what it has done, provably, that no client does
            helped    clients that contribute to no other sum of this model

        asked: what was sent, by ticket. extras: what an update's look like. draft: keeps what a
        server needs that is started again before the sums are there.
        """

    def means(
        self, made: Mapping[str, Any], asked: Mapping[int, Assignment], extras: Sequence[Tensor]
    ) -> Iterator[Summed]:
        """What the rule gets of the sums."""
