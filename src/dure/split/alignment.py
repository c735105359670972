"""Entity alignment: the people whom all parties know, by Diffie-Hellman private set intersection.

    H(id)                      a point of Curve25519, by hashing

    party p -> holder          H(y)^a for its ids y, sorted                       32 |Y| bytes
    holder  -> party p         H(x)^b for its ids x, sorted                       32 |X|
    party p -> holder          (H(x)^b)^a, in the order in which they came        32 |X|
    holder                     (H(y)^a)^b = (H(x)^b)^a  if x = y: the ids that both know; and
                               of these the ids that all parties have, I
    holder  -> party p         the positions of I in the list of p                8 |I|

a and b are secret scalars, and x^a is X25519(a, x). X25519 maps u-coordinates to u-coordinates
(RFC 7748), and commutes: X25519(a, X25519(b, u)) = X25519(b, X25519(a, u)). H hashes with a counter
until the result is the u-coordinate of a point of the curve: about half of all numbers belong to
its twist, and X25519 stays on either, so without this step an observer would learn a bit of each
id's hash.

Points are sorted by their bytes, so that they do not reveal the order of the ids in storage. The
order of I follows from a hash of the ids with a key of the holder's, and reveals nothing of that
order either. The first sender and the number of messages do not matter.

Refused, with the name of the sender: numbers that are not points of the curve, such as points of
the twist; points of small order, whose powers are all zero; a repeated point in a list, since an id
names one person and powers of different points differ; points of the receiver that come back
unchanged; parts of a list that overlap, or do not add up to the stated total.

A list of points is a query: a sender of points of guessed ids learns the ids among them that the
other side has. So each side calls `asks` before it uses a whole list, and answers no list other
than the list that it answered before; a party answers when it has all points of the holder.

Guarantees, if all follow the protocol (semi-honest) and the Diffie-Hellman problem is hard on
Curve25519: ids cannot be read or guessed from the messages without a secret. The holder learns the
ids of its own that each party has. A party learns the ids of its own that all have.

Limits:
- Sizes and the intersection leak: the number of each side's ids, and the common people.
- An active party, which sends points of guessed ids, learns the ids among them that the other side
  has. If ids are few, such as telephone numbers, it can guess many of them at once: agree on the
  number of ids, and on the number of runs.
- There is no proof that a party hashed its true ids, or that it sent the right powers.
- Parties that pool their knowledge learn everything that follows from all of it together.
- Ids have to be written in the same way everywhere: "Ann" is not "ann ".

Source: Meadows 1986; Huberman, Franklin, Hogg 1999, "Enhancing Privacy and Trust in Electronic
Communities", for Diffie-Hellman intersection. RFC 7748 for X25519.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from dure.data.keys import name_of
from dure.errors import DureError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

BYTES = 32
"""Bytes of a point, and of a secret."""

_PRIME = 2**255 - 19
_A = 486662
"""Curve25519 is v² = u³ + A u² + u modulo the prime."""

_DOMAIN = b"dure entity alignment 1\0"

SMALL_ORDER = frozenset(
    {
        0,
        1,
        _PRIME - 1,
        39382357235489614581723060781553021112529911719440698176882885853963445705823,
        325606250916557431795983626356110631294008115727848805560023387167927233504,
    }
)
"""The u-coordinates of points of small order, on the curve and on its twist."""

MOST_IDS = 1 << 24
"""Maximum number of ids of a sender that has not stated the number."""

_TESTS = 24
"""Number of random subsets whose product must be a square, for many points. A list with a point of
the twist passes each test with a probability of one half.
"""

_FEW = 24
"""Maximum number of points that are tested one by one, which is faster for few."""


class EmptyIntersectionError(DureError, ValueError):
    """No id is known to all parties; no message was invalid."""

    exit_code = 2


Asks = Callable[[str, bytes], None]
"""asks(sender, digest) of a list of points: raises ValueError if the list may not be answered."""


def answer_every_list(sender: str, digest: bytes) -> None:
    """Allow every list to be answered."""


class Blinded(msgspec.Struct, frozen=True, tag=True):
    """Points of ids, raised to the sender's secret: the part from `first` on, of `total` points.

    points: uint8 of shape (n, 32).
    """

    first: int
    total: int
    points: Tensor


class DoubleBlinded(msgspec.Struct, frozen=True, tag="Twice"):
    """Points of a `Blinded`, raised to the sender's secret as well, in the same order."""

    first: int
    points: Tensor


class Common(msgspec.Struct, frozen=True, tag=True):
    """Common people of all parties: positions in the receiver's list, int64, in common order."""

    places: Tensor


