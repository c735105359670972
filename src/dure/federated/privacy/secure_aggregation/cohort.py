"""What server and clients of a secure sum derive from the same public facts.

    context   run, round, attempt, group, model, length, quantisation, members, threshold, degree
    d         SHA-256 of the context: part of every key, of what shares are sealed with, and of
              every signature. Whoever was told anything else has other keys, and there is no sum.
    U0        members that have advertised keys
    A(u)      neighbours of u: all others of U0; or `degree` of them in SecAgg+, by a graph that is
              drawn with SHA-256 of d and all keys that were advertised, so that nobody chooses it
              before all keys are there
    H(u)      holders of shares of u's secrets: A(u) and u itself. Any `threshold` of them give one
              of the two secrets; an honest holder gives never both.

All pairs: `threshold` is above 2n/3 of the n members, so that two lists of survivors never both
find enough honest clients where fewer than a third of all lie with the server.

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
"""Their names."""

MOST_MEMBERS = 4096
"""Of one sum."""

Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""Of a client."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Members = Annotated[tuple[Number, ...], msgspec.Meta(max_length=MOST_MEMBERS)]
Text = Annotated[str, msgspec.Meta(max_length=200)]


class Context(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The public facts of one sum: the server says them first, and clients compare them.

    run: its id. round, attempt, group: of the sum, within the run. model: digest of what clients
    were handed out to train from. length: integers of a vector. quantisation: range, bits and
    modulus, as text. members: clients' numbers, in order. threshold: shares that give a secret.
    degree: neighbours of each; all others is n - 1. fewest: clients that a sum has, at least.
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
        """Whether all pairs mask with each other."""
        return self.degree == len(self.members) - 1

    @property
    def least(self) -> int:
        """Clients that have to be there at the end of every stage."""
        return max(self.fewest, self.threshold, 2)

    def check(self) -> None:
        """Raises ValueError for what no secure sum can be made with, in one sentence."""
        n = len(self.members)
        if not is_ascending(self.members):
            raise ValueError("members are listed twice or out of order")
        if n < 2:
            raise ValueError(f"there are {n} members, but a sum has 2 or more")
        if not self.length:
            raise ValueError("the vector has no elements")
        if not 1 <= self.degree <= n - 1:
            raise ValueError(f"{self.degree} neighbours cannot be had among {n} members")
        if self.complete and not 2 * n < 3 * self.threshold <= 3 * n:
            raise ValueError(
                f"the threshold is {self.threshold} of {n} members, but it has to be above 2/3 of "
                f"them, and no more than all"
            )
        if not self.complete and self.degree % 2:
            raise ValueError(f"a graph in which each has {self.degree} neighbours: it is even")
        if not self.complete and not 2 <= self.threshold <= self.degree:
            raise ValueError(
                f"the threshold is {self.threshold} of {self.degree} neighbours, but it has to be "
                f"2 or more, and no more than all"
            )
        if self.fewest > n:
            raise ValueError(f"a sum is to have {self.fewest} clients, and there are {n} members")

    def digest(self) -> bytes:
        """d, 32 bytes."""
        return _hashed("context", msgspec.msgpack.encode(self))

    def position(self) -> tuple[int, ...]:
        """What sets this sum apart from others of the run, for keys that are drawn."""
        return (self.round, self.attempt, self.group)

    def differs(self, other: Context) -> str:
        """The name of the first field that differs; empty where none does."""
        for name in self.__struct_fields__:
            if getattr(self, name) != getattr(other, name):
                return name
        return ""


class Bounds(NamedTuple):
    """What settings ask for of so many members; as the fields of a context."""

    threshold: int
    degree: int
    fewest: int


# Kept: a plan takes milliseconds, and in a simulation all clients make the same one.
@lru_cache(maxsize=64)
def bounds(settings: SecureAggregation, members: int) -> Bounds:
    """The threshold, the neighbours of each, and the fewest clients of a sum.

    In SecAgg+ no more may be lost than was planned for: the graph could fall apart, and the sum of
    each part be seen. Raises ValueError where no graph is enough.
    """
    stay = math.ceil(settings.threshold * members - 1e-9)
    above = max(stay, 2 * members // 3 + 1)
    if not isinstance(settings, SecureAggregationPlus):
        return Bounds(above, members - 1, max(above, settings.minimum))
    plan = graph.plan(members, settings.corrupt, settings.drop_out)
    if plan.degree == members - 1:
        return Bounds(above, plan.degree, max(above, settings.minimum))
    left = members - math.floor(settings.drop_out * members + 1e-9)
    return Bounds(plan.threshold, plan.degree, max(stay, left, settings.minimum))


class Cohort:
    """The members that have advertised keys, and who is whose neighbour.

    present: U0, in order. seed: of the graph (`graph_seed`), where not all pairs mask.
    """

    def __init__(self, context: Context, present: Sequence[int], seed: bytes) -> None:
        self.present = tuple(present)
        self._everybody = frozenset(present)
        self._graph: dict[int, tuple[int, ...]] | None = None
        # Of fewer than were asked there may be no more than so many neighbours.
        if context.degree < len(self.present) - 1:
            self._graph = _drawn(self.present, context.degree, seed)

    def neighbours(self, client: int) -> tuple[int, ...]:
        """A(client), in order."""
        if self._graph is not None:
            return self._graph[client]
        return tuple(other for other in self.present if other != client)

    def holders(self, client: int) -> tuple[int, ...]:
        """H(client), in the order of its shares. Who holds shares of whom is mutual."""
        if self._graph is not None:
            return tuple(sorted((client, *self._graph[client])))
        return self.present

    def __contains__(self, client: int) -> bool:
        return client in self._everybody


def stages(context: Context, signed: bool) -> tuple[int, ...]:
    """The stages of a sum, in their order. signed: whether there is a roster."""
    if checks_consistency(context, signed):
        return (ADVERTISE, SHARE, MASK, CONFIRM, UNMASK)
    return (ADVERTISE, SHARE, MASK, UNMASK)


def checks_consistency(context: Context, signed: bool) -> bool:
    """Whether the protocol holds against a server that lies, and not only against a curious one."""
    return signed and context.complete


# Kept: in a simulation, all clients of a sum draw the same graph.
@lru_cache(maxsize=4)
def _drawn(present: tuple[int, ...], degree: int, seed: bytes) -> dict[int, tuple[int, ...]]:
    places = graph.neighbours(len(present), degree, seed)
    return {
        client: tuple(present[place] for place in of)
        for client, of in zip(present, places, strict=True)
    }


def is_ascending(clients: Sequence[int]) -> bool:
    """Whether they are in order, and none is there twice."""
    return all(first < second for first, second in pairwise(clients))


def graph_seed(digest: bytes, keys: Iterable[bytes]) -> bytes:
    """From d and the keys that were advertised, in the order of their clients."""
    return _hashed("graph", digest, *keys)


def keys_text(digest: bytes, client: int, channel: bytes, mask: bytes) -> bytes:
    """What a client signs of its keys."""
    return _hashed("keys", digest, _of(client), channel, mask)


def survivors_text(digest: bytes, survivors: Sequence[int]) -> bytes:
    """What a client signs of whom it was told that their vectors are in the sum."""
    return _hashed("survivors", digest, msgspec.msgpack.encode(tuple(survivors)))


def pair(purpose: str, digest: bytes, one: int, other: int) -> bytes:
    """What a key of two clients is for: the same for both."""
    return _hashed(purpose, digest, _of(min(one, other)), _of(max(one, other)))


def addressed(digest: bytes, sender: int, receiver: int) -> bytes:
    """What a sealed share is bound to."""
    return _hashed("share", digest, _of(sender), _of(receiver))


def mask_sign(client: int, other: int) -> int:
    """With which sign the client adds the mask that it has with the other."""
    return 1 if client < other else -1


def own_mask(digest: bytes, client: int, seed: bytes) -> bytes:
    """The key of a client's own mask."""
    return _hashed("key of own mask", digest, _of(client), seed)


def commitment(digest: bytes, client: int, seed: bytes) -> bytes:
    """By which the server knows a client's seed of its own mask again, and does not know it yet."""
    return _hashed("own mask", digest, _of(client), seed)


def share_commitment(purpose: str, digest: bytes, owner: int, holder: int, share: bytes) -> bytes:
    """By which a share is known again. It hides the share, which is as random as a key.

    purpose: "private" or "seed", of which secret.
    """
    # In one piece, as there are n^2 of them in a round: all parts but the purpose have one length.
    parts = (b"dure share 1\n", purpose.encode(), b"\n", digest, _of(owner), _of(holder), share)
    return hashlib.sha256(b"".join(parts)).digest()


def _of(client: int) -> bytes:
    return client.to_bytes(4, "big")


def _hashed(purpose: str, *parts: bytes) -> bytes:
    # Each part with its length: no two lists of parts have the same bytes.
    whole = hashlib.sha256(b"dure secure aggregation 1\n" + purpose.encode() + b"\n")
    for part in parts:
        whole.update(len(part).to_bytes(8, "big") + part)
    return whole.digest()
