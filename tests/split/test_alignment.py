"""Entity alignment: whom all parties know, and what travels until they know it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.fleet.virtual_network import VirtualNetwork, nbytes
from dure.split.alignment import (
    AlignedHolder,
    AlignedParty,
    Blinded,
    Common,
    DoubleBlinded,
    SecretScalar,
    id_texts,
    message_bytes,
    point_of,
    points_of,
    tensor_of,
)

PRIME = 2**255 - 19
SMALL_ORDER = [
    0,
    1,
    PRIME - 1,
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
]
"""The u-coordinates of small order, on the curve and on its twist."""


def secret(number: int) -> bytes:
    return bytes([number + 1] * 32)


def everybody(
    ids: Sequence[Sequence[Any]], most: int = 4096
) -> tuple[AlignedHolder, list[AlignedParty]]:
    """The holder of the labels has the first of these."""
    names = [f"party {number}" for number in range(1, len(ids))]
    holder = AlignedHolder("server", names, ids[0], secret(0), most)
    parties = [
        AlignedParty(name, "server", own, secret(number), most)
        for number, (name, own) in enumerate(zip(names, ids[1:], strict=True), 1)
    ]
    return holder, parties


def aligned(
    ids: Sequence[Sequence[Any]], most: int = 4096, order: int | None = None
) -> tuple[list[list[Any]], list[tuple[str, str, Any]]]:
    """The common ids as each has them, and the messages: (from, to, what).

    order: a seed of the order in which messages arrive; None is that of sending.
    """
    holder, parties = everybody(ids, most)
    nodes = {"server": holder, **{one.name: one for one in parties}}
    under_way = [("server", to, message) for to, message in holder.begin(0.0)]
    said: list[tuple[str, str, Any]] = []
    draws = random.Random(order)
    while under_way:
        place = 0 if order is None else draws.randrange(len(under_way))
        sender, to, message = under_way.pop(place)
        said.append((sender, to, message))
        under_way += [(to, other, more) for other, more in nodes[to].receive(sender, message, 0.0)]
    found: list[list[Any]] = []
    for own, one in zip(ids, [holder, *parties], strict=True):
        assert one.rows is not None
        found.append([own[row] for row in one.rows])
    return found, said


sets = st.sets(st.integers(0, 12), max_size=9)


@given(st.lists(sets, min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 5))
@settings(max_examples=25)
def test_what_is_found_is_the_intersection_in_one_order_for_all(
    others: list[set[int]], most: int, order: int
) -> None:
    # 99 is with all, so that there is somebody.
    ids = [sorted(own | {99}, key=str) for own in others]
    found, _ = aligned(ids, most, order)
    assert set(found[0]) == set.intersection(*map(set, ids))
    assert len(set(found[0])) == len(found[0])
    assert all(own == found[0] for own in found)


def test_neither_the_order_of_arrival_nor_the_size_of_messages_matters() -> None:
    ids = [["ann", "bob", "cyd", "dan"], ["dan", "ann", "eve", "bob"], ["bob", "dan", "ann"]]
    first, _ = aligned(ids)
    for order in range(10):
        assert aligned(ids, most=1 + order % 3, order=order)[0] == first


def test_the_order_for_all_is_not_that_in_which_ids_are_kept() -> None:
    people = list(range(40))
    found, _ = aligned([people, people[::-1]])
    assert sorted(found[0]) == people
    assert found[0] not in (people, people[::-1])


def test_nothing_but_points_of_secrets_travels() -> None:
    ids = [[f"patient number {n}" for n in range(6)], [f"patient number {n}" for n in range(3, 9)]]
    _, said = aligned(ids)
    everyone = {name for own in ids for name in own}
    hashes = {point_of(name) for name in everyone}
    powers = {
        n: {SecretScalar(secret(n)).power(point_of(name)) for name in ids[n]}
        for n in range(len(ids))
    }
    for sender, _, message in said:
        own = 0 if sender == "server" else 1
        if isinstance(message, Blinded):
            assert set(points_of(sender, message.points)) <= powers[own]
        elif isinstance(message, DoubleBlinded):
            points = set(points_of(sender, message.points))
            assert not points & (hashes | powers[0] | powers[1])
        else:
            assert message.places.dtype == torch.int64
    # Sorted, so that places tell nothing of how ids are kept.
    for _, _, message in said:
        if isinstance(message, Blinded):
            points = points_of("", message.points)
            assert points == sorted(points)


def test_what_travels_is_what_is_stated() -> None:
    ids = [list(range(10)), list(range(4, 17)), list(range(8, 11))]
    found, said = aligned(ids, most=4)
    for number in (1, 2):
        name = f"party {number}"
        up = sum(nbytes(message) for sender, _, message in said if sender == name)
        down = sum(nbytes(message) for _, to, message in said if to == name)
        assert (up, down) == message_bytes(len(ids[number]), len(ids[0]), len(found[0]))
        assert (up, down) == (32 * (len(ids[number]) + 10), 32 * 10 + 8 * 2)


def test_ids_are_points_of_the_curve_and_not_of_its_twist() -> None:
    for number in range(50):
        u = int.from_bytes(point_of(f"id {number}"), "little")
        assert u < PRIME
        assert pow(u**3 + 486662 * u**2 + u, (PRIME - 1) // 2, PRIME) == 1
    assert len({point_of(str(number)) for number in range(50)}) == 50


def test_powers_commute_and_are_those_of_the_standard() -> None:
    # RFC 7748, section 5.2.
    scalar = bytes.fromhex("a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4")
    point = bytes.fromhex("e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c")
    result = bytes.fromhex("c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552")
    assert SecretScalar(scalar).power(point) == result
    one, other = SecretScalar(secret(0)), SecretScalar(secret(1))
    point = point_of("ann")
    assert one.power(other.power(point)) == other.power(one.power(point))


def bad(points: torch.Tensor) -> list[tuple[str, Any]]:
    return [("party 1", Blinded(0, 1, points)), ("server", Blinded(0, 1, points))]


@pytest.mark.parametrize("u", SMALL_ORDER)
def test_points_of_small_order_are_refused_by_the_name_of_their_sender(u: int) -> None:
    holder, (party,) = everybody([["ann"], ["ann"]])
    for sender, message in bad(tensor_of([u.to_bytes(32, "little")])):
        node = holder if sender == "party 1" else party
        with pytest.raises(ValueError, match=f"{sender} sends a point of small order"):
            node.receive(sender, message, 0.0)


@pytest.mark.parametrize(
    "points",
    [
        torch.zeros(1, 31, dtype=torch.uint8),
        torch.zeros(32, dtype=torch.uint8),
        torch.zeros(1, 32, dtype=torch.int64),
    ],
)
def test_what_are_no_points_is_refused_by_the_name_of_its_sender(points: torch.Tensor) -> None:
    holder, (party,) = everybody([["ann"], ["ann"]])
    for sender, message in bad(points):
        node = holder if sender == "party 1" else party
        with pytest.raises(ValueError, match=f"{sender} sends a tensor of .* but points have 32"):
            node.receive(sender, message, 0.0)
    with pytest.raises(ValueError, match="party 1 sends a tensor"):
        holder.receive("party 1", DoubleBlinded(0, points), 0.0)


def test_numbers_beyond_the_prime_are_no_points() -> None:
    holder, _ = everybody([["ann"], ["ann"]])
    for u in (PRIME, PRIME + 9, 2**255 + 9):
        with pytest.raises(ValueError, match="party 1 sends a point that is not a number below"):
            holder.receive("party 1", Blinded(0, 1, tensor_of([u.to_bytes(32, "little")])), 0.0)


def test_messages_that_make_no_sense_are_refused() -> None:
    holder, (party,) = everybody([["ann", "bob"], ["ann"]])
    point = tensor_of([point_of("ann")])
    with pytest.raises(ValueError, match="party 1 sends points 2 to 3 of 2"):
        holder.receive("party 1", DoubleBlinded(2, point), 0.0)
    with pytest.raises(ValueError, match="server cannot process Common from party 1"):
        holder.receive("party 1", Common(torch.tensor([0])), 0.0)
    with pytest.raises(ValueError, match="server cannot process Blinded from party 7"):
        holder.receive("party 7", Blinded(0, 1, point), 0.0)
    with pytest.raises(ValueError, match="server sends the common ids too early"):
        party.receive("server", Common(torch.tensor([0])), 0.0)
    party.receive("server", Blinded(0, 1, point), 0.0)
    for places in ([1], [-1], [0, 0]):
        with pytest.raises(ValueError, match="server sends places that party 1 does not have"):
            party.receive("server", Common(torch.tensor(places)), 0.0)
    for wrong in (torch.tensor([[0]]), torch.tensor([0.0]), torch.tensor([]).long()):
        with pytest.raises(ValueError, match="server sends places as"):
            party.receive("server", Common(wrong), 0.0)
    party.receive("server", Common(torch.tensor([0])), 0.0)
    with pytest.raises(ValueError, match="server sends the common ids too early"):
        party.receive("server", Common(torch.tensor([0])), 0.0)
    holder.receive("party 1", Blinded(0, 2, point), 0.0)
    with pytest.raises(ValueError, match="party 1 sends a point twice"):
        holder.receive("party 1", Blinded(1, 2, point), 0.0)
    with pytest.raises(ValueError, match="party 1 announced 2 ids, and then 3"):
        holder.receive("party 1", Blinded(1, 3, tensor_of([point_of("eve")])), 0.0)


def test_ids_name_one_person_each() -> None:
    assert id_texts([3, "x", b"y"]) == ["3", "x", "y"]
    with pytest.raises(ValueError, match="the id '3' occurs twice"):
        id_texts([3, "3"])
    with pytest.raises(ValueError, match="party 1 has no ids"):
        everybody([["ann"], []])


def test_nobody_who_is_with_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="no id is common to all parties"):
        aligned([["ann"], ["Ann"]])


def test_messages_that_are_late_or_come_twice_change_nothing() -> None:
    def fate(sender: str, to: str, message: Any, now: float) -> Sequence[float]:
        said.append(message)
        late = float(int(now * 7 + len(to) + nbytes(message)) % 3)
        # What is to be raised is raised again; the answer is the same.
        return (late, late + 1.5) if isinstance(message, DoubleBlinded) else (late,)

    said: list[Any] = []
    ids = [list(range(9)), list(range(3, 12))]
    holder, (party,) = everybody(ids, most=2)
    network = VirtualNetwork(fate)
    network.add("server", holder)
    network.add("party 1", party)
    network.send("server", holder.begin(0.0))
    # Until nothing is said any more.
    network.run(lambda: False, math.inf)
    assert holder.rows is not None
    assert party.rows is not None
    assert [ids[0][row] for row in holder.rows] == [ids[1][row] for row in party.rows]
    assert {ids[0][row] for row in holder.rows} == set(range(3, 9))
    # It is found once, and told once.
    assert sum(isinstance(message, Common) for message in said) == 1
    late = next(message for message in said if isinstance(message, DoubleBlinded))
    assert holder.receive("party 1", late, 0.0) == []