Message = Blinded | DoubleBlinded | Common
Envelope = tuple[str, Message]
"""(receiver, message)."""


def id_texts(ids: Iterable[Any]) -> list[str]:
    """Return the ids as texts for hashing. Raises ValueError for a repeated id."""
    texts = [name_of(one) for one in ids]
    if len(set(texts)) < len(texts):
        seen: set[str] = set()
        twice = next(text for text in texts if text in seen or seen.add(text))  # type: ignore[func-returns-value]
        raise ValueError(f"the id {twice!r} occurs twice: each person needs a unique id")
    return texts


def point_of(text: str) -> bytes:
    """Return H(id): the u-coordinate of a point of Curve25519, 32 bytes."""
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
    """Return whether a number is a square modulo the prime, and not 0, by the Jacobi symbol.

    Euler's criterion gives the same result, and takes Python three times as long.
    """
    n = _PRIME
    flips = 0
    while a:
        twos = (a & -a).bit_length() - 1
        a >>= twos
        # (2/n) = -1 if n is 3 or 5 modulo 8; reciprocity flips the sign if both are 3 modulo 4.
        if twos & 1:
            flips ^= (n >> 1) ^ (n >> 2)
        flips ^= (a & n) >> 1
        a, n = n % a, a
    return n == 1 and not flips & 1


