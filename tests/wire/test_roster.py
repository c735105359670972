"""A roster is taken once, checked in every part, and no other one is taken after it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dure.wire.boxes import BoxKey
from dure.wire.members import RosterError, fingerprint
from dure.wire.requests import MOST_BODY
from dure.wire.roster import (
    PinnedRoster,
    Roster,
    _signed,
    changes,
    check,
    check_known,
    read_identities,
)
from dure.wire.signatures import Key

RUN = "8f14e45fceea167a"
SERVER = Key.make()
EVIL = Key.make()
IDENTITIES = [Key.make() for _ in range(4)]
BOXES = [BoxKey.make() for _ in range(4)]


def member(number: int, *, identity=None, box=None, name="", run=RUN):
    identity = identity or IDENTITIES[number]
    return (box or BOXES[number]).member(identity, number, name or f"ward {number}", run)


MEMBERS = [member(number) for number in range(3)]
ROSTER = Roster.signed(RUN, MEMBERS, SERVER)


def resigned(key: Key, **changed) -> Roster:
    """As a server signs that checks nothing."""
    roster = replace(ROSTER, server=key.public, **changed)
    signed = _signed(roster.run, roster.server, roster.members)
    return replace(roster, signature=key.sign(signed).hex())


def refused(roster: Roster, server_key: str = SERVER.public) -> RosterError:
    with pytest.raises(RosterError) as error:
        check(roster, server_key)
    assert "\n" not in str(error.value)
    return error.value


def test_a_roster_travels_and_is_still_true() -> None:
    came = Roster.from_json(Roster.signed(RUN, reversed(MEMBERS), SERVER).to_json())
    check(came, SERVER.public)
    assert came == ROSTER
    assert came.fingerprint == ROSTER.fingerprint
    assert came.member(2) == MEMBERS[2]
    with pytest.raises(RosterError, match="no client 3"):
        came.member(3)


@given(st.data())
def test_a_roster_with_any_byte_changed_is_refused(data) -> None:
    body = bytearray(ROSTER.to_json())
    at = data.draw(st.integers(0, len(body) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != body[at]))
    body[at] = byte
    with pytest.raises(RosterError):
        check(Roster.from_json(body), SERVER.public)


@given(st.binary(max_size=200))
def test_any_other_bytes_are_no_roster(body) -> None:
    with pytest.raises(RosterError):
        Roster.from_json(body)


@pytest.mark.parametrize(
    "change",
    [
        {"more": 1},
        {"\x1b[2J\n": 1},
        {"run": ""},
        {"run": "a/b"},
        {"run": "..%2f"},
        {"run": "abc\n"},
        {"server": "00"},
        {"server": ROSTER.server.upper()},
        {"signature": "00"},
        {"members": None},
        {"members": [{}]},
    ],
)
def test_a_field_that_is_not_what_it_has_to_be_is_refused(change) -> None:
    body = {**json.loads(ROSTER.to_json()), **change}
    with pytest.raises(RosterError, match="the received data are not a roster: ") as error:
        Roster.from_json(json.dumps(body).encode())
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    "change",
    [
        {"number": -1},
        {"number": 1 << 31},
        {"number": "1"},
        {"number": 1.5},
        {"name": ""},
        {"name": "a" * 65},
        {"box": "0" * 63},
        {"more": 1},
    ],
)
def test_so_is_one_of_a_client(change) -> None:
    body = json.loads(ROSTER.to_json())
    body["members"][0] |= change
    with pytest.raises(RosterError, match="the received data are not a roster: "):
        Roster.from_json(json.dumps(body).encode())


def test_a_body_without_end_is_not_read() -> None:
    with pytest.raises(RosterError, match="may have"):
        Roster.from_json(b" " * (MOST_BODY + 1))


def test_another_server_cannot_sign_it() -> None:
    assert refused(resigned(EVIL)).kind == "other server"
    assert refused(replace(resigned(EVIL), server=SERVER.public)).kind == "not signed"


def test_a_server_cannot_put_its_own_box_key_beside_an_identity() -> None:
    swapped = replace(MEMBERS[1], box=BoxKey.make().public)
    error = refused(resigned(SERVER, members=(MEMBERS[0], swapped, MEMBERS[2])))
    assert error.kind == "other box"
    assert "client 1 (ward 1) has not signed the box key" in str(error)


def test_nor_the_box_key_of_another_run_or_another_number_or_name() -> None:
    older = member(1, run="c9f0f895fb98ab91")
    moved = replace(MEMBERS[1], number=3)
    renamed = replace(MEMBERS[1], name="ward 9")
    for one in (older, moved, renamed):
        members = tuple(sorted([MEMBERS[0], MEMBERS[2], one], key=lambda one: one.number))
        assert refused(resigned(SERVER, members=members)).kind == "other box"


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([member(1), member(0)], "not in order"),
        ([member(0), member(0)], "not in order"),
        ([member(0), member(1, name="ward 0")], "clients 0 and 1 have the same name"),
        ([member(0), member(1, identity=IDENTITIES[0])], "have the same identity"),
        ([member(0), member(1, box=BOXES[0])], "have the same box"),
    ],
)
def test_clients_are_in_order_and_differ(members, said) -> None:
    assert said in str(refused(resigned(SERVER, members=tuple(members))))


@pytest.mark.parametrize("name", ["a\x1b[2J", "a\nb", "a\u202eb"])
def test_a_name_that_cannot_be_printed_is_refused(name) -> None:
    with pytest.raises(ValueError, match="printable"):
        member(0, name=name)
    error = refused(resigned(SERVER, members=(replace(MEMBERS[0], name=name),)))
    assert "the name of client 0" in str(error)
    assert str(error).isprintable()


@pytest.mark.parametrize("number", [-1, 1 << 31])
def test_a_client_has_a_number(number) -> None:
    with pytest.raises(ValueError, match="not a number of a client"):
        BOXES[0].member(IDENTITIES[0], number, "ward", RUN)


def test_no_roster_is_signed_that_is_too_long_to_be_read() -> None:
    with pytest.raises(RosterError, match="too many for one roster"):
        Roster.signed(RUN, [replace(MEMBERS[0], number=number) for number in range(4000)], SERVER)


def test_a_server_that_means_well_signs_no_roster_that_would_be_refused() -> None:
    with pytest.raises(RosterError, match="have the same name"):
        Roster.signed(RUN, [member(0), member(1, name="ward 0")], SERVER)


def pinned(folder: Path, roster: Roster = ROSTER, **more) -> Roster:
    """As a client that has just started does."""
    return PinnedRoster.load(folder, RUN).take(roster, own=MEMBERS[0], **more)


def refused_by(folder: Path, roster: Roster, **more) -> RosterError:
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(RosterError) as error:
        pinned(folder, roster, **more)
    assert before == {file.name: file.read_bytes() for file in folder.iterdir()}
    assert "\n" not in str(error.value)
    return error.value


def test_the_first_roster_is_pinned_and_comes_again(tmp_path: Path) -> None:
    assert PinnedRoster.load(tmp_path, RUN).roster is None
    assert pinned(tmp_path) == ROSTER
    assert PinnedRoster.load(tmp_path, RUN).roster == ROSTER
    assert pinned(tmp_path, Roster.from_json(ROSTER.to_json())) == ROSTER


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([*MEMBERS, member(3)], "client 3 (ward 3) was added"),
        (MEMBERS[:2], "client 2 (ward 2) was removed"),
        (
            [*MEMBERS[:2], member(2, identity=EVIL)],
            f"client 2 (ward 2) has the identity {fingerprint(EVIL.public)}, "
            f"but had {fingerprint(IDENTITIES[2].public)}",
        ),
        ([*MEMBERS[:2], member(2, box=BOXES[3])], "client 2 (ward 2) has another box key"),
        ([*MEMBERS[:2], member(2, name="ward 9")], "client 2 (ward 2) is now named ward 9"),
    ],
)
def test_a_later_roster_that_differs_is_refused_by_what_has_changed(
    tmp_path: Path, members, said
) -> None:
    pinned(tmp_path)
    error = refused_by(tmp_path, Roster.signed(RUN, members, SERVER))
    assert error.kind == "other roster"
    assert str(error).endswith(f"differs from the first one: {said}")


def test_a_server_with_another_key_is_refused(tmp_path: Path) -> None:
    pinned(tmp_path)
    error = refused_by(tmp_path, Roster.signed(RUN, MEMBERS, EVIL))
    assert fingerprint(EVIL.public) in str(error)
    assert fingerprint(SERVER.public) in str(error)


def test_the_server_may_be_known_beforehand(tmp_path: Path) -> None:
    error = refused_by(tmp_path, ROSTER, server_key=EVIL.public)
    assert error.kind == "other server"
    assert pinned(tmp_path, server_key=SERVER.public) == ROSTER


def test_a_roster_of_another_run_is_refused(tmp_path: Path) -> None:
    other = Roster.signed("other", [member(0, run="other")], SERVER)
    assert refused_by(tmp_path, other).kind == "other run"


def test_each_run_has_its_own(tmp_path: Path) -> None:
    pinned(tmp_path)
    own = member(0, run="other")
    other = Roster.signed("other", [own], SERVER)
    assert PinnedRoster.load(tmp_path, "other").take(other, own) == other
    assert pinned(tmp_path) == ROSTER


@pytest.mark.parametrize(
    "own",
    [
        member(0, box=BOXES[3]),
        member(0, identity=EVIL),
        member(0, name="ward 9"),
    ],
)
def test_a_client_has_to_find_itself_in_it(tmp_path: Path, own) -> None:
    members = [own, *MEMBERS[1:]]
    assert refused_by(tmp_path, Roster.signed(RUN, members, SERVER)).kind == "not me"


def test_a_client_that_is_not_in_it_takes_no_roster(tmp_path: Path) -> None:
    assert refused_by(tmp_path, Roster.signed(RUN, MEMBERS[1:], SERVER)).kind == "unknown client"


@pytest.mark.parametrize("at", [0, 30, 200, -1])
def test_a_file_that_was_changed_is_not_used(tmp_path: Path, at: int) -> None:
    pinned(tmp_path)
    (file,) = tmp_path.iterdir()
    body = bytearray(file.read_bytes())
    body[at] ^= 1
    file.write_bytes(body)
    with pytest.raises(RosterError, match="is damaged") as error:
        PinnedRoster.load(tmp_path, RUN)
    assert file.name in str(error.value)


def test_the_file_of_another_run_is_not_used(tmp_path: Path) -> None:
    pinned(tmp_path)
    (tmp_path / f"roster-{RUN}.json").rename(tmp_path / "roster-other.json")
    with pytest.raises(RosterError, match=f"is the roster of the run {RUN}"):
        PinnedRoster.load(tmp_path, "other")


@pytest.mark.parametrize("run", ["", "../a", "a/b", ".hidden", "a\n", "a" * 101])
def test_a_run_cannot_name_another_file(tmp_path: Path, run: str) -> None:
    with pytest.raises(ValueError, match="not an id of a run"):
        PinnedRoster.load(tmp_path, run)


def written(folder: Path, text: str) -> Path:
    (folder / "identities").write_text(text)
    return folder / "identities"


def listed(*numbers: int) -> str:
    return "".join(f"{n} {fingerprint(IDENTITIES[n].public)}\n" for n in numbers)


def test_a_list_has_fingerprints_as_they_are_read_out(tmp_path: Path) -> None:
    first = fingerprint(IDENTITIES[0].public)
    text = (
        "# wards\n\n"
        f"0  {first.upper()}\n"
        f"1\t{fingerprint(IDENTITIES[1].public).replace(' ', ':')}  \n"
        f"2 {IDENTITIES[2].public}\n"
    )
    known = read_identities(written(tmp_path, text))
    assert sorted(known) == [0, 1, 2]
    check_known(ROSTER, known)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("1", "NUMBER FINGERPRINT"),
        ("one 0000", "NUMBER FINGERPRINT"),
        ("-1 " + "0" * 32, "NUMBER FINGERPRINT"),
        ("1 " + "0" * 31, "NUMBER FINGERPRINT"),
        ("1 " + "g" * 32, "NUMBER FINGERPRINT"),
        ("0 " + "0" * 32, "client 0 occurs twice"),
    ],
)
def test_a_line_that_is_none_is_refused_by_its_number(tmp_path: Path, line, said) -> None:
    with pytest.raises(ValueError, match=f"line 3: .*{said}"):
        read_identities(written(tmp_path, f"# of a ward\n{listed(0)}{line}\n"))


def test_a_list_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read the list of identities"):
        read_identities(tmp_path / "identities")
    (tmp_path / "identities").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="cannot read the list of identities"):
        read_identities(tmp_path / "identities")


def test_a_client_that_is_not_on_the_list_is_refused(tmp_path: Path) -> None:
    known = read_identities(written(tmp_path, listed(0, 1)))
    error = refused_by(tmp_path, ROSTER, known=known)
    assert error.kind == "unknown client"
    assert "client 2 (ward 2)" in str(error)


def test_a_client_whose_identity_is_another_is_refused(tmp_path: Path) -> None:
    known = read_identities(written(tmp_path, listed(0, 1, 2)))
    evil = Roster.signed(RUN, [*MEMBERS[:2], member(2, identity=EVIL)], SERVER)
    error = refused_by(tmp_path, evil, known=known)
    assert error.kind == "other identity"
    assert fingerprint(EVIL.public) in str(error)


def test_the_list_counts_for_a_roster_that_was_pinned_too(tmp_path: Path) -> None:
    pinned(tmp_path)
    known = {1: IDENTITIES[1].public}
    assert refused_by(tmp_path, ROSTER, known=known).kind == "unknown client"


def test_a_client_need_not_be_on_its_own_list_and_others_may_be_absent(tmp_path: Path) -> None:
    known = read_identities(written(tmp_path, listed(1, 2, 3)))
    assert pinned(tmp_path, known=known) == ROSTER


@given(st.lists(st.sampled_from(range(4)), unique=True), st.integers(0, 3))
def test_rosters_are_the_same_if_and_only_if_their_fingerprints_are(numbers, more) -> None:
    one = Roster.signed(RUN, map(member, numbers), SERVER)
    other = Roster.signed(RUN, map(member, {*numbers, more}), SERVER)
    assert (one.fingerprint == other.fingerprint) == (changes(one, other) == [])
