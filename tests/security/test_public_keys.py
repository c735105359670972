"""Public keys with which anyone could sign, or share a secret, are taken nowhere."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from dure.deploy.client.policy import Policy
from dure.deploy.server.access import AccessControl, RequestRefused
from dure.deploy.server.register import Register
from dure.federated.privacy.secure_aggregation.agreement import AgreementError, KeyPair, agree
from dure.run import lineage
from dure.wire import hpke
from dure.wire.boxes import BoxKey, is_secret
from dure.wire.members import RosterError, parse_key
from dure.wire.owners_roster import Listed, OwnersRoster, read_members
from dure.wire.requests import Enrol
from dure.wire.roster import Roster, check
from dure.wire.signatures import (
    CLIENT,
    Key,
    SignatureError,
    Signer,
    check_public,
    claim_of,
    digest_of,
    is_proven,
    is_signed,
)

P = 2**255 - 19
D = -121665 * pow(121666, -1, P) % P
SIGN = 1 << 255

Point = tuple[int, int]


def added(one: Point, other: Point) -> Point:
    """The sum on edwards25519 (RFC 8032, 5.1.4, affine)."""
    (x, y), (u, v) = one, other
    t = D * x * u * y * v % P
    return (x * v + y * u) * pow(1 + t, -1, P) % P, (y * v + x * u) * pow(1 - t, -1, P) % P


def small_points() -> list[Point]:
    """The eight multiples of a point of order eight, which doubles to one of order four."""
    # Twice (x, y) is (u, 0) where x² + y² = 0: y = i x, and by the curve d x⁴ - 2 x² - 1 = 0.
    i = pow(2, (P - 1) // 4, P)
    squares = ((1 + sign * root(1 + D)) * pow(D, -1, P) for sign in (1, -1))
    x = next(filter(None, map(root, squares)))
    point = (x, i * x % P)
    points = [(0, 1)]
    while (following := added(points[-1], point)) != (0, 1):
        points.append(following)
    return points


def root(square: int) -> int:
    """A square root modulo P; 0 where there is none."""
    square %= P
    found = pow(square, (P + 3) // 8, P)
    if (found * found - square) % P:
        found = found * pow(2, (P - 1) // 4, P) % P
    return 0 if (found * found - square) % P else found


def spelled(number: int) -> str:
    return number.to_bytes(32, "little").hex()


SMALL = small_points()
CANONICAL = [spelled(y | (SIGN if x & 1 else 0)) for x, y in SMALL]
# Also y + P where that fits, and a sign for x = 0.
OTHERS = [
    spelled(y + more | sign)
    for y in {y for _, y in SMALL}
    for more in (0, P)
    for sign in (0, SIGN)
    if y + more < SIGN and spelled(y + more | sign) not in CANONICAL
]
WEAK = [*CANONICAL, *OTHERS]
OWNER = Key.make()


def test_there_are_eight_points_of_small_order_and_six_more_spellings() -> None:
    assert len(set(CANONICAL)) == 8
    assert len(OTHERS) == 6
    for point in SMALL:
        total = (0, 1)
        for _ in range(8):
            total = added(total, point)
        assert total == (0, 1)


def test_such_a_key_verifies_what_nobody_has_signed() -> None:
    # R is the neutral point and S is 0: no private key is needed where h·A is neutral too.
    forged = bytes.fromhex(CANONICAL[0]) + bytes(32)
    Ed25519PublicKey.from_public_bytes(bytes.fromhex(CANONICAL[0])).verify(forged, b"anything")
    with pytest.raises(ValueError, match="anyone could sign"):
        is_signed(CANONICAL[0], b"anything", forged)


@pytest.mark.parametrize("weak", WEAK)
def test_a_key_of_small_order_is_taken_nowhere(weak: str, tmp_path: Path) -> None:
    forged = bytes.fromhex(CANONICAL[0]) + bytes(32)
    with pytest.raises(ValueError, match="anyone could sign"):
        check_public(weak)
    # A client's requests, and its enrolment.
    headers = {**Signer(OWNER).sign("GET", "/v1/next", digest_of()), CLIENT: weak}
    with pytest.raises(SignatureError, match="anyone could sign"):
        claim_of(headers)
    assert not is_proven(weak, forged.hex(), "token", "ward", None)
    with Register(tmp_path / "clients.db", clients=2) as register:
        access = AccessControl(register, "open")
        with pytest.raises(RequestRefused, match="anyone could sign"):
            access.enrol(Enrol(token="", key=weak, proof=forged.hex(), name="ward"))
        with pytest.raises(RequestRefused, match="anyone could sign"):
            access.admit(headers, "GET", "/v1/next", "127.0.0.1")
    # What people write: an owner, an identity, a list of clients.
    with pytest.raises(ValueError, match="anyone could sign"):
        parse_key(weak)
    (tmp_path / "policy.toml").write_text(f'owner = "{weak}"\n')
    with pytest.raises(ValueError, match="owner"):
        Policy.beside(tmp_path)
    (tmp_path / "clients.txt").write_text(f"0 ward {weak}\n")
    with pytest.raises(ValueError, match=r"line 1: .*anyone could sign"):
        read_members(tmp_path / "clients.txt")
    # Rosters: a client's key, and the key of whoever signs.
    with pytest.raises(RosterError, match=r"client 0 .*anyone could sign"):
        OwnersRoster.signed("federation", [Listed(0, "ward", weak)], OWNER)
    signed = OwnersRoster.signed("federation", [Listed(0, "ward", OWNER.public)], OWNER)
    body = msgspec.structs.replace(signed, owner=weak, signature=forged.hex()).to_json()
    with pytest.raises(RosterError, match=r"owner .*anyone could sign"):
        OwnersRoster.from_json(body)
    member = BoxKey.make().member(OWNER, 0, "ward", "run")
    roster = Roster.signed("run", [member], OWNER)
    with pytest.raises(RosterError, match=r"server .*anyone could sign"):
        check(msgspec.structs.replace(roster, server=weak, signature=forged.hex()), weak)
    with pytest.raises(RosterError, match=r"client 0 .*anyone could sign"):
        Roster.signed("run", [msgspec.structs.replace(member, identity=weak)], OWNER)


def test_a_lineage_that_nobody_has_signed_is_none(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    said = lineage.signed({}, digest_of(b"weights"), OWNER)
    forged = {**said, "key": CANONICAL[0], "signature": CANONICAL[0] + "00" * 32}
    (tmp_path / "model.lineage.json").write_bytes(msgspec.json.encode(forged))
    with pytest.raises(lineage.LineageError, match="not a signed lineage"):
        lineage.verify(tmp_path)


@given(st.integers(P, SIGN - 1), st.sampled_from([0, SIGN]))
def test_a_point_is_written_in_one_way(y: int, sign: int) -> None:
    with pytest.raises(ValueError, match="not a safe public key"):
        check_public(spelled(y | sign))


def test_keys_that_are_made_are_taken() -> None:
    for _ in range(64):
        check_public(Key.make().public)
        assert is_secret(BoxKey.make().public)


# X25519: u = (1 + y) / (1 - y), and the spellings of RFC 7748 with a high bit.
U = sorted({(1 + y) * pow(1 - y, -1, P) % P if y != 1 else 0 for _, y in SMALL} | {P - 1})
BOXES = [u + more | high for u in U for more in (0, P) for high in (0, SIGN) if u + more < SIGN]


@pytest.mark.parametrize("u", BOXES)
def test_no_secret_is_shared_with_a_key_of_small_order(u: int) -> None:
    weak = spelled(u)
    assert not is_secret(weak)
    box = BoxKey.make()
    box.public = weak
    member = box.member(OWNER, 0, "ward", "run")
    assert not member.is_true("run")
    with pytest.raises(RosterError, match="has not signed the box key"):
        Roster.signed("run", [member], OWNER)
    with pytest.raises(ValueError):  # noqa: PT011
        hpke.encrypt(bytes.fromhex(weak), b"", [], memoryview(bytearray(hpke.TAG)))
    encrypted = memoryview(bytearray(hpke.TAG))
    with pytest.raises(ValueError):  # noqa: PT011
        hpke.decrypt(
            BoxKey.make().private,
            bytes.fromhex(weak),
            b"",
            encrypted,
            memoryview(bytearray(hpke.SLACK)),
        )
    with pytest.raises(AgreementError, match="shared secret is zero"):
        agree(KeyPair.of(bytes(range(32))), bytes.fromhex(weak), b"")
