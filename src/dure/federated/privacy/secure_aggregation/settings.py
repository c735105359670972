"""Settings of secure aggregation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from dure.arguments import above, at_least, check_ranges
from dure.privacy.protection import Protection


@dataclass(frozen=True)
class SecureAggregation(Protection):
    """Secure aggregation: the server sees only the sum of a round's updates (Bonawitz et al. 2017).

    Args:
        threshold: fraction of a round's clients that must remain to its end, above 2/3.
        range: largest change of a weight that can be sent; larger changes are cut off and counted.
        most_examples: largest number of examples for which a client counts.
        minimum: fewest clients of a sum.
    """

    threshold: float = 0.7
    range: float = field(default=1.0, metadata=above(0, finite=True))
    most_examples: int = field(default=1000, metadata=at_least(1))
    minimum: int = field(default=3, metadata=at_least(2))

    name: ClassVar[str] = "secure-aggregation"

    def __post_init__(self) -> None:
        check_ranges(self, named=True)
        if not 2 / 3 < self.threshold <= 1:
            raise ValueError(
                f"{self.name}: threshold is {self.threshold}, but it has to be more than 2/3: "
                "otherwise a server that sends different lists to two halves of the clients "
                "could unmask both"
            )


@dataclass(frozen=True)
class SecureAggregationPlus(SecureAggregation):
    """Secure aggregation in which each client has masks with a few neighbours (Bell et al. 2020).

    The protocol is secure against a semi-honest server.

    Args:
        threshold: as in `SecureAggregation`.
        range: as in `SecureAggregation`.
        most_examples: as in `SecureAggregation`.
        minimum: as in `SecureAggregation`.
        corrupt: fraction of clients that collude with the server.
        drop_out: fraction of a round's clients that may drop out.
    """

    corrupt: float = 0.05
    drop_out: float = 0.1

    name: ClassVar[str] = "secure-aggregation-plus"
