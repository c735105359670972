"""Entity alignment: which people all parties know, by Diffie-Hellman private set intersection.

    H(id)                      a point of Curve25519, by hashing
    party p -> holder          H(y)^a for its ids y, sorted                       32 |Y| bytes
    holder  -> party p         H(x)^b for its ids x, sorted                       32 |X|
    party p -> holder          (H(x)^b)^a, in the order in which they came        32 |X|
    holder                     (H(y)^a)^b = (H(x)^b)^a  where x = y: the ids that both know; and
                               of these the ones that are with all parties, I
    holder  -> party p         the places of I in the list of p                   8 |I|

a and b are secret scalars, and x^a is X25519(a, x). It has u-coordinates in and u-coordinates out
(RFC 7748), and commutes: X25519(a, X25519(b, u)) = X25519(b, X25519(a, u)). H hashes with a counter
until the result is the u-coordinate of a point of the curve: about half of all numbers are those of
its twist, and X25519 keeps to either, so without this everybody would see a bit of each id's hash.
Points are sorted by their bytes, so that they do not tell in which order ids were kept. The order
of I follows from a hash of the ids with a key of the holder's, and tells nothing of it either. A
point of small order, which no id has and of which every power is zero, is refused by the name of
its sender. Who sends first, and in how many messages, does not matter.

What it gives, where all keep to the protocol (semi-honest) and the Diffie-Hellman problem is hard
on Curve25519: nobody's ids can be read or guessed from what travels, without a secret. The holder
learns which of its ids each party has. A party learns which of its own are with everybody.

What it does not give:

- Sizes and the intersection leak: how many ids each has, and who is common.
- An active party, which sends points of ids that it guesses, learns which of these the other has.
  Where ids are few, such as telephone numbers, it can guess all of them in time: agree upon the
  number of ids, and on who may ask how often.
- Nothing proves that a party hashed ids that it really has, or that it sent the right powers.
- Parties that pool what they know learn what all of them together know.
- Ids have to be written alike everywhere: "Ann" is not "ann ".

Source: Meadows 1986; Huberman, Franklin, Hogg 1999, "Enhancing Privacy and Trust in Electronic
Communities", for Diffie-Hellman intersection. RFC 7748 for X25519.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from dure.data.keys import name_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

BYTES = 32
"""Of a point, and of a secret."""

_PRIME = 2**255 - 19
_A = 486662
"""Curve25519 is v² = u³ + A u² + u modulo the prime."""

_DOMAIN = b"dure entity alignment 1\0"


class Blinded(msgspec.Struct, frozen=True, tag=True):
    """Points of ids, raised to the sender's secret: those from `first` on, of so many in all.

    points: uint8 of shape (n, 32).
    """

    first: int
    total: int
    points: Tensor


class Twice(msgspec.Struct, frozen=True, tag=True):
    """The points of a `Blinded`, raised to the sender's secret as well, in their order."""

    first: int
    points: Tensor


class Common(msgspec.Struct, frozen=True, tag=True):
    """Who is with all parties: their places in the receiver's list, int64, in the order for all."""

    places: Tensor


Message = Blinded | Twice | Common
Envelope = tuple[str, Message]
"""(to whom, what)."""


def id_texts(ids: Iterable[Any]) -> list[str]:
    """Ids as they are hashed. Raises ValueError where two are the same."""
    texts = [name_of(one) for one in ids]
    if len(set(texts)) < len(texts):
        seen: set[str] = set()
        twice = next(text for text in texts if text in seen or seen.add(text))  # type: ignore[func-returns-value]
        raise ValueError(f"the id {twice!r} is there twice: an id names one person")
    return texts


def point_of(text: str) -> bytes:
    """H(id): the u-coordinate of a point of Curve25519, 32 bytes."""
    start = hashlib.sha256(_DOMAIN + text.encode())
    counter = 0
    while True:
        one = start.copy()
        one.update(counter.to_bytes(4, "little"))
        u = int.from_bytes(one.digest(), "little") % 2**255
        if u < _PRIME and _is_square(u * (u * (u + _A) + 1) % _PRIME):
            return u.to_bytes(BYTES, "little")
        counter += 1


