"""Messages of a secure sum between server and clients: MessagePack arrays, a pair for each stage.

    stage                 server to a client                a client's answer
    0 advertise keys      Offer: the context                Advertised: two X25519 keys, signature;
                                                            or Spent, if the client has helped to
                                                            unmask a sum of this model before
    1 share keys          Keys: of its neighbours           Shared: sealed shares, commitments
    2 masked input        Shares: those sealed for it       Masked: owners of unusable shares;
                                                            and one int32 tensor
    3 consistency check   Survivors: clients in the sum     Confirmed: signature of that list
    4 unmask              Unmask: that list, signatures     Unmasked: one share of each client

A request to unmask has a single list. A client in the list has survived; a client that shared keys
and is not in the list has dropped out. No client can be named as both. Messages of a peer are
untrusted: every type and every length is checked before use.

Bytes of a client besides the vector, for all pairs of n: up about 170 n for sealed shares and 47 n
for shares; down 84 n for keys, 170 n for sealed shares, and up to 9 n for lists; with a roster 142
n more down, for signatures. In SecAgg+ n is the number of neighbours, except for lists.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, TypeVar

import msgspec

from dure.errors import DureError, TooFewClientsError
from dure.federated.privacy.secure_aggregation.agreement import TAG
from dure.federated.privacy.secure_aggregation.cohort import (
    MOST_MEMBERS,
    Members,
    Number,
    SumContext,
    bounds,
)
from dure.federated.privacy.secure_aggregation.settings import SecureAggregation
from dure.federated.privacy.secure_aggregation.shamir import SHARE

MOST_BODY = 1 << 22
"""Largest length of a message in bytes."""

Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
"""An X25519 public key, or a digest: 32 bytes."""

Signature = Annotated[bytes, msgspec.Meta(max_length=64)]
"""An Ed25519 signature of 64 bytes; empty without signatures."""

Piece = Annotated[bytes, msgspec.Meta(min_length=SHARE, max_length=SHARE)]
"""A share of a secret."""

Commitment = Annotated[bytes, msgspec.Meta(max_length=32)]
"""A SHA-256; empty from clients of earlier versions."""

_BOX = 2 * SHARE + TAG
Box = Annotated[bytes, msgspec.Meta(min_length=_BOX, max_length=_BOX)]
"""Two sealed shares."""


class ProtocolError(DureError):
    """A peer of secure aggregation violated the protocol."""


class SpentError(ProtocolError):
    """A server offers a second sum of a model for which the client has unmasked a sum."""


class TooFewError(TooFewClientsError):
    """Too few clients are present for a secure sum, or too few of their shares are right."""


class Body(
    msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True, gc=False
):
    """Base of all messages. The repr hides the contents from logs."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return []


class Offer(Body, frozen=True):
    context: SumContext


class Advertised(Body, frozen=True):
    """Public keys of a client.

    Args:
        channel: key that seals shares for the client.
        mask: key for the pairwise masks.
        signature: the client's signature of both keys.
    """

    channel: Key
    mask: Key
    signature: Signature = b""


class ModelSpent(Body, frozen=True, tag="Spent"):
    """Refusal to take part until the model changes."""


class PublicKeys(Body, frozen=True):
    """Advertised keys of a client, as relayed to its neighbours."""

    client: Number
    channel: Key
    mask: Key
    signature: Signature = b""


class Keys(Body, frozen=True):
    """Relayed public keys.

    Args:
        present: all clients that have advertised keys, ascending.
        seed: seed of the graph.
        keys: keys of the client itself and of its neighbours, ascending.
    """

    present: Members
    seed: Key
    keys: Annotated[tuple[PublicKeys, ...], msgspec.Meta(max_length=MOST_MEMBERS)]


class SealedSharePair(Body, frozen=True, tag="Sealed"):
    """Two shares, readable only by the receiver.

    Args:
        client: receiver on the way up, owner on the way down.
        box: the sealed shares.
        private: commitment to the share of the private key (`cohort.share_commitment`), by which
            the
            server identifies a wrong share; empty from clients of earlier versions.
        seed: commitment to the share of the seed.
    """

    client: Number
    box: Box
    private: Commitment = b""
    seed: Commitment = b""


