"""Values that server and clients of a secure sum derive from public facts.

    context   run, round, attempt, group, model, length, quantisation, members, threshold, degree
    d         SHA-256 of the context: part of every key, of the associated data of sealed shares,
              and of every signature. Parties with different contexts derive different keys, and
              their sum fails.
    U0        members that have advertised keys
    A(u)      neighbours of u: all others of U0; in SecAgg+ `degree` of them, by a graph that is
              drawn with SHA-256 of d and all advertised keys, so that no party can choose the graph
              before all keys are there
    H(u)      holders of shares of u's secrets: A(u) and u itself. `threshold` of them together
              reveal one of the two secrets; an honest holder never gives both.

All pairs: `threshold` is above 2n/3 of the n members, so that with fewer than n/3 clients colluding
with the server, two survivor lists never both find enough honest clients.

Source: Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning (CCS
2017), figure 4; Bell et al., Secure Single-Server Aggregation with (Poly)Logarithmic Overhead (CCS
2020), algorithm 2.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, NamedTuple

import msgspec

from dure.federated.privacy.secure_aggregation import graph
from dure.federated.privacy.secure_aggregation.settings import (
    SecureAggregation,
    SecureAggregationPlus,
)

ADVERTISE, SHARE, MASK, CONFIRM, UNMASK = range(5)
"""The stages, by their numbers."""

STAGES = (
    "advertise keys",
    "share keys",
    "masked input",
    "consistency check",
    "unmask",
)
"""Names of the stages."""

MOST_MEMBERS = 4096
"""Largest number of members of a sum."""

Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""Number of a client."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Members = Annotated[tuple[Number, ...], msgspec.Meta(max_length=MOST_MEMBERS)]
Text = Annotated[str, msgspec.Meta(max_length=200)]


class SumContext(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Public facts of a sum. The server sends them first, and clients compare them.

    Args:
        run: id of the run.
        round: round of the sum.
        attempt: attempt within the round.
        group: group within the round.
        model: digest of the model that clients train from.
        length: number of integers in a vector.
        quantisation: range, bits and modulus, as text.
        members: numbers of the clients, ascending.
        threshold: number of shares that reveal a secret.
        degree: neighbours of each member; n - 1 means all pairs.
        fewest: fewest clients in the sum.
    """

    run: Text
    round: Count
    attempt: Count
    group: Count
    model: Text
    length: Count
    quantisation: Text
    members: Members
    threshold: Count
    degree: Count
    fewest: Count = 2

    @property
    def complete(self) -> bool:
        """Whether all pairs of members have masks."""
        return self.degree == len(self.members) - 1

    @property
    def least(self) -> int:
        """Fewest clients that must remain at the end of every stage."""
        return max(self.fewest, self.threshold, 2)

    def check(self) -> None:
        """Check that a secure sum is possible; raises ValueError with a single sentence if not."""
        n = len(self.members)
        if not is_ascending(self.members):
            raise ValueError("members are listed twice or out of order")
        if n < 2:
            raise ValueError(f"there are {n} members, but a sum has 2 or more")
        if not self.length:
            raise ValueError("the vector has no elements")
        if not 1 <= self.degree <= n - 1:
            raise ValueError(f"{self.degree} neighbours are impossible among {n} members")
        if self.complete and not 2 * n < 3 * self.threshold <= 3 * n:
            raise ValueError(
                f"the threshold is {self.threshold} of {n} members, but it has to be more than "
                "2/3 of them and at most all"
            )
        if not self.complete and self.degree % 2:
            raise ValueError(
                f"each member has {self.degree} neighbours, but the number has to be even"
            )
        if not self.complete and not 2 <= self.threshold <= self.degree:
            raise ValueError(
                f"the threshold is {self.threshold} of {self.degree} neighbours, but it has to be "
                "2 or more and at most all"
            )
        if self.fewest > n:
            raise ValueError(f"a sum needs {self.fewest} clients, but there are {n} members")

    def digest(self) -> bytes:
        """Return d, 32 bytes."""
        return _hashed("context", msgspec.msgpack.encode(self))

    def position(self) -> tuple[int, ...]:
        """Return (round, attempt, group): unique in the run, for the derivation of keys."""
        return (self.round, self.attempt, self.group)

    def differs(self, other: SumContext) -> str:
        """Return the name of the first field that differs; empty if all are equal."""
        for name in self.__struct_fields__:
            if getattr(self, name) != getattr(other, name):
                return name
        return ""


class SumBounds(NamedTuple):
    """Bounds that the settings imply for a number of members; names as in `SumContext`."""

    threshold: int
    degree: int
    fewest: int


