"""Sides of an alignment that cheat: points that no id has, lists that match too much, and sides
that ask too often, also after a crash of either one."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.split.alignment import (
    AlignedHolder,
    AlignedParty,
    Blinded,
    Common,
    DoubleBlinded,
    SecretScalar,
    point_of,
    points_of,
    tensor_of,
)
from dure.split.network.alignment_queries import AlignmentQueries, secret_in

PRIME = 2**255 - 19
IDS = [f"person {number}" for number in range(6)]


def secret(number: int) -> bytes:
    return bytes([number + 1] * 32)


def on_the_twist(seed: int) -> bytes:
    u = seed % PRIME
    while pow(u**3 + 486662 * u**2 + u, (PRIME - 1) // 2, PRIME) != PRIME - 1:
        u = (u + 1) % PRIME
    return u.to_bytes(32, "little")


def holder(**others: Any) -> AlignedHolder:
    return AlignedHolder("server", ["party 1"], IDS, secret(0), **others)


def party(ids: list[str] = IDS, number: int = 1, **others: Any) -> AlignedParty:
    return AlignedParty("party 1", "server", ids, secret(number), **others)


def talk(server: AlignedHolder, other: AlignedParty, lie: Callable[[Any], Any]) -> None:
    """Until nothing is said any more; what the party says is changed."""
    under_way = [("server", to, message) for to, message in server.begin(0.0)]
    while under_way:
        _, to, message = under_way.pop(0)
        if to == "server":
            said = server.receive("party 1", lie(message), 0.0)
            under_way += [("server", name, one) for name, one in said]
        else:
            answers = other.receive("server", message, 0.0)
            under_way += [("party 1", name, one) for name, one in answers]


def test_one_value_for_all_places_does_not_make_one_id_match_all() -> None:
    def lie(message: Any) -> Any:
        if not isinstance(message, DoubleBlinded):
            return message
        points = points_of("", message.points)
        return DoubleBlinded(message.first, tensor_of(points[:1] * len(points)))

    server = holder()
    with pytest.raises(
        ValueError, match="party 1 sends a point twice: each person needs a unique id"
    ):
        talk(server, party(["person 0", "a stranger"]), lie)
    assert server.rows is None


def test_one_value_is_refused_in_parts_as_well() -> None:
    points = [SecretScalar(secret(3)).power(point_of(name)) for name in IDS]
    server = holder(most=2)
    server.receive("party 1", DoubleBlinded(0, tensor_of(points[:2])), 0.0)
    with pytest.raises(ValueError, match="party 1 sends a point twice"):
        server.receive("party 1", DoubleBlinded(2, tensor_of(points[:2])), 0.0)
    # The same part again is what a network does, and changes nothing.
    assert server.receive("party 1", DoubleBlinded(0, tensor_of(points[:2])), 0.0) == []
    with pytest.raises(ValueError, match="party 1 sends two points for place 1"):
        server.receive("party 1", DoubleBlinded(1, tensor_of(points[2:4])), 0.0)


@given(seed=st.integers(1, PRIME - 1), place=st.integers(0, 29), few=st.booleans())
@settings(max_examples=20)
def test_a_point_of_the_twist_is_refused_in_any_list(seed: int, place: int, few: bool) -> None:
    count = 6 if few else 30
    points = [point_of(f"id {number}") for number in range(count)]
    points[place % count] = on_the_twist(seed)
    wrong = tensor_of(points)
    with pytest.raises(ValueError, match="party 1 sends a point"):
        holder().receive("party 1", Blinded(0, count, wrong), 0.0)
    with pytest.raises(ValueError, match="server sends a point"):
        party().receive("server", Blinded(0, count, wrong), 0.0)
    with pytest.raises(ValueError, match="party 1 sends a point"):
        holder().receive("party 1", DoubleBlinded(0, wrong[place % count :][:1]), 0.0)


def test_points_that_come_back_as_they_were_sent_are_refused() -> None:
    server = holder()
    ((_, blinded),) = server.begin(0.0)
    assert isinstance(blinded, Blinded)
    for message in (blinded, DoubleBlinded(0, blinded.points)):
        with pytest.raises(ValueError, match="party 1 returns a point unchanged"):
            server.receive("party 1", message, 0.0)


@given(
    first=st.integers(-(1 << 63), (1 << 63) - 1),
    total=st.integers(-(1 << 63), (1 << 63) - 1),
    count=st.integers(0, 8),
)
def test_wrong_counts_are_refused_or_wait_for_the_rest(first: int, total: int, count: int) -> None:
    server = holder(limits={"party 1": 7})
    points = tensor_of([point_of(f"id {number}") for number in range(8)])[:count]
    right = 1 <= total <= 7 and count > 0 and first >= 0 and first + count <= total
    if right:
        assert server.receive("party 1", Blinded(first, total, points), 0.0) == []
        assert server.awaited == ["party 1"]
        return
    with pytest.raises(ValueError, match="party 1"):
        server.receive("party 1", Blinded(first, total, points), 0.0)


@given(st.data())
def test_no_message_does_more_than_to_be_refused(data: st.DataObject) -> None:
    """Whatever its tensor is like."""
    shape = data.draw(st.lists(st.integers(0, 33), max_size=3))
    dtype = data.draw(st.sampled_from([torch.uint8, torch.int64, torch.float32, torch.bool]))
    tensor = torch.zeros(shape, dtype=dtype)
    first = data.draw(st.integers(-3, 3))
    kind = data.draw(st.sampled_from([Blinded, DoubleBlinded, Common]))
    message = (
        Blinded(first, 2, tensor)
        if kind is Blinded
        else DoubleBlinded(first, tensor)
        if kind is DoubleBlinded
        else Common(tensor)
    )
    for node, sender in ((holder(), "party 1"), (party(), "server")):
        with pytest.raises(ValueError, match=r"party 1|server"):
            node.receive(sender, message, 0.0)


# How often somebody may ask


def honest(message: Any) -> Any:
    return message


def test_a_party_that_asks_about_other_ids_is_refused_also_when_the_holder_starts_anew(
    tmp_path: Path,
) -> None:
    asked = tmp_path / "asked.json"
    first = holder(asks=AlignmentQueries(asked).ask)
    talk(first, party(IDS[:2]), honest)
    assert first.rows is not None
    # The same list, as after a crash of either side, is answered in the same way.
    again = holder(asks=AlignmentQueries(asked).ask)
    talk(again, party(IDS[:2]), honest)
    assert again.rows == first.rows
    for other in (party(IDS[2:4]), party(IDS[:2], number=7)):
        server = holder(asks=AlignmentQueries(asked).ask)
        with pytest.raises(ValueError, match="party 1 sends another list of ids"):
            talk(server, other, honest)
        assert server.rows is None


def test_a_holder_that_asks_about_other_ids_gets_no_answer(tmp_path: Path) -> None:
    asked = tmp_path / "asked.json"
    guesses = [[f"guess {number}"] for number in range(2)]
    for number, ids in enumerate(guesses):
        ((_, message),) = AlignedHolder("server", ["party 1"], ids, secret(5)).begin(0.0)
        site = party(asks=AlignmentQueries(asked).ask)
        if number == 0:
            assert any(
                isinstance(one, DoubleBlinded) for _, one in site.receive("server", message, 0.0)
            )
            continue
        with pytest.raises(ValueError, match="server sends another list of ids"):
            site.receive("server", message, 0.0)


def test_a_list_is_on_the_disk_before_it_is_answered(tmp_path: Path) -> None:
    asked = tmp_path / "asked.json"
    seen: list[bool] = []

    class Noting(AlignmentQueries):
        def ask(self, sender: str, digest: bytes) -> None:
            super().ask(sender, digest)
            seen.append(digest.hex() in asked.read_text())

    ((_, message),) = holder().begin(0.0)
    party(asks=Noting(asked).ask).receive("server", message, 0.0)
    assert seen == [True]


def test_a_part_of_a_list_is_not_answered(tmp_path: Path) -> None:
    """Otherwise a holder could stop in the middle of each list, and ask for ever."""
    site = party(asks=AlignmentQueries(tmp_path / "asked.json").ask)
    points = [SecretScalar(secret(0)).power(point_of(name)) for name in IDS]
    said = site.receive("server", Blinded(0, 6, tensor_of(points[:5])), 0.0)
    assert not any(isinstance(message, DoubleBlinded) for _, message in said)
    said = site.receive("server", Blinded(5, 6, tensor_of(points[5:])), 0.0)
    assert [len(message.points) for _, message in said if isinstance(message, DoubleBlinded)] == [6]


def test_more_than_one_list_is_answered_where_that_was_agreed_upon(tmp_path: Path) -> None:
    queries = AlignmentQueries(tmp_path / "asked.json", most=2)
    for number in range(2):
        queries.ask("party 1", bytes([number]))
    queries.ask("party 2", b"x")
    with pytest.raises(ValueError, match="party 1 sends another list"):
        queries.ask("party 1", b"more")


def test_the_secret_stays_the_same_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "align.pem"
    first = secret_in(path)
    assert secret_in(path) == first != secret_in(None)
    assert len(first) == 32
    assert path.stat().st_mode & 0o077 == 0
    assert first not in path.read_bytes()


def test_many_points_of_the_twist_are_found_whichever_they_are() -> None:
    draws = secrets.token_bytes(32)
    points = [point_of(f"id {number}") for number in range(40)]
    for number in (2, 3, 40):
        wrong = points[:]
        for place in range(number):
            wrong[place] = on_the_twist(int.from_bytes(draws, "little") + 1000 * place)
        with pytest.raises(ValueError, match="twist"):
            holder().receive("party 1", Blinded(0, 40, tensor_of(wrong)), 0.0)
