"""Sealed messages: from one client to another, through a server that cannot read them.

    one line        JSON: ["dure sealed 1", RUN, TURN, SENDER, its identity, RECEIVER, its box key,
                    BYTES]
    32 bytes        the ephemeral public key of this message (`dure.wire.hpke`)
    64 bytes        the sender's Ed25519 signature of all bytes before it
    BYTES + 16      the message, encrypted

The line is an input of the encryption key, and the sender signs it together with the ephemeral
public key. Consequences:

- Only the owner of the receiver's box key can read the message. The server sees the sender, the
  receiver, the size and the time.
- A change, a truncation or an addition of any byte is detected, and no part of the message is
  returned.
- A message of another turn, another run, another sender or to another receiver is refused. The
  server can only withhold a message or deliver it twice. A receiver must therefore take each turn
  once, and a sender must not seal two different messages with the same turn and receiver: the
  server could choose which of them arrives.
- Only the sender could make a message, or the receiver for itself: the receiver knows that the
  sender sealed it, and cannot prove the content to others.

Limits:

- An attacker who gets a box key at any time can read every recorded message that was sealed to it,
  and can forge messages to its owner in place of these messages. A box key per run, deleted at the
  end of the run, bounds the damage.
- The receiver's box key comes from the `Member` that the caller passes; a roster
  (`dure.wire.roster`) must confirm its owner.

Memory: sealing makes a copy of the message, and so does opening. No other memory grows with the
message.

Source: RFC 9180 (HPKE) for the encryption, RFC 8032 for the signature.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from dure.wire import hpke
from dure.wire.boxes import BoxKey, Member, Number, PublicKey, Run, check_run
from dure.wire.signatures import Key, is_signed

try:
    from cryptography.exceptions import InvalidTag
except ImportError as error:
    raise ImportError('a network needs the extra: pip install "dure[deploy]"') from error

MOST_HEAD = 1024
"""Maximum bytes of the first line."""

_SIGNATURE = 64

Bytes = bytes | bytearray | memoryview


class SealError(ValueError):
    """A message cannot be opened. `kind` is a short category, for counters."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True)
class SealedMessageContext:
    """Identification of a message: the run, the turn, and the numbers of sender and receiver."""

    run: str
    turn: int
    sender: int
    receiver: int

    def __post_init__(self) -> None:
        check_run(self.run)
        for name in ("turn", "sender", "receiver"):
            number = getattr(self, name)
            if not 0 <= number < 1 << 31:
                raise ValueError(f"{name} has to be 0 to {(1 << 31) - 1}, not {number}")


