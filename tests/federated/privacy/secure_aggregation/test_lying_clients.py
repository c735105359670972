"""Clients that do not follow the protocol are lost by name, and never spoil a sum unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from secure_sums import (
    LENGTH,
    client,
    clients,
    context,
    run_all,
    run_stage,
    run_until,
    server,
    total,
    vector,
)
from torch import Tensor

from dure.federated.privacy.secure_aggregation.client import SecureSumClient
from dure.federated.privacy.secure_aggregation.cohort import (
    ADVERTISE,
    CONFIRM,
    MASK,
    SHARE,
    UNMASK,
    SumContext,
)
from dure.federated.privacy.secure_aggregation.messages import (
    Advertised,
    Confirmed,
    Masked,
    SealedSharePair,
    SecretShare,
    SharesForNeighbours,
    TooFewError,
    Unmasked,
    from_body,
    to_body,
)
from dure.federated.privacy.secure_aggregation.server import SecureSumServer

Change = Callable[[Any], Any]


def with_lies(
    of: SumContext,
    lies: dict[tuple[int, int], Change],
    *,
    signed: bool = False,
    lost: Any = None,
    machine: SecureSumServer | None = None,
) -> SecureSumServer:
    """A server after all stages. lies: by (client, stage), what its answer becomes."""
    kinds = {
        ADVERTISE: Advertised,
        SHARE: SharesForNeighbours,
        MASK: Masked,
        CONFIRM: Confirmed,
        UNMASK: Unmasked,
    }
    machine = machine or server(of, signed=signed)
    members = clients(of, signed=signed)
    while machine.stage is not None:
        for number, body in machine.ask().items():
            if number in (lost or {}).get(machine.stage, ()):
                continue
            answer, tensor = members[number].answer(machine.stage, body)
            lie = lies.get((number, machine.stage))
            if lie is not None:
                answer = to_body(lie(from_body(answer, kinds[machine.stage])))
            machine.take(number, answer, [] if tensor is None else [tensor])
        machine.close_stage()
    return machine


def sum_without(machine: SecureSumServer, of: SumContext, *, liar: int, there: bool) -> str:
    """Why the liar was lost, after a look at the sum, in which its vector is or is not."""
    summed, who = machine.result()
    assert who == [one for one in of.members if there or one != liar]
    assert torch.equal(summed, total(who))
    assert list(machine.lost) == list(machine.guilty) == [liar]
    return machine.lost[liar]


def other(**fields: Any) -> Change:
    return lambda message: msgspec.structs.replace(message, **fields)


# Keys

OTHERS_KEY = bytes(range(32))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"channel": bytes(32)}, "its keys are no keys"),
        ({"mask": b"\1" + bytes(31)}, "its keys are no keys"),
        ({"channel": OTHERS_KEY, "mask": OTHERS_KEY}, "its keys are not its own"),
        ({"signature": b"\1"}, "its signature is none"),
    ],
)
def test_keys_that_are_none_cost_their_client_its_place(fields: dict[str, bytes], why: str) -> None:
    of = context(6)
    machine = with_lies(of, {(13, ADVERTISE): other(**fields)})
    reason = sum_without(machine, of, liar=13, there=False)
    assert reason == f'at "advertise keys": {why}'


def test_who_advertises_the_keys_of_another_client_is_lost() -> None:
    of = context(6)
    first = server(of)
    keys = from_body(client(10, of).answer(ADVERTISE, first.ask()[10])[0], Advertised)
    machine = with_lies(of, {(13, ADVERTISE): lambda _: keys})
    assert "not its own" in sum_without(machine, of, liar=13, there=False)


@pytest.mark.parametrize("signature", [b"", bytes(64)])
def test_keys_that_the_roster_does_not_vouch_for_are_refused(signature: bytes) -> None:
    of = context(6)
    lies = {(13, ADVERTISE): other(signature=signature)}
    machine = with_lies(of, lies, signed=True)
    assert "not signed by its key in the roster" in sum_without(machine, of, liar=13, there=False)


def test_a_client_without_a_key_has_no_place_in_a_roster_s_sum() -> None:
    of = context(6)
    machine = server(of, signed=True)
    members = clients(of, signed=True)
    members[13] = client(13, of)
    summed, who = run_all(machine, members)
    assert 13 not in who
    assert torch.equal(summed, total(who))


def test_who_has_signed_another_list_of_survivors_is_lost_and_its_vector_stays() -> None:
    of = context(6)
    lies = {(13, CONFIRM): other(signature=bytes(64))}
    machine = with_lies(of, lies, signed=True)
    assert "not signed the list of survivors" in sum_without(machine, of, liar=13, there=True)


# Shares


def without_last(message: SharesForNeighbours) -> SharesForNeighbours:
    return SharesForNeighbours(message.commitment, message.shares[:-1])


def to_a_stranger(message: SharesForNeighbours) -> SharesForNeighbours:
    strange = SealedSharePair(99, message.shares[-1].box)
    return SharesForNeighbours(message.commitment, (*message.shares[:-1], strange))


def twice(message: SharesForNeighbours) -> SharesForNeighbours:
    return SharesForNeighbours(message.commitment, (*message.shares[:-1], message.shares[0]))


@pytest.mark.parametrize("lie", [without_last, to_a_stranger, twice])
def test_shares_for_others_than_all_neighbours_cost_a_client_its_place(lie: Change) -> None:
    of = context(6)
    machine = with_lies(of, {(13, SHARE): lie})
    assert "just its neighbours" in sum_without(machine, of, liar=13, there=False)


def spoilt(holders: int) -> Change:
    """Sealed shares of which so many do not open."""

    def change(message: SharesForNeighbours) -> SharesForNeighbours:
        boxes = [
            msgspec.structs.replace(one, box=bytes(len(one.box))) if at < holders else one
            for at, one in enumerate(message.shares)
        ]
        return SharesForNeighbours(message.commitment, tuple(boxes))

    return change


def otherwise_committed(holders: int) -> Change:
    """Shares of which so many are not those that were committed to."""

    def change(message: SharesForNeighbours) -> SharesForNeighbours:
        boxes = [
            msgspec.structs.replace(one, seed=bytes(32)) if at < holders else one
            for at, one in enumerate(message.shares)
        ]
        return SharesForNeighbours(message.commitment, tuple(boxes))

    return change


def test_some_shares_that_do_not_open_are_made_up_for_by_others() -> None:
    of = context(8, threshold=6)
    for lost in ({}, {MASK: [13]}):
        machine = with_lies(of, {(13, SHARE): spoilt(1)}, lost=lost)
        summed, who = machine.result()
        assert torch.equal(summed, total(who))
        assert who == [one for one in of.members if one != 13 or not lost]


@pytest.mark.parametrize("lost", [{}, {MASK: [13]}])
@pytest.mark.parametrize("lie", [spoilt, otherwise_committed])
def test_too_many_shares_that_do_not_fit_end_the_sum_before_anybody_unmasks(
    lie: Callable[[int], Change], lost: Any
) -> None:
    of = context(6)
    machine = server(of)
    with pytest.raises(TooFewError, match="have a share of client 13's secret, but 5 are needed"):
        with_lies(of, {(13, SHARE): lie(3)}, lost=lost, machine=machine)
    assert machine.stage == MASK
    assert list(machine.guilty) == [13]
    assert "do not open or fit its commitments, say 3 of the 6" in machine.guilty[13]


@settings(deadline=None, max_examples=30)
@given(
    st.integers(4, 9),
    st.sets(st.integers(0, 8)),
    st.integers(0, 8),
    st.sampled_from([MASK, UNMASK, 9]),
)
def test_nobody_honest_is_blamed_by_fewer_than_a_third_who_lie(
    n: int, lying: set[int], about: int, lies_at: int
) -> None:
    of = context(n)
    honest = of.members[about % n]
    liars = [one for one in of.members if one - 10 in {3 * at for at in lying} and one != honest]
    liars = liars[: (n - 1) // 3]

    def complains(message: Masked) -> Masked:
        return Masked((honest,))

    def withholds(message: Unmasked) -> Unmasked:
        return Unmasked(tuple(one for one in message.survivors if one.client != honest), ())

    lies: dict[tuple[int, int], Change] = {}
    for one in liars:
        if lies_at in (MASK, 9):
            lies[one, MASK] = complains
        if lies_at in (UNMASK, 9):
            lies[one, UNMASK] = withholds
    machine = server(of)
    with suppress(TooFewError):
        with_lies(of, lies, machine=machine)
        machine.result()
    assert set(machine.guilty) <= set(liars)


def test_two_who_lie_about_a_third_are_not_told_from_honest_ones() -> None:
    # Shares do not open for two of the three holders, says each of them: more than a third.
    of = context(3)
    lies: dict[tuple[int, int], Change] = {(one, MASK): lambda _: Masked((10,)) for one in (13, 16)}
    machine = server(of)
    with pytest.raises(TooFewError):
        with_lies(of, lies, machine=machine)
    assert set(machine.guilty) == {10}


@pytest.mark.parametrize("lost", [{}, {MASK: [13]}])
def test_shares_of_another_secret_than_was_advertised_end_the_sum(
    lost: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = context(6)
    machine = server(of)
    members = clients(of)
    divided = SecureSumClient._divided

    def otherwise(self: SecureSumClient, seed: bytes, holders: int) -> Any:
        return divided(self, bytes(32), holders)

    def another_key(self: SecureSumClient, seed: bytes, holders: int) -> Any:
        return [type(one)(one.seed, one.private) for one in divided(self, seed, holders)]

    run_until(SHARE, machine, members)
    lie = another_key if lost else otherwise
    with monkeypatch.context() as patched:
        patched.setattr(SecureSumClient, "_divided", lie)
        told = machine.ask()
        machine.take(13, *_sent(members[13], SHARE, told[13]))
    for number in of.members:
        if number != 13:
            machine.take(number, *_sent(members[number], SHARE, told[number]))
    machine.close_stage()
    with pytest.raises(
        TooFewError, match="the shares of client 13's secret do not give the advertised secret"
    ):
        run_all(machine, members, lost)
    assert list(machine.guilty) == [13]


def _sent(one: SecureSumClient, stage: int, body: bytes) -> tuple[bytes, list[Tensor]]:
    answer, tensor = one.answer(stage, body)
    return answer, [] if tensor is None else [tensor]


def test_a_commitment_to_another_mask_ends_the_sum() -> None:
    of = context(6)
    machine = with_lies(of, {(13, SHARE): other(commitment=bytes(32))})
    with pytest.raises(
        TooFewError, match="the shares of client 13's secret do not give the advertised secret"
    ):
        machine.result()
    assert list(machine.guilty) == [13]


# Shares that are given in the end


def wrong_pieces(piece: bytes) -> Change:
    def change(message: Unmasked) -> Unmasked:
        return Unmasked(
            tuple(SecretShare(one.client, piece) for one in message.survivors),
            tuple(SecretShare(one.client, piece) for one in message.lost),
        )

    return change


SMALL = bytes([1, 0, 0, 0] * 9)
"""A share like any other."""


@pytest.mark.parametrize("piece", [SMALL, b"\xff" * 36, bytes(35), b""])
@pytest.mark.parametrize("liar", [10, 22])
@pytest.mark.parametrize("lost", [{}, {MASK: [25]}])
def test_wrong_shares_are_found_and_whoever_gave_them(
    piece: bytes, liar: int, lost: dict[int, list[int]]
) -> None:
    of = context(8, threshold=6)
    machine = with_lies(of, {(liar, UNMASK): wrong_pieces(piece)}, lost=lost)
    summed, who = machine.result()
    assert torch.equal(summed, total(who))
    assert who == [one for one in of.members if one not in lost.get(MASK, ())]
    assert set(machine.lost) == {liar, *lost.get(MASK, ())}
    assert set(machine.guilty) == {liar}


def test_too_many_wrong_shares_end_the_sum_and_whoever_gave_them_is_to_blame() -> None:
    of = context(8, threshold=6)
    lies = {(liar, UNMASK): wrong_pieces(SMALL) for liar in (10, 16, 22)}
    machine = with_lies(of, lies)
    with pytest.raises(
        TooFewError, match="the shares of client 10's secret do not give the advertised secret"
    ):
        machine.result()
    assert set(machine.guilty) == {10, 16, 22}
    assert "share of client 10's secret is not the one that client 10 has" in machine.guilty[16]


def test_a_wrong_share_of_the_own_secret_spoils_nothing_and_its_giver_is_to_blame() -> None:
    of = context(8, threshold=6)

    def own(message: Unmasked) -> Unmasked:
        given = [
            SecretShare(one.client, SMALL) if one.client == 10 else one for one in message.survivors
        ]
        return Unmasked(tuple(given), message.lost)

    machine = with_lies(of, {(10, UNMASK): own})
    summed, who = machine.result()
    assert torch.equal(summed, total(who))
    assert list(machine.guilty) == [10]


def swapped(message: Unmasked) -> Unmasked:
    return Unmasked(message.lost, message.survivors)


def more(message: Unmasked) -> Unmasked:
    return Unmasked((*message.survivors, SecretShare(99, SMALL)), message.lost)


def doubled(message: Unmasked) -> Unmasked:
    return Unmasked((message.survivors[0], *message.survivors), message.lost)


@pytest.mark.parametrize("lie", [swapped, more, doubled])
def test_shares_of_others_than_were_asked_cost_a_client_its_answer(lie: Change) -> None:
    of = context(8, threshold=6)
    machine = with_lies(of, {(13, UNMASK): lie})
    assert "of clients it was not asked" in sum_without(machine, of, liar=13, there=True)


# Vectors


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [vector(1), vector(2)],
        [vector(1).long()],
        [vector(1).float()],
        [vector(1, LENGTH + 1)],
        [vector(1).view(1, -1)],
    ],
)
def test_vectors_of_another_form_cost_a_client_its_place(tensors: list[Tensor]) -> None:
    of = context(6)
    machine = server(of)
    members = clients(of)
    run_until(MASK, machine, members)
    told = machine.ask()
    answer, _ = members[13].answer(MASK, told[13])
    assert not machine.take(13, answer, tensors)
    # Nor does another attempt count.
    assert not machine.take(13, answer, [vector(13)])
    run_stage(machine, {**members}, lost=[13])
    run_all(machine, members)
    assert 'at "masked input": ' in sum_without(machine, of, liar=13, there=False)