def _is_square(a: int) -> bool:
    """Whether a number is a square modulo the prime, and not 0, by the Jacobi symbol.

    Euler's criterion says the same, and takes Python three times as long.
    """
    n = _PRIME
    flips = 0
    while a:
        twos = (a & -a).bit_length() - 1
        a >>= twos
        # (2/n) = -1 where n is 3 or 5 modulo 8; the law of reciprocity, where both are 3 modulo 4.
        if twos & 1:
            flips ^= (n >> 1) ^ (n >> 2)
        flips ^= (a & n) >> 1
        a, n = n % a, a
    return n == 1 and not flips & 1


class Exponent:
    """A secret scalar. secret: 32 bytes, such as `secrets.token_bytes(32)`.

    Raises ValueError without the library that computes on the curve.
    """

    def __init__(self, secret: bytes) -> None:
        check_library()
        from cryptography.hazmat.primitives.asymmetric.x25519 import (
            X25519PrivateKey,
            X25519PublicKey,
        )

        self._secret: X25519PrivateKey = X25519PrivateKey.from_private_bytes(secret)
        self._point = X25519PublicKey.from_public_bytes

    def power(self, point: bytes) -> bytes:
        """The point, raised to the secret. Raises ValueError for one of small order."""
        return self._secret.exchange(self._point(point))


def check_library() -> None:
    """Raises ValueError without the library that computes on the curve."""
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise ValueError('alignment needs the extra: pip install "dure[deploy]"') from error


class _Side:
    """What the holder and a party have in common: ids, and a secret.

    most: points in a message.
    """

    def __init__(self, name: str, ids: Sequence[Any], secret: bytes, most: int) -> None:
        texts = id_texts(ids)
        if not texts:
            raise ValueError(f"{name} has no ids: there is nobody to align")
        self.name = name
        self.exponent = Exponent(secret)
        self.most = most
        self.rows: list[int] | None = None
        """Which of its ids, by their places, are with all parties, in the order for all."""
        own = [self.exponent.power(point_of(text)) for text in texts]
        self._sent = sorted(range(len(own)), key=own.__getitem__)
        """Which id each point is of, in the order in which they are sent."""
        self._points = [own[place] for place in self._sent]

    @property
    def wake(self) -> float:
        return float("inf")

    def tick(self, now: float) -> list[Envelope]:
        return []

    def _blinded(self, to: str) -> list[Envelope]:
        total = len(self._points)
        return [
            (to, Blinded(first, total, tensor_of(self._points[first : first + self.most])))
            for first in range(0, total, self.most)
        ]

    def _raised(self, sender: str, points: Tensor) -> list[bytes]:
        """Points of someone else, raised to the secret. Raises ValueError for what is no point."""
        return [self._power(sender, point) for point in points_of(sender, points)]

    def _power(self, sender: str, point: bytes) -> bytes:
        if int.from_bytes(point, "little") >= _PRIME:
            raise ValueError(f"{sender} sends a point that is no number below 2^255 - 19")
        try:
            return self.exponent.power(point)
        except ValueError as error:
            raise ValueError(
                f"{sender} sends a point of small order, which no id has: it would tell nothing of "
                f"an id"
            ) from error


class AlignedParty(_Side):
    """A party without the labels. ids: one for each of its people."""

    def __init__(
        self, name: str, holder: str, ids: Sequence[Any], secret: bytes, most: int = 4096
    ) -> None:
        super().__init__(name, ids, secret, most)
        self.holder = holder
        self._began = False

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """What it says to a message. Raises ValueError for one that makes no sense."""
        if sender == self.holder and isinstance(message, Blinded):
            own = [] if self._began else self._blinded(self.holder)
            self._began = True
            raised = Twice(message.first, tensor_of(self._raised(sender, message.points)))
            return [*own, (self.holder, raised)]
        if sender == self.holder and isinstance(message, Common):
            self.rows = self._placed(message.places.tolist())
            return []
        raise ValueError(f"{self.name} is told {type(message).__name__} by {sender}")

    def _placed(self, places: list[int]) -> list[int]:
        if len(set(places)) < len(places) or not all(0 <= p < len(self._sent) for p in places):
            raise ValueError(f"{self.holder} names places that {self.name} does not have, or twice")
        return [self._sent[place] for place in places]


