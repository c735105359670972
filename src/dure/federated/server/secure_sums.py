"""Interface between the server and secure sums.

`dure.federated.privacy.secure_aggregation.rounds` implements the interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from dure.federated.server.combining import SummedUpdates
from dure.protocol.carrier import Draft
from dure.protocol.messages import Assignment, ProtocolAnswer, ProtocolStep

Exchange = Callable[[Sequence[ProtocolStep]], Iterator[ProtocolAnswer]]
"""Type of `Carrier.exchange`."""


class SecureSummation(Protocol):
    """Secure aggregation: sums a round's updates, which stay with their clients."""

    @property
    def fewest(self) -> int:
        """Fewest clients of a sum."""

    def sums_of(
        self,
        asked: Mapping[int, Assignment],
        extras: Sequence[Tensor],
        exchange: Exchange,
        draft: Draft | None = None,
    ) -> dict[str, Any]:
        """Return the sums, as a tree with three further entries.

            lost      assignment id to the reason why its update is in no sum
            guilty    client to its provable violation of the protocol
            helped    clients that contribute to no other sum of this model

        asked: assignments, by id. extras: tensors like an update's extras. draft: stores the
        progress, for a server that restarts before the sums are complete.
        """

    def means(
        self, made: Mapping[str, Any], asked: Mapping[int, Assignment], extras: Sequence[Tensor]
    ) -> Iterator[SummedUpdates]:
        """Yield the means of the sums, as inputs of the rule."""