class _Head(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """First line of a sealed message."""

    what: Literal["dure sealed 1"]
    run: Run
    turn: Number
    sender: Number
    identity: PublicKey
    receiver: Number
    box: PublicKey
    size: Annotated[int, msgspec.Meta(ge=0)]

    def line(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"


def sealed_size(message: int, to: Member, identity: Key, about: SealedMessageContext) -> int:
    """Return the bytes of a sealed message whose content has `message` bytes."""
    line = _head(message, to, identity, about).line()
    return len(line) + hpke.PUBLIC + _SIGNATURE + message + hpke.TAG


def seal(
    parts: Bytes | Iterable[Bytes], *, to: Member, identity: Key, about: SealedMessageContext
) -> bytearray:
    """Seal a message to a client.

    `parts` is the message, or its pieces in order. `to` is the receiver, from a checked roster.
    `identity` is the sender's key. Raises ValueError for a receiver that does not match `about` or
    whose box key is not signed, and for a message of more than `hpke.MOST` bytes.
    """
    if to.number != about.receiver:
        raise ValueError(f"this is about client {about.receiver}, and not for {to}")
    if not to.is_true(about.run):
        raise ValueError(f"{to} has not signed the box key that is listed for it in this run")
    views = [memoryview(part).cast("B") for part in _pieces(parts)]
    count = sum(map(len, views))
    if count > hpke.MOST:
        raise ValueError(f"a message has at most {hpke.MOST} bytes, but this one has {count}")
    line = _head(count, to, identity, about).line()
    front = len(line) + hpke.PUBLIC + _SIGNATURE
    sealed = bytearray(front + count + hpke.TAG)
    with memoryview(sealed) as whole:
        once = _encrypt(to, line, views, whole[front:])
        whole[:front] = line + once + identity.sign(line + once)
    return sealed


def unseal(sealed: Bytes, *, box: BoxKey, sender: Member, about: SealedMessageContext) -> bytearray:
    """Open a message that `seal` has sealed with the same `about`.

    `box` is the receiver's key. `sender` is from a checked roster. Raises SealError for any other
    message or sender, and ValueError for a sender that does not match `about`.
    """
    if sender.number != about.sender:
        raise ValueError(f"this is about client {about.sender}, and not from {sender}")
    whole = memoryview(sealed).cast("B")
    line, once, encrypted = _signed_by(whole, sender)
    _check(_said(line), box, sender, about, len(encrypted))
    message = bytearray(len(encrypted) - hpke.TAG + hpke.SLACK)
    try:
        with memoryview(message) as room:
            hpke.decrypt(box.private, once, line, encrypted, room)
    except (InvalidTag, ValueError) as error:
        reason = f"the message from {sender} was changed in transit"
        raise SealError("changed", reason) from error
    del message[-hpke.SLACK :]
    return message


def _encrypt(to: Member, line: bytes, views: list[memoryview], room: memoryview) -> bytes:
    try:
        return hpke.encrypt(bytes.fromhex(to.box), line, views, room)
    except ValueError as error:
        raise ValueError(
            f"the box key of {to} is unsafe and cannot keep a message secret"
        ) from error


def _pieces(parts: Bytes | Iterable[Bytes]) -> Iterable[Bytes]:
    return [parts] if isinstance(parts, bytes | bytearray | memoryview) else parts


def _head(count: int, to: Member, identity: Key, about: SealedMessageContext) -> _Head:
    return _Head(
        "dure sealed 1",
        about.run,
        about.turn,
        about.sender,
        identity.public,
        about.receiver,
        to.box,
        count,
    )


def _signed_by(whole: memoryview, sender: Member) -> tuple[bytes, bytes, memoryview]:
    """Split a sealed message into its first line, ephemeral public key and encrypted message.

    Raises SealError unless the sender has signed line and key.
    """
    first = bytes(whole[:MOST_HEAD])
    at = first.find(b"\n") + 1
    signed = at + hpke.PUBLIC
    front = signed + _SIGNATURE
    if at == 0:
        raise SealError("not sealed", f"the data from {sender} are not a sealed message")
    if not is_signed(sender.identity, bytes(whole[:signed]), bytes(whole[signed:front])):
        reason = f"the message is not signed by {sender}, or was changed on its way"
        raise SealError("not signed", reason)
    return first[:at], bytes(whole[at:signed]), whole[front:]


def _said(line: bytes) -> _Head:
    try:
        return msgspec.json.decode(line, type=_Head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # The text may quote the received bytes, which are untrusted.
        reason = f"the first line of the message is wrong: {ascii(str(error))[1:-1]}"
        raise SealError("not sealed", reason) from error


def _check(
    head: _Head, box: BoxKey, sender: Member, about: SealedMessageContext, rest: int
) -> None:
    """Check that a signed message is the expected message. Raises SealError otherwise."""
    if head.run != about.run:
        reason = f"{sender} sealed this for the run {head.run}, but this is the run {about.run}"
        raise SealError("other run", reason)
    if head.turn != about.turn:
        reason = f"{sender} sealed this for turn {head.turn}, but this is turn {about.turn}"
        raise SealError("other turn", reason)
    if (head.sender, head.identity) != (about.sender, sender.identity):
        reason = f"{sender} has signed this as client {head.sender}, which is another client"
        raise SealError("other sender", reason)
    if head.receiver != about.receiver:
        reason = f"{sender} sealed this for client {head.receiver}, not for client {about.receiver}"
        raise SealError("not for me", reason)
    if head.box != box.public:
        reason = f"{sender} sealed this for another box key of client {about.receiver} than its own"
        raise SealError("not for me", reason)
    whole = head.size + hpke.TAG
    if whole != rest:
        reason = f"{whole} encrypted bytes were sent by {sender}, but {rest} were received"
        raise SealError("changed", reason)
