"""A roster that the owner of a federation has signed: nobody else can make one, or change it."""

from __future__ import annotations

import json
from datetime import date, timedelta
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dure.wire.members import RosterError, fingerprint, matches_key, parse_key
from dure.wire.owners_roster import (
    MOST,
    Listed,
    OwnersRoster,
    PinnedOwnersRoster,
    _signed,
    changes,
    check_count,
    check_date,
    check_own,
    check_owner,
    read_members,
)
from dure.wire.requests import MOST_BODY, Machine, TaskDescription, Welcome, from_json, to_json
from dure.wire.signatures import Key

OWNER = Key.make()
EVIL = Key.make()
KEYS = [Key.make() for _ in range(4)]
MEMBERS = [Listed(number, f"ward {number}", KEYS[number].public) for number in range(3)]
ROSTER = OwnersRoster.signed("heart study", MEMBERS, OWNER)


def resigned(key: Key = OWNER, **changed) -> bytes:
    """As somebody signs who checks nothing."""
    roster = replace(ROSTER, owner=key.public, **changed)
    text = _signed(roster.federation, roster.expires, roster.owner, roster.members)
    return replace(roster, signature=key.sign(text).hex()).to_json()


def refused(body: bytes) -> RosterError:
    with pytest.raises(RosterError) as error:
        OwnersRoster.from_json(body)
    assert str(error.value).isprintable()
    return error.value


def test_a_roster_travels_and_says_who_is_on_it() -> None:
    signed = OwnersRoster.signed("heart study", reversed(MEMBERS), OWNER)
    came = OwnersRoster.from_json(signed.to_json())
    # `ROSTER` was signed when the tests were imported, perhaps before midnight.
    assert came == signed
    assert came.members == ROSTER.members
    assert came.identities == {number: KEYS[number].public for number in range(3)}
    assert came.number_of(KEYS[2].public) == 2
    assert came.number_of(KEYS[3].public) is None
    assert "'heart study', 3 clients, until 20" in str(came)


@given(st.data())
def test_a_roster_with_any_byte_changed_is_refused(data) -> None:
    body = bytearray(ROSTER.to_json())
    # The last one is the end of the line.
    at = data.draw(st.integers(0, len(body) - 2))
    body[at] = data.draw(st.integers(0, 255).filter(lambda byte: byte != body[at]))
    # Only another spelling of the same, such as a day as a time, could be taken.
    try:
        assert OwnersRoster.from_json(body) == ROSTER
    except RosterError:
        return


def test_one_that_nobody_signed_or_that_was_changed_is_refused() -> None:
    unsigned = json.loads(ROSTER.to_json())
    del unsigned["signature"]
    assert refused(json.dumps(unsigned).encode()).kind == "no roster"
    swapped = (MEMBERS[0], replace(MEMBERS[1], identity=EVIL.public), MEMBERS[2])
    for changed in (
        replace(ROSTER, members=swapped),
        replace(ROSTER, expires=ROSTER.expires + timedelta(days=1)),
        replace(ROSTER, federation="another"),
        replace(ROSTER, members=ROSTER.members[:2]),
    ):
        assert refused(changed.to_json()).kind == "not signed"
    # Somebody else's signature under the owner's name.
    body = msgspec.json.decode(resigned(EVIL), type=OwnersRoster)
    assert refused(replace(body, owner=OWNER.public).to_json()).kind == "not signed"


def test_an_owner_is_known_by_key_or_fingerprint() -> None:
    for said in (OWNER.public, fingerprint(OWNER.public), fingerprint(OWNER.public).upper()):
        check_owner(ROSTER, parse_key(said))
    other = OwnersRoster.from_json(resigned(EVIL))
    for said in (OWNER.public, fingerprint(OWNER.public)):
        with pytest.raises(RosterError) as error:
            check_owner(other, parse_key(said))
        assert error.value.kind == "other owner"
        assert fingerprint(EVIL.public) in str(error.value)
        assert fingerprint(OWNER.public) in str(error.value)


@pytest.mark.parametrize("text", ["", "12", "x" * 64, "0" * 65, "0" * 31])
def test_what_is_no_key_is_refused(text) -> None:
    with pytest.raises(ValueError, match="is not a key: a public key has 64"):
        parse_key(text)


