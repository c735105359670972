"""What a server asks of secure aggregation (`dure.federated.privacy.secure_aggregation.rounds`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from dure.federated.server.combining import Summed
from dure.protocol.messages import Answer, Assignment, Say

Exchange = Callable[[Sequence[Say]], Iterator[Answer]]
"""`Carrier.exchange`."""


class Summing(Protocol):
    """It sums a round's updates, which stay with their clients."""

    def sums_of(
        self, asked: Mapping[int, Assignment], extras: Sequence[Tensor], exchange: Exchange
    ) -> dict[str, Any]:
        """The sums, as a tree, with "lost": ticket to the reason why its update is in none.

        asked: what was sent, by ticket. extras: what an update's look like.
        """

    def means(
        self, made: Mapping[str, Any], asked: Mapping[int, Assignment], extras: Sequence[Tensor]
    ) -> Iterator[Summed]:
        """What the rule gets of the sums."""