# Cached: a plan takes milliseconds, and in a simulation all clients need the same plan.
@lru_cache(maxsize=64)
def bounds(settings: SecureAggregation, members: int) -> SumBounds:
    """Return threshold, degree and fewest clients of a sum.

    In SecAgg+ a sum with more dropouts than planned is rejected: the graph could become
    disconnected, and the server would see the sum of each component. Raises ValueError if no graph
    is secure.
    """
    stay = math.ceil(settings.threshold * members - 1e-9)
    above = max(stay, 2 * members // 3 + 1)
    if not isinstance(settings, SecureAggregationPlus):
        return SumBounds(above, members - 1, max(above, settings.minimum))
    plan = graph.plan(members, settings.corrupt, settings.drop_out)
    if plan.degree == members - 1:
        return SumBounds(above, plan.degree, max(above, settings.minimum))
    left = members - math.floor(settings.drop_out * members + 1e-9)
    return SumBounds(plan.threshold, plan.degree, max(stay, left, settings.minimum))


class MaskingCohort:
    """Members that have advertised keys, with the graph of neighbours.

    Args:
        context: facts of the sum.
        present: U0, ascending.
        seed: seed of the graph (`graph_seed`), used if not all pairs have masks.
    """

    def __init__(self, context: SumContext, present: Sequence[int], seed: bytes) -> None:
        self.present = tuple(present)
        self._everybody = frozenset(present)
        self._graph: dict[int, tuple[int, ...]] | None = None
        # After dropouts at most `degree` others may remain: then all pairs have masks.
        if context.degree < len(self.present) - 1:
            self._graph = _drawn(self.present, context.degree, seed)

    def neighbours(self, client: int) -> tuple[int, ...]:
        """Return A(client), ascending."""
        if self._graph is not None:
            return self._graph[client]
        return tuple(other for other in self.present if other != client)

    def holders(self, client: int) -> tuple[int, ...]:
        """Return H(client), in the order of its shares. The relation is symmetric."""
        if self._graph is not None:
            return tuple(sorted((client, *self._graph[client])))
        return self.present

    def __contains__(self, client: int) -> bool:
        return client in self._everybody


def stages(context: SumContext, signed: bool) -> tuple[int, ...]:
    """Return the stages of a sum in order. `signed`: whether clients have a roster."""
    if checks_consistency(context, signed):
        return (ADVERTISE, SHARE, MASK, CONFIRM, UNMASK)
    return (ADVERTISE, SHARE, MASK, UNMASK)


def checks_consistency(context: SumContext, signed: bool) -> bool:
    """Return whether the protocol is secure against a malicious server."""
    return signed and context.complete


# Cached: in a simulation, all clients of a sum draw the same graph.
@lru_cache(maxsize=4)
def _drawn(present: tuple[int, ...], degree: int, seed: bytes) -> dict[int, tuple[int, ...]]:
    places = graph.neighbours(len(present), degree, seed)
    return {
        client: tuple(present[place] for place in of)
        for client, of in zip(present, places, strict=True)
    }


def is_ascending(clients: Sequence[int]) -> bool:
    """Return whether the numbers are strictly ascending."""
    return all(first < second for first, second in pairwise(clients))


def graph_seed(digest: bytes, keys: Iterable[bytes]) -> bytes:
    """Return the graph's seed from d and the advertised keys, in the order of their clients."""
    return _hashed("graph", digest, *keys)


def keys_text(digest: bytes, client: int, channel: bytes, mask: bytes) -> bytes:
    """Return the bytes that a client signs for its keys."""
    return _hashed("keys", digest, _of(client), channel, mask)


def survivors_text(digest: bytes, survivors: Sequence[int]) -> bytes:
    """Return the bytes that a client signs for a list of survivors."""
    return _hashed("survivors", digest, msgspec.msgpack.encode(tuple(survivors)))


def pair_key_info(purpose: str, digest: bytes, one: int, other: int) -> bytes:
    """Return the `info` of a key between two clients, equal for both."""
    return _hashed(purpose, digest, _of(min(one, other)), _of(max(one, other)))


def share_associated_data(digest: bytes, sender: int, receiver: int) -> bytes:
    """Return the associated data of a sealed share."""
    return _hashed("share", digest, _of(sender), _of(receiver))


def mask_sign(client: int, other: int) -> int:
    """Return the sign of the pairwise mask in the client's vector: 1 or -1."""
    return 1 if client < other else -1


def own_mask(digest: bytes, client: int, seed: bytes) -> bytes:
    """Return the key of a client's own mask."""
    return _hashed("key of own mask", digest, _of(client), seed)


def commitment(digest: bytes, client: int, seed: bytes) -> bytes:
    """Return a client's commitment to the seed of its own mask; it hides the seed."""
    return _hashed("own mask", digest, _of(client), seed)


def share_commitment(purpose: str, digest: bytes, owner: int, holder: int, share: bytes) -> bytes:
    """Return the commitment to a share. The share is as random as a key, so the hash hides it.

    `purpose` names the shared secret: "private" or "seed".
    """
    # Joined for speed, as a round has n^2 commitments. All parts except the purpose have a fixed
    # length, so the encoding is unambiguous.
    parts = (b"dure share 1\n", purpose.encode(), b"\n", digest, _of(owner), _of(holder), share)
    return hashlib.sha256(b"".join(parts)).digest()


def _of(client: int) -> bytes:
    return client.to_bytes(4, "big")


def _hashed(purpose: str, *parts: bytes) -> bytes:
    # Each part has a length prefix, so different lists of parts have different bytes.
    whole = hashlib.sha256(b"dure secure aggregation 1\n" + purpose.encode() + b"\n")
    for part in parts:
        whole.update(len(part).to_bytes(8, "big") + part)
    return whole.digest()