def test_a_key_is_said_in_several_spellings_and_in_no_shorter_one() -> None:
    public = KEYS[0].public
    assert matches_key(public, parse_key(fingerprint(public).replace(" ", ":")))
    assert not matches_key(public, parse_key(fingerprint(KEYS[1].public)))
    with pytest.raises(ValueError, match="is not a key: a public key has 64"):
        parse_key(fingerprint(public)[:-5])


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([MEMBERS[1], MEMBERS[0]], "not in order"),
        ([MEMBERS[0], MEMBERS[0]], "not in order"),
        ([MEMBERS[0], replace(MEMBERS[1], name="ward 0")], "0 and 1 have the same name"),
        ([MEMBERS[0], replace(MEMBERS[1], identity=KEYS[0].public)], "the same identity"),
        ([MEMBERS[0], MEMBERS[2]], "no client 1"),
        ([MEMBERS[1]], "no client 0"),
        ([], "no client 0"),
        ([replace(MEMBERS[0], name="a\x1b[2J")], "the name of client 0"),
    ],
)
def test_members_have_all_numbers_once_and_differ(members, said) -> None:
    assert said in str(refused(resigned(members=tuple(members))))


@pytest.mark.parametrize(
    "change",
    [
        {"more": 1},
        {"federation": ""},
        {"federation": "a" * 65},
        {"expires": "tomorrow"},
        {"expires": None},
        {"owner": "00"},
        {"members": None},
        {"members": [{"number": -1, "name": "a", "identity": KEYS[0].public}]},
        {"members": [{"number": 0, "name": "a", "identity": "00"}]},
    ],
)
def test_a_field_that_is_not_what_it_has_to_be_is_refused(change) -> None:
    body = {**json.loads(ROSTER.to_json()), **change}
    assert refused(json.dumps(body).encode()).kind == "no roster"


def test_what_has_no_end_is_not_read() -> None:
    assert "may have" in str(refused(b" " * (MOST + 1)))


def test_a_roster_expires_at_the_end_of_its_day() -> None:
    check_date(ROSTER)
    check_date(ROSTER, ROSTER.expires)
    with pytest.raises(RosterError, match=f"has expired on {ROSTER.expires}"):
        check_date(ROSTER, ROSTER.expires + timedelta(days=1))
    for days in (0, -1, float("nan"), float("inf"), 1e6):
        with pytest.raises(RosterError, match="has to be more than 0 days"):
            OwnersRoster.signed("x", MEMBERS, OWNER, days)


def test_it_is_of_so_many_clients() -> None:
    check_count(ROSTER, 3)
    with pytest.raises(RosterError, match="has 3 clients, but the run has 4"):
        check_count(ROSTER, 4)


def test_a_client_finds_itself_on_it() -> None:
    check_own(ROSTER, KEYS[1].public)
    check_own(ROSTER, KEYS[1].public, 1)
    with pytest.raises(RosterError, match="as 2, but the roster as 1"):
        check_own(ROSTER, KEYS[1].public, 2)
    with pytest.raises(RosterError, match=f"does not have this client's key, {KEYS[3].public}"):
        check_own(ROSTER, KEYS[3].public)


def listed(count: int, length: int) -> list[Listed]:
    return [
        Listed(number, f"{number}".ljust(length, "x"), f"{number:062x}02")
        for number in range(count)
    ]


@pytest.mark.parametrize(("count", "length"), [(4000, 8), (2500, 64)])
def test_the_longest_roster_travels_in_a_welcome(count, length) -> None:
    roster = OwnersRoster.signed("x" * 64, listed(count, length), OWNER)
    text = roster.to_json().decode()
    machine = Machine("2", "AVX2", "loop", 1)
    welcome = Welcome(
        1, "run", 0, count, {}, 0, TaskDescription({}), machine, 1.0, 1.0, roster=text
    )
    body = to_json(welcome)
    # Room for the forms of a model's tensors.
    assert len(body) < 0.7 * MOST_BODY
    assert from_json(body, Welcome).roster == text


def test_one_that_is_too_long_is_not_signed() -> None:
    with pytest.raises(RosterError, match="may have"):
        OwnersRoster.signed("x", listed(5000, 8), OWNER)


# Lists that owners write


def written(folder: Path, text: str) -> Path:
    path = folder / "clients.txt"
    path.write_text(text)
    return path