class AlignedHolder(_Side):
    """The holder of the labels. parties: the names of the others.

    order: bytes from which, and from ids, the order of all follows; by default those of the secret.
    """

    def __init__(
        self,
        name: str,
        parties: Sequence[str],
        ids: Sequence[Any],
        secret: bytes,
        most: int = 4096,
        order: bytes | None = None,
    ) -> None:
        super().__init__(name, ids, secret, most)
        self.parties = list(parties)
        self._order = secret if order is None else order
        self._texts = id_texts(ids)
        self._theirs: dict[str, dict[bytes, int]] = {name: {} for name in parties}
        """The places of each party's points, by the points raised to both secrets."""
        self._totals: dict[str, int] = {}
        self._mine: dict[str, dict[int, bytes]] = {name: {} for name in parties}
        """The own points that each party has raised, by their places."""

    @property
    def awaited(self) -> list[str]:
        """Who has not sent all of its points yet, or not raised all of the holder's."""
        return [name for name in self.parties if not self._has_all(name)]

    def begin(self, now: float) -> list[Envelope]:
        """What it says first."""
        if not self.parties:
            self._align()
        return [envelope for name in self.parties for envelope in self._blinded(name)]

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """What it says to a message.

        Raises ValueError for one that makes no sense, and where nobody is with all parties.
        """
        if sender not in self.parties or not isinstance(message, Blinded | Twice):
            raise ValueError(f"{self.name} is told {type(message).__name__} by {sender}")
        if self.rows is not None:
            return []
        if isinstance(message, Blinded):
            self._take_theirs(sender, message)
        else:
            self._take_mine(sender, message)
        return [] if self.awaited else self._align()

    def _take_theirs(self, sender: str, message: Blinded) -> None:
        points = self._raised(sender, message.points)
        total = self._totals.setdefault(sender, message.total)
        _check_range(sender, message.first, len(points), total)
        if message.total != total:
            raise ValueError(f"{sender} says that it has {total} ids, and then {message.total}")
        theirs = self._theirs[sender]
        for place, point in enumerate(points, message.first):
            if theirs.setdefault(point, place) != place:
                raise ValueError(f"{sender} sends a point twice: an id names one person")

    def _take_mine(self, sender: str, message: Twice) -> None:
        points = points_of(sender, message.points)
        _check_range(sender, message.first, len(points), len(self._points))
        self._mine[sender].update(enumerate(points, message.first))

    def _has_all(self, name: str) -> bool:
        theirs = len(self._theirs[name]) == self._totals.get(name)
        return theirs and len(self._mine[name]) == len(self._points)

    def _align(self) -> list[Envelope]:
        """Who is with all parties, and in which order."""
        common = set(range(len(self._points)))
        for name in self.parties:
            theirs = self._theirs[name]
            common &= {place for place, point in self._mine[name].items() if point in theirs}
        if not common:
            raise ValueError(
                "nobody is with all parties: look whether they write ids in the same way"
            )
        # Neither as ids are kept here, which may be by label, nor as points were sent.
        order = sorted(common, key=lambda place: self._drawn(self._sent[place]))
        self.rows = [self._sent[place] for place in order]
        return [(name, Common(self._places(name, order))) for name in self.parties]

    def _places(self, name: str, order: Sequence[int]) -> Tensor:
        mine = self._mine[name]
        theirs = self._theirs[name]
        return torch.tensor([theirs[mine[place]] for place in order])

    def _drawn(self, row: int) -> bytes:
        """A number of the id, which tells nothing of how ids are kept."""
        return hashlib.blake2b(self._texts[row].encode(), key=self._order).digest()


def _check_range(sender: str, first: int, count: int, total: int) -> None:
    if first < 0 or first + count > total:
        raise ValueError(f"{sender} sends points {first} to {first + count} of {total}")


def tensor_of(points: Sequence[bytes]) -> Tensor:
    """Points as they travel: uint8 of shape (n, 32)."""
    return torch.frombuffer(bytearray(b"".join(points)), dtype=torch.uint8).view(-1, BYTES)


def points_of(sender: str, points: Tensor) -> list[bytes]:
    """The inverse. Raises ValueError for tensors that do not hold points."""
    if points.dtype != torch.uint8 or points.ndim != 2 or points.shape[1] != BYTES:
        raise ValueError(
            f"{sender} sends a tensor of {points.dtype} and shape {list(points.shape)}, but points "
            f"have {BYTES} bytes: (n, {BYTES}) of uint8"
        )
    flat = points.contiguous().numpy().tobytes()
    return [flat[start : start + BYTES] for start in range(0, len(flat), BYTES)]


def message_bytes(own: int, holders: int, common: int) -> tuple[int, int]:
    """(up, down): what a party with `own` ids sends and receives, in bytes."""
    return BYTES * (own + holders), BYTES * holders + 8 * common
