"""Threat model of a secure sum, in words.

*Malicious*: the server may deviate from the protocol. Clients sign their keys and the survivor
list, with identities from a roster that a third party has signed (`dure.wire.owners_roster`).
*Semi-honest*: the server follows the protocol, and is curious. This is the guarantee without such a
roster, since then the server alone defines the clients' identities, and in SecAgg+, in which all of
a client's neighbours could belong to the server.

Source: Bonawitz et al. 2017 (both); Bell et al. 2020, whose protocol here is the semi-honest one.
"""

from __future__ import annotations

from dure.federated.privacy.secure_aggregation.settings import (
    SecureAggregation,
    SecureAggregationPlus,
)


def semi_honest_reason(secure: SecureAggregation, roster: bool) -> str:
    """Return why the server must follow the protocol; empty if the sum survives a malicious server.

    `roster`: whether clients verify each other's keys with a roster of an owner.
    """
    begins = "semi-honest: the server sees sums alone as long as it follows the protocol"
    if isinstance(secure, SecureAggregationPlus):
        return f"{begins}; {SecureAggregation.name} with a roster holds against one that does not"
    if not roster:
        return f"{begins}, since it alone says who the clients are; a roster (--owner) mends that"
    return ""
