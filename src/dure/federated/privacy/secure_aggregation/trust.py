"""Against what kind of server a secure sum holds, in words.

*Malicious*: the server may do what it likes. Clients sign their keys and whom they were told of as
survivors, with identities from a roster that somebody else has signed (`dure.wire.owners_roster`).
*Semi-honest*: the server follows the protocol, and is curious. That is all there is without such a
roster, since then the server alone says who the clients are, and in SecAgg+, whose few neighbours
could all be the server's.

Source: Bonawitz et al. 2017 (both); Bell et al. 2020, whose protocol here is the semi-honest one.
"""

from __future__ import annotations

from dure.federated.privacy.secure_aggregation.settings import (
    SecureAggregation,
    SecureAggregationPlus,
)


def semi_honest(secure: SecureAggregation, roster: bool) -> str:
    """Why the server has to be trusted to follow the protocol; empty where it need not be.

    roster: whether a client knows the others by a roster of their owner's.
    """
    begins = "semi-honest: the server sees sums alone as long as it follows the protocol"
    if isinstance(secure, SecureAggregationPlus):
        return f"{begins}; {SecureAggregation.name} with a roster holds against one that does not"
    if not roster:
        return f"{begins}, since it alone says who the clients are; a roster (--owner) mends that"
    return ""