def test_a_list_has_a_client_a_line(tmp_path: Path) -> None:
    first, second = KEYS[0].public, KEYS[1].public
    text = f"# wards\n\n1 St. Mary, ward 3   {second.upper()}\n0\tward-1 {first}\n"
    assert read_members(written(tmp_path, text)) == [
        Listed(1, "St. Mary, ward 3", second),
        Listed(0, "ward-1", first),
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("0", "a line has to be NUMBER NAME PUBLICKEY"),
        ("ward 0 " + "0" * 64, "a line has to be NUMBER NAME PUBLICKEY"),
        ("0 " + "0" * 64, "a line has to be NUMBER NAME PUBLICKEY"),
        ("0 ward 0000", "a line has to be NUMBER NAME PUBLICKEY"),
        ("0 ward " + "0" * 32, "is a fingerprint: give the whole public key"),
        ("0 a\x1b[2J " + "0" * 64, "a line has to be NUMBER NAME PUBLICKEY"),
        (f"0 a {'2' * 64}\n0 b {'3' * 64}", "client 0 occurs twice"),
    ],
)
def test_a_line_of_another_form_is_named(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"line [12]: ") as error:
        read_members(written(tmp_path, line + "\n"))
    assert said in str(error.value)


# What a run was begun with


def test_the_first_roster_is_pinned_and_another_one_is_refused_by_name(tmp_path: Path) -> None:
    pinned = PinnedOwnersRoster.of_client(tmp_path, "run-1")
    pinned.check(ROSTER)
    assert not list(tmp_path.iterdir())
    pinned.take(ROSTER)
    pinned.take(OwnersRoster.from_json(ROSTER.to_json()))
    swapped = [MEMBERS[0], replace(MEMBERS[1], identity=KEYS[3].public), MEMBERS[2]]
    other = OwnersRoster.signed("heart study", swapped, OWNER)
    for take in (pinned.take, pinned.check, PinnedOwnersRoster.of_client(tmp_path, "run-1").take):
        with pytest.raises(
            RosterError, match="differs from the one with which run-1 was started"
        ) as error:
            take(other)
        assert "client 1 (ward 1) has the identity" in str(error.value)
    # Another run may have another one.
    PinnedOwnersRoster.of_client(tmp_path, "run-2").take(other)


def test_an_owner_may_renew_a_roster_within_a_run(tmp_path: Path) -> None:
    pinned = PinnedOwnersRoster.of_client(tmp_path, "run-1")
    pinned.take(ROSTER)
    renewed = OwnersRoster.signed("heart study", MEMBERS, OWNER, days=900)
    pinned.take(renewed)
    (file,) = tmp_path.iterdir()
    assert OwnersRoster.read(file) == renewed
    with pytest.raises(RosterError, match="has signed it, and"):
        pinned.take(OwnersRoster.signed("heart study", MEMBERS, EVIL, days=900))


@pytest.mark.parametrize("run", ["", "../a", "a/b", "a\n"])
def test_a_run_cannot_name_another_file(tmp_path: Path, run: str) -> None:
    with pytest.raises(ValueError, match="not an id of a run"):
        PinnedOwnersRoster.of_client(tmp_path, run)


def test_what_was_changed_on_the_disk_is_not_used(tmp_path: Path) -> None:
    pinned = PinnedOwnersRoster.of_client(tmp_path, "run-1")
    pinned.take(ROSTER)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes().replace(b"ward 1", b"ward 9"))
    with pytest.raises(RosterError, match=f"{file.name}: the roster is not signed"):
        pinned.take(ROSTER)


def test_all_that_differs_is_said() -> None:
    others = [*MEMBERS[:2], replace(MEMBERS[2], name="ward 9"), Listed(3, "new", KEYS[3].public)]
    other = replace(OwnersRoster.signed("liver study", others, EVIL), expires=date(2030, 1, 2))
    assert changes(ROSTER, other) == [
        f"{fingerprint(EVIL.public)} has signed it, and {fingerprint(OWNER.public)} before",
        "it names the federation 'liver study', but before 'heart study'",
        "client 2 (ward 2) is now named ward 9",
        "client 3 (new) was added",
    ]
    assert changes(ROSTER, ROSTER) == []
