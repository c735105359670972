"""What server and clients of a secure sum say to each other: MessagePack arrays, one for a stage.

    stage                 server to a client                a client's answer
    0 advertise keys      Offer: the context                Advertised: two X25519 keys, signature;
                                                            or Spent, where it has helped to unmask
                                                            a sum of this model before
    1 share keys          Keys: of its neighbours           Shared: sealed shares, commitments
    2 masked input        Shares: those sealed for it       Masked: whose shares do not open or fit;
                                                            and one int32 tensor
    3 consistency check   Survivors: whose vector is there  Confirmed: signature of that list
    4 unmask              Unmask: that list, signatures     Unmasked: one share of each client

A request to unmask has one list. Whoever is in it has survived, and whoever shared keys and is not
in it was lost: no client can be named as both. What comes from a peer is data: every type and every
length is checked before anything is done with it.

Bytes of one client, besides the vector, all pairs of n: up some 170 n for sealed shares and 47 n
for shares; down 84 n for keys, 170 n for sealed shares, and up to 9 n for lists; with a roster
142 n more down, for signatures. In SecAgg+ the n is that of neighbours, but for lists.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, TypeVar

import msgspec

from dure.errors import DureError, TooFewClientsError
from dure.federated.privacy.secure_aggregation.agreement import TAG
from dure.federated.privacy.secure_aggregation.cohort import (
    MOST_MEMBERS,
    Context,
    Members,
    Number,
    bounds,
)
from dure.federated.privacy.secure_aggregation.settings import SecureAggregation
from dure.federated.privacy.secure_aggregation.shamir import SHARE

MOST_BODY = 1 << 22
"""Bytes of a message, at most."""

Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
"""A public key of X25519, or a digest."""

Signature = Annotated[bytes, msgspec.Meta(max_length=64)]
"""Of Ed25519, 64 bytes; empty where nobody signs."""

Piece = Annotated[bytes, msgspec.Meta(min_length=SHARE, max_length=SHARE)]
"""A share of one secret."""

Commitment = Annotated[bytes, msgspec.Meta(max_length=32)]
"""A SHA-256; empty of clients of earlier versions."""

_BOX = 2 * SHARE + TAG
Box = Annotated[bytes, msgspec.Meta(min_length=_BOX, max_length=_BOX)]
"""Two shares, sealed."""


class ProtocolError(DureError):
    """A peer of secure aggregation said what it would not, if it followed the protocol."""


class SpentError(ProtocolError):
    """A server offers a second sum of a model of which the client has helped to unmask one."""


class TooFewError(TooFewClientsError):
    """Too few clients are there for a secure sum, or too few of their shares are right."""


class Body(
    msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True, gc=False
):
    """Base of all messages. What they hold is nobody's to read in a log."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return []


class Offer(Body, frozen=True):
    context: Context


class Advertised(Body, frozen=True):
    """channel: under which shares are sealed for the client. mask: from which masks are made.
    signature: of both, by the client's identity."""

    channel: Key
    mask: Key
    signature: Signature = b""


class Spent(Body, frozen=True):
    """The client takes no part until the model is another one."""


class PublicKeys(Body, frozen=True):
    """What a client has advertised, as others are told."""

    client: Number
    channel: Key
    mask: Key
    signature: Signature = b""


class Keys(Body, frozen=True):
    """present: all who have advertised keys. seed: of the graph. keys: of the client itself and its
    neighbours, in order."""

    present: Members
    seed: Key
    keys: Annotated[tuple[PublicKeys, ...], msgspec.Meta(max_length=MOST_MEMBERS)]


class Sealed(Body, frozen=True):
    """Two shares, which only the receiver can read. client: to whom, and on the way on, of whom.

    private, seed: commitments to the two shares (`cohort.share_commitment`), by which the server
    tells who has given a wrong one; empty of clients of earlier versions.
    """

    client: Number
    box: Box
    private: Commitment = b""
    seed: Commitment = b""


SealedShares = Annotated[tuple[Sealed, ...], msgspec.Meta(max_length=MOST_MEMBERS)]


class Shared(Body, frozen=True):
    """commitment: to the seed of the client's own mask. shares: for each neighbour, in order."""

    commitment: Key
    shares: SealedShares


class Shares(Body, frozen=True):
    """Of each neighbour that has shared, in order."""

    shares: SealedShares


class Masked(Body, frozen=True):
    """The vector travels as a tensor. unfit: whose shares did not open, or were not those that
    their owner has committed to."""

    unfit: Members = ()


class Survivors(Body, frozen=True):
    """Whose masked vectors are in the sum."""

    clients: Members


class Confirmed(Body, frozen=True):
    signature: Signature


class Signed(Body, frozen=True):
    client: Number
    signature: Signature


class Unmask(Body, frozen=True):
    """signatures: of the survivors, by those who have confirmed; none where nobody signs."""

    survivors: Members
    signatures: Annotated[tuple[Signed, ...], msgspec.Meta(max_length=MOST_MEMBERS)] = ()


class Share(Body, frozen=True):
    """A share of a client's secret."""

    client: Number
    piece: Piece


Pieces = Annotated[tuple[Share, ...], msgspec.Meta(max_length=MOST_MEMBERS)]


class Unmasked(Body, frozen=True):
    """survivors: shares of their own masks' seeds. lost: shares of the private keys of masks of
    those who shared keys, and whose vector is not there."""

    survivors: Pieces
    lost: Pieces


AnyBody = TypeVar("AnyBody", bound=Body)

_ENCODER = msgspec.msgpack.Encoder()

SPENT = _ENCODER.encode(Spent())
"""The one form of `Spent`."""


def to_body(message: Body) -> bytes:
    """The message."""
    return _ENCODER.encode(message)


def from_body(body: bytes, kind: type[AnyBody]) -> AnyBody:
    """The inverse of `to_body`. Raises ProtocolError for anything else, in one sentence that quotes
    nothing of it."""
    if len(body) > MOST_BODY:
        raise ProtocolError(f"a message has {len(body)} bytes, and may have {MOST_BODY}")
    try:
        message: AnyBody = _decoder(kind).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    else:
        return message
    # Outside the handler: msgspec's text may quote what came, and the cause would be printed too.
    raise ProtocolError(f"the message is no {kind.__name__}, as this stage wants one")


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
) -> Context:
    """The context of a server's first message, with what a client knows itself put in its place.

    Members, attempt and group are the server's; threshold and neighbours follow from the settings.
    The client is made with it, and finds out whether the server meant the same when it answers that
    message. Raises ProtocolError for what is no first message, and for members of whom there can be
    no sum.
    """
    offered = from_body(body, Offer).context
    try:
        asked_for = bounds(settings, len(offered.members))
    except ValueError as error:
        raise ProtocolError(f"the server's secure aggregation cannot be: {error}") from None
    return msgspec.structs.replace(
        offered,
        **asked_for._asdict(),
        run=run,
        round=round,
        model=model,
        length=length,
        quantisation=quantisation,
    )