class SecretScalar:
    """A secret scalar. secret: 32 bytes, such as `secrets.token_bytes(32)`.

    Raises ValueError if the library for the curve is not installed.
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
        """Return the point, raised to the secret. Raises ValueError for a point of small order."""
        return self._secret.exchange(self._point(point))


def check_library() -> None:
    """Raise ValueError if the library for the curve is not installed."""
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise ValueError('alignment needs the extra: pip install "dure[deploy]"') from error


class PeerPoints:
    """List of another side's points, received in parts: each position once, and no point twice.

    most: maximum number of points. refused: points that were sent to that side, which it must not
    return.
    """

    def __init__(self, sender: str, most: int, refused: frozenset[bytes]) -> None:
        self.sender = sender
        self.most = most
        self.refused = refused
        """Points that were sent to that side, which it must not return."""
        self.total: int | None = None
        self._at: dict[int, bytes] = {}
        self._places: dict[bytes, int] = {}

    @property
    def whole(self) -> bool:
        """Whether all points have arrived."""
        return len(self._at) == self.total

    @property
    def points(self) -> list[bytes]:
        """All points, in order."""
        return [self._at[place] for place in range(len(self._at))]

    def take(self, first: int, total: int, points: Tensor) -> None:
        """Add a part; a part that has arrived already changes nothing.

        Raises ValueError for an invalid part, of which no point is added.
        """
        given = points_of(self.sender, points)
        if self.total is not None and total != self.total:
            raise ValueError(f"{self.sender} announced {self.total} ids, and then {total}")
        if not 1 <= total <= self.most:
            raise ValueError(f"{self.sender} has {total} ids, but has to have 1 to {self.most}")
        if first < 0 or not given or first + len(given) > total:
            raise ValueError(
                f"{self.sender} sends points {first} to {first + len(given)} of {total}"
            )
        if len(set(given)) < len(given):
            raise ValueError(f"{self.sender} sends a point twice: each person needs a unique id")
        new = {place: one for place, one in enumerate(given, first) if self._is_new(place, one)}
        check_points(self.sender, list(new.values()))
        self.total = total
        self._at |= new
        self._places |= {one: place for place, one in new.items()}

    def _is_new(self, place: int, point: bytes) -> bool:
        if point in self.refused:
            raise ValueError(f"{self.sender} returns a point unchanged")
        if self._places.get(point, place) != place:
            raise ValueError(f"{self.sender} sends a point twice: each person needs a unique id")
        if self._at.get(place, point) != point:
            raise ValueError(f"{self.sender} sends two points for place {place}")
        return place not in self._at

    def digest(self) -> bytes:
        """Return SHA-256 of all points in order."""
        return hashlib.sha256(b"".join(self.points)).digest()


class _Side:
    """Common part of the holder and a party: ids, and a secret.

    Args:
        name: name of the side.
        ids: id of each of its people.
        secret: 32 bytes.
        most: maximum points in a message.
        asks: called before the use of a whole list of points.
    """

    def __init__(self, name: str, ids: Sequence[Any], secret: bytes, most: int, asks: Asks) -> None:
        texts = id_texts(ids)
        if not texts:
            raise ValueError(f"{name} has no ids to align")
        self.name = name
        self.exponent = SecretScalar(secret)
        self.most = most
        self.asks = asks
        self.rows: list[int] | None = None
        """Positions of the own ids that all parties have, in the common order; None before the end.
        """
        own = [self.exponent.power(point_of(text)) for text in texts]
        self._sent = sorted(range(len(own)), key=own.__getitem__)
        """Position of the id of each point, in the order in which the points are sent."""
        self._points = [own[place] for place in self._sent]

    @property
    def wake(self) -> float:
        return float("inf")

    def tick(self, now: float) -> list[Envelope]:
        return []

    def _peer(self, sender: str, most: int) -> PeerPoints:
        return PeerPoints(sender, most, frozenset(self._points))

    def _blinded(self, to: str) -> list[Envelope]:
        total = len(self._points)
        return [
            (to, Blinded(first, total, tensor_of(self._points[first : first + self.most])))
            for first in range(0, total, self.most)
        ]

    def _raised(self, peer: PeerPoints) -> list[bytes]:
        """Return all points of another side, raised to the secret."""
        self.asks(peer.sender, peer.digest())
        return [self._power(peer.sender, point) for point in peer.points]

    def _power(self, sender: str, point: bytes) -> bytes:
        try:
            return self.exponent.power(point)
        except ValueError as error:
            raise ValueError(f"{sender} sends {_SMALL}") from error


class AlignedParty(_Side):
    """State machine of a party without the labels.

    Args:
        name: name of the party.
        holder: name of the holder of the labels.
        ids: id of each of its people.
        secret: 32 bytes.
        most: maximum points in a message.
        limit: maximum number of ids of the holder.
        asks: called before the holder's list is answered.
    """

    def __init__(
        self,
        name: str,
        holder: str,
        ids: Sequence[Any],
        secret: bytes,
        most: int = 4096,
        limit: int = MOST_IDS,
        asks: Asks = answer_every_list,
    ) -> None:
        super().__init__(name, ids, secret, most, asks)
        self.holder = holder
        self._began = False
        self._theirs = self._peer(holder, limit)
        self._answered = False

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """Process a message and return the replies. Raises ValueError for an invalid message."""
        if sender == self.holder and isinstance(message, Blinded):
            return self._take(message)
        if sender == self.holder and isinstance(message, Common):
            self._place(message.places)
            return []
        raise ValueError(f"{self.name} cannot process {type(message).__name__} from {sender}")

    def _take(self, message: Blinded) -> list[Envelope]:
        self._theirs.take(message.first, message.total, message.points)
        own = [] if self._began else self._blinded(self.holder)
        self._began = True
        if self._answered or not self._theirs.whole:
            return own
        self._answered = True
        raised = self._raised(self._theirs)
        return own + [
            (self.holder, DoubleBlinded(first, tensor_of(raised[first : first + self.most])))
            for first in range(0, len(raised), self.most)
        ]

    def _place(self, places: Tensor) -> None:
        if not self._answered or self.rows is not None:
            raise ValueError(f"{self.holder} sends the common ids too early")
        if places.dtype != torch.int64 or places.ndim != 1 or not len(places) > 0:
            raise ValueError(
                f"{self.holder} sends places as {places.dtype} of shape {list(places.shape)}, but "
                f"they are (n,) of int64"
            )
        listed = places.tolist()
        if len(set(listed)) < len(listed) or not all(0 <= p < len(self._sent) for p in listed):
            raise ValueError(
                f"{self.holder} sends places that {self.name} does not have, or sends them twice"
            )
        self.rows = [self._sent[place] for place in listed]


class AlignedHolder(_Side):
    """State machine of the holder of the labels.

    Args:
        name: name of the holder.
        parties: names of the parties.
        ids: id of each of its people.
        secret: 32 bytes.
        most: maximum points in a message.
        order: key of the common order of the people; by default the secret.
        limits: maximum number of ids of each party.
        asks: called before a party's list is answered.
    """

    def __init__(
        self,
        name: str,
        parties: Sequence[str],
        ids: Sequence[Any],
        secret: bytes,
        most: int = 4096,
        order: bytes | None = None,
        limits: Mapping[str, int] | None = None,
        asks: Asks = answer_every_list,
    ) -> None:
        super().__init__(name, ids, secret, most, asks)
        self.parties = list(parties)
        self._order = secret if order is None else order
        self._texts = id_texts(ids)
        most_of = {} if limits is None else limits
        self._theirs = {one: self._peer(one, most_of.get(one, MOST_IDS)) for one in parties}
        """Points of each party."""
        self._mine = {one: self._peer(one, len(self._points)) for one in parties}
        """The holder's own points, raised by each party."""
        self._powers: dict[str, list[bytes]] = {}
        """Points of each party, raised to both secrets, once all of its list has arrived."""

    @property
    def awaited(self) -> list[str]:
        """Parties that have not sent all of their points, or not raised all of the holder's."""
        return [one for one in self.parties if not self._has_all(one)]

    def _has_all(self, name: str) -> bool:
        return self._theirs[name].whole and self._mine[name].whole

    def begin(self, now: float) -> list[Envelope]:
        """Return the first messages."""
        if not self.parties:
            self._align()
        return [envelope for name in self.parties for envelope in self._blinded(name)]

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """Process a message and return the replies.

        Raises ValueError for an invalid message, and NobodyError if no id is known to all parties.
        """
        if sender not in self.parties or not isinstance(message, Blinded | DoubleBlinded):
            raise ValueError(f"{self.name} cannot process {type(message).__name__} from {sender}")
        if isinstance(message, Blinded):
            self._theirs[sender].take(message.first, message.total, message.points)
            # Raise the points at once, so that an error is attributed to this party.
            if self._theirs[sender].whole and sender not in self._powers:
                self._powers[sender] = self._raised(self._theirs[sender])
        else:
            self._mine[sender].take(message.first, len(self._points), message.points)
        return [] if self.awaited or self.rows is not None else self._align()

    def _align(self) -> list[Envelope]:
        """Compute the common people and their order; return the messages to the parties."""
        # Position of each party's points, by the points raised to both secrets.
        theirs = {
            name: {point: place for place, point in enumerate(self._powers[name])}
            for name in self.parties
        }
        mine = {name: self._mine[name].points for name in self.parties}
        common = set(range(len(self._points)))
        for name in self.parties:
            common &= {place for place, point in enumerate(mine[name]) if point in theirs[name]}
        if not common:
            raise EmptyIntersectionError(
                "no id is common to all parties: check whether they write ids in the same way"
            )
        # Neither the order of ids in storage, which may be by label, nor the order of the points.
        order = sorted(common, key=lambda place: self._drawn(self._sent[place]))
        self.rows = [self._sent[place] for place in order]
        return [
            (name, Common(torch.tensor([theirs[name][mine[name][place]] for place in order])))
            for name in self.parties
        ]

    def _drawn(self, row: int) -> bytes:
        """Return a keyed hash of the id, which does not depend on the order of ids in storage."""
        return hashlib.blake2b(self._texts[row].encode(), key=self._order).digest()