SealedShares = Annotated[tuple[SealedSharePair, ...], msgspec.Meta(max_length=MOST_MEMBERS)]


class SharesForNeighbours(Body, frozen=True, tag="Shared"):
    """Answer of stage 1: commitment to the seed of the own mask, and shares for each neighbour."""

    commitment: Key
    shares: SealedShares


class SharesFromNeighbours(Body, frozen=True, tag="Shares"):
    """Sealed shares from each neighbour that has shared, in ascending order of the owners."""

    shares: SealedShares


class Masked(Body, frozen=True):
    """Answer of stage 2; the masked vector travels as a tensor.

    `unfit` lists the owners of shares that did not open or did not match their commitments.
    """

    unfit: Members = ()


class Survivors(Body, frozen=True):
    """Clients whose masked vectors are in the sum."""

    clients: Members


class Confirmed(Body, frozen=True):
    signature: Signature


class SurvivorSignature(Body, frozen=True, tag="Signed"):
    client: Number
    signature: Signature


class Unmask(Body, frozen=True):
    """Request for shares.

    Args:
        survivors: clients whose vectors are in the sum.
        signatures: signatures of the survivor list, from confirming clients; empty without a
            roster.
    """

    survivors: Members
    signatures: Annotated[tuple[SurvivorSignature, ...], msgspec.Meta(max_length=MOST_MEMBERS)] = ()


class SecretShare(Body, frozen=True, tag="Share"):
    """A share of a client's secret."""

    client: Number
    piece: Piece


Pieces = Annotated[tuple[SecretShare, ...], msgspec.Meta(max_length=MOST_MEMBERS)]


class Unmasked(Body, frozen=True):
    """Answer of stage 4.

    Args:
        survivors: shares of the survivors' own mask seeds.
        lost: shares of the private mask keys of clients that shared keys and dropped out.
    """

    survivors: Pieces
    lost: Pieces


AnyBody = TypeVar("AnyBody", bound=Body)

_ENCODER = msgspec.msgpack.Encoder()

SPENT = _ENCODER.encode(ModelSpent())
"""The encoded `ModelSpent` message."""


def to_body(message: Body) -> bytes:
    """Return the encoded message."""
    return _ENCODER.encode(message)


def from_body(body: bytes, kind: type[AnyBody]) -> AnyBody:
    """Return the decoded message of the class `kind`.

    Raises ProtocolError for any other bytes, with a sentence that quotes none of them.
    """
    if len(body) > MOST_BODY:
        raise ProtocolError(f"a message has {len(body)} bytes, but at most {MOST_BODY} are allowed")
    try:
        message: AnyBody = _decoder(kind).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    else:
        return message
    # Outside the handler: msgspec's text may quote the message, and a cause would be printed too.
    raise ProtocolError(f"the message is not a valid {kind.__name__}, which this stage requires")


@lru_cache
def _decoder(kind: type[AnyBody]) -> msgspec.msgpack.Decoder[AnyBody]:
    return msgspec.msgpack.Decoder(kind)


def context_of(
    body: bytes,
    settings: SecureAggregation,
    *,
    run: str,
    round: int,
    model: str,
    length: int,
    quantisation: str,
) -> SumContext:
    """Return the context of a server's first message, with the client's own knowledge in its place.

    The server chooses members, attempt and group. Threshold and degree follow from the client's
    settings. The remaining fields are arguments. The client compares this context with the server's
    in `SecureSumClient.answer`. Raises ProtocolError for bytes that are not a first message, and
    for members that cannot form a sum.
    """
    offered = from_body(body, Offer).context
    try:
        asked_for = bounds(settings, len(offered.members))
    except ValueError as error:
        raise ProtocolError(
            f"the server's settings of secure aggregation are invalid: {error}"
        ) from None
    return msgspec.structs.replace(
        offered,
        **asked_for._asdict(),
        run=run,
        round=round,
        model=model,
        length=length,
        quantisation=quantisation,
    )