def check_points(sender: str, points: Sequence[bytes]) -> None:
    """Raise ValueError for points that no id has: not on the curve, or of small order."""
    numbers = [int.from_bytes(point, "little") for point in points]
    if any(u >= _PRIME for u in numbers):
        raise ValueError(f"{sender} sends a point that is not a number below 2^255 - 19")
    if not SMALL_ORDER.isdisjoint(numbers):
        raise ValueError(f"{sender} sends {_SMALL}")
    if not _are_squares([u * (u * (u + _A) + 1) % _PRIME for u in numbers]):
        raise ValueError(f"{sender} sends a point of the curve's twist, which no id has")


_SMALL = "a point of small order, which no id has: it would tell nothing of an id"


def _are_squares(numbers: Sequence[int]) -> bool:
    """Return whether all numbers are squares modulo the prime, and not 0."""
    if len(numbers) <= _FEW:
        return all(map(_is_square, numbers))
    # A product is a square if an even number of its factors are non-squares: test random subsets.
    for _ in range(_TESTS):
        chosen = (byte & 1 for byte in secrets.token_bytes(len(numbers)))
        product = 1
        for number in compress(numbers, chosen):
            product = product * number % _PRIME
        if not _is_square(product):
            return False
    return True


def tensor_of(points: Sequence[bytes]) -> Tensor:
    """Return points as a tensor to send: uint8 of shape (n, 32)."""
    return torch.frombuffer(bytearray(b"".join(points)), dtype=torch.uint8).view(-1, BYTES)


def points_of(sender: str, points: Tensor) -> list[bytes]:
    """Return the points of a tensor. Raises ValueError for a tensor without points."""
    if points.dtype != torch.uint8 or points.ndim != 2 or points.shape[1] != BYTES:
        raise ValueError(
            f"{sender} sends a tensor of {points.dtype} and shape {list(points.shape)}, but points "
            f"have {BYTES} bytes: (n, {BYTES}) of uint8"
        )
    flat = points.contiguous().numpy().tobytes()
    return [flat[start : start + BYTES] for start in range(0, len(flat), BYTES)]


def message_bytes(own: int, holders: int, common: int) -> tuple[int, int]:
    """Return (up, down): bytes that a party with `own` ids sends and receives."""
    return BYTES * (own + holders), BYTES * holders + 8 * common
