"""Servers that do not follow the protocol learn no vector, and clients say what was wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from secure_sums import (
    client,
    clients,
    context,
    identity,
    roster,
    run_all,
    run_stage,
    run_until,
    server,
    total,
)

from dure.federated.privacy.secure_aggregation.client import SecureSumClient
from dure.federated.privacy.secure_aggregation.cohort import (
    ADVERTISE,
    CONFIRM,
    MASK,
    SHARE,
    UNMASK,
    SumContext,
    bounds,
)
from dure.federated.privacy.secure_aggregation.messages import (
    Advertised,
    Confirmed,
    Keys,
    Offer,
    ProtocolError,
    PublicKeys,
    SharesFromNeighbours,
    Survivors,
    SurvivorSignature,
    TooFewError,
    Unmask,
    Unmasked,
    context_of,
    from_body,
    to_body,
)
from dure.federated.privacy.secure_aggregation.server import SecureSumServer
from dure.federated.privacy.secure_aggregation.settings import (
    SecureAggregation,
    SecureAggregationPlus,
)
from dure.randomness.secret import Secret


def at(
    stage: int, *, signed: bool = False, n: int = 6, **others: Any
) -> tuple[SecureSumServer, Any]:
    """A server and clients before a stage."""
    of = context(n, **others)
    machine = server(of, signed=signed)
    members = clients(of, signed=signed)
    run_until(stage, machine, members)
    return machine, members


def refused(one: SecureSumClient, stage: int, body: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why) as raised:
        one.answer(stage, body)
    assert str(raised.value).count(". ") == 0  # one sentence


# Both shares of a client


def test_both_shares_of_a_client_are_never_handed_out() -> None:
    machine, members = at(UNMASK)
    one = members[10]
    body = machine.ask()[10]
    first = one.answer(UNMASK, body)
    assert one.answer(UNMASK, body) == first
    without = to_body(Unmask((10, 13, 16, 19, 22)))
    refused(one, UNMASK, without, "twice, with different content")
    assert one.answer(UNMASK, body) == first


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.lists(st.sampled_from([10, 13, 16, 19, 22, 25]), max_size=8),
            st.sets(st.sampled_from([10, 13, 16, 19, 22, 25]), min_size=4).map(sorted),
        ),
        max_size=6,
    )
)
def test_no_series_of_requests_gets_both_shares_of_anybody(lists: list[list[int]]) -> None:
    _, members = at(UNMASK)
    seeds: set[int] = set()
    privates: set[int] = set()
    for survivors in lists:
        try:
            body, _ = members[10].answer(UNMASK, to_body(Unmask(tuple(survivors))))
        except ProtocolError:
            continue
        answer = from_body(body, Unmasked)
        seeds |= {one.client for one in answer.survivors}
        privates |= {one.client for one in answer.lost}
    assert not seeds & privates
    assert 10 not in privates


def test_a_neighbour_cannot_be_named_both_alive_and_dead() -> None:
    _, members = at(UNMASK)
    both = msgspec.msgpack.encode(["Unmask", [10, 13, 16, 19, 22, 25], [13]])
    refused(members[10], UNMASK, both, "is not a valid Unmask, which this stage requires")
    refused(members[10], UNMASK, to_body(Unmask((10, 13, 13, 16, 19, 22))), "twice, out of order")
    refused(members[10], UNMASK, to_body(Unmask((13, 10, 16, 19, 22))), "twice, out of order")


def test_shares_are_not_given_before_the_vector_and_not_after_another_stage() -> None:
    machine, members = at(MASK)
    everybody = to_body(Unmask((10, 13, 16, 19, 22, 25)))
    refused(members[10], UNMASK, everybody, 'asks for "unmask", but the next stage is "masked inp')
    run_stage(machine, members)
    assert members[10].answer(UNMASK, machine.ask()[10])
    refused(members[10], MASK, b"", "twice, with different content")


# Survivors


@pytest.mark.parametrize(
    ("survivors", "why"),
    [
        ((13, 16, 19, 22, 25), "client 10 has sent its vector, but the server lists it as"),
        ((10, 13, 16, 19), "4 clients have survived, but at least 5 are needed"),
        ((10, 13, 16, 19, 22, 28), "of another sum"),
        ((), "client 10 has sent its vector"),
    ],
)
def test_survivors_that_cannot_be_are_refused(survivors: tuple[int, ...], why: str) -> None:
    _, members = at(UNMASK)
    refused(members[10], UNMASK, to_body(Unmask(survivors)), why)
    _, members = at(CONFIRM, signed=True)
    refused(members[10], CONFIRM, to_body(Survivors(survivors)), why)


def test_who_has_no_masks_with_a_client_cannot_survive_for_it() -> None:
    of = context(6)
    machine = server(of)
    members = clients(of)
    run_until(UNMASK, machine, members, {SHARE: [13]})
    refused(members[10], UNMASK, to_body(Unmask(of.members)), "client 13 is listed as a survivor")


def test_two_halves_that_are_told_different_survivors_unmask_nobody() -> None:
    _, members = at(CONFIRM, signed=True)
    lists = [(10, 13, 16, 19, 22), (10, 13, 16, 19, 22, 25)]
    told = {one: lists[one % 2] for one in members if one != 25}
    signatures = {
        one: from_body(
            members[one].answer(CONFIRM, to_body(Survivors(told[one])))[0], Confirmed
        ).signature
        for one in told
    }
    signed = tuple(SurvivorSignature(one, signatures[one]) for one in sorted(told))
    for one in told:
        why = "has not signed these survivors: the server has sent it another list"
        refused(members[one], UNMASK, to_body(Unmask(told[one], signed)), why)
        other = lists[1 - one % 2]
        refused(
            members[one],
            UNMASK,
            to_body(Unmask(other, signed)),
            "differs from the list that this client",
        )
        refused(members[one], CONFIRM, to_body(Survivors(other)), "twice, with different content")
        own = tuple(each for each in signed if told[each.client] == told[one])
        refused(members[one], UNMASK, to_body(Unmask(told[one], own)), "signed the survivors, but")


def test_without_signatures_two_lists_do_not_give_enough_shares_of_both_kinds() -> None:
    _, members = at(UNMASK)
    everybody = (10, 13, 16, 19, 22, 25)
    seeds = 0
    privates = 0
    for one in members:
        alive = one in (10, 13, 25)
        body = to_body(Unmask(everybody if alive else everybody[:-1]))
        answer = from_body(members[one].answer(UNMASK, body)[0], Unmasked)
        seeds += 25 in [share.client for share in answer.survivors]
        privates += 25 in [share.client for share in answer.lost]
    assert (seeds, privates) == (3, 3)
    assert min(seeds, privates) < context(6).threshold


def test_signatures_of_survivors_are_needed_and_counted_once() -> None:
    machine, members = at(UNMASK, signed=True)
    message = from_body(machine.ask()[10], Unmask)
    survivors = message.survivors
    good = message.signatures
    cases: list[tuple[Sequence[SurvivorSignature], str]] = [
        ((), "0 clients have signed the survivors"),
        ((good[0],) * 6, "twice, out of order"),
        ((*good[:5], SurvivorSignature(25, bytes(64))), "client 25 has not signed"),
        ((*good[:5], SurvivorSignature(25, good[0].signature)), "client 25 has not signed"),
        ((*good[:5], SurvivorSignature(25, b"")), "client 25 has not signed"),
        ((*good[:5], SurvivorSignature(28, good[5].signature)), "or of lost clients"),
    ]
    for signatures, why in cases:
        body = to_body(Unmask(survivors, tuple(signatures)))
        refused(members[10], UNMASK, body, why)
    run_stage(machine, members)
    assert torch.equal(machine.result()[0], total(survivors))


# Other models, lists, thresholds, lengths


OTHER = {
    "run": "other",
    "round": 4,
    "attempt": 1,
    "group": 1,
    "model": "b" * 64,
    "length": 8,
    "quantisation": "range 2, 22 bits",
    "members": (10, 13, 16, 19, 22, 28),
    "threshold": 6,
    "fewest": 5,
}


@pytest.mark.parametrize("field", OTHER)
def test_a_client_names_what_the_server_says_differently(field: str) -> None:
    own = context(6)
    lie = msgspec.structs.replace(own, **{field: OTHER[field]})
    refused(
        client(10, own),
        ADVERTISE,
        to_body(Offer(lie)),
        f"has a different {field} than client 10 expects",
    )


FEW = SecureAggregationPlus(minimum=2)
ALL = SecureAggregation(threshold=0.7, minimum=5)


@pytest.mark.parametrize("field", [field for field in OTHER if field not in ("attempt", "group")])
def test_what_a_client_knows_itself_it_does_not_take_from_the_server(field: str) -> None:
    of = context(6, **bounds(ALL, 6)._asdict())
    lie = OTHER[field] if field != "fewest" else 2
    said = to_body(Offer(msgspec.structs.replace(of, **{field: lie})))
    known = {name: getattr(of, name) for name in ("run", "round", "model", "length")}
    own = context_of(said, ALL, **known, quantisation=of.quantisation)
    if field == "members":
        assert own == msgspec.structs.replace(of, members=lie)
        return
    assert own == of
    refused(client(10, own), ADVERTISE, said, f"has a different {field} than client 10")


def test_a_client_plans_the_graph_itself() -> None:
    of = context(60, **bounds(FEW, 60)._asdict())
    assert not of.complete
    known = {name: getattr(of, name) for name in ("run", "round", "model", "length")}
    for lie in ({"degree": 2, "threshold": 2}, {"fewest": 2}, {"threshold": of.threshold - 1}):
        said = to_body(Offer(msgspec.structs.replace(of, **lie)))
        own = context_of(said, FEW, **known, quantisation=of.quantisation)
        refused(client(10, own), ADVERTISE, said, f"a different ({'|'.join(lie)}) than client 10")
    too_many = SecureAggregationPlus(corrupt=0.6, drop_out=0.5)
    with pytest.raises(ProtocolError, match="are invalid: of 60 members 36 may be corrupt"):
        context_of(to_body(Offer(of)), too_many, **known, quantisation=of.quantisation)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("field", ["model", "length", "threshold", "quantisation", "round"])
@pytest.mark.parametrize("others", [1, 3])
def test_a_server_that_tells_clients_different_things_gets_no_sum(
    signed: bool, field: str, others: int
) -> None:
    of = context(6)
    lie = msgspec.structs.replace(of, **{field: OTHER[field]})
    machine = server(of)
    members = clients(of, signed=signed)
    for number in of.members[:others]:
        members[number] = client(number, lie, signed=signed)

    def told(number: int, body: bytes) -> bytes:
        return to_body(Offer(lie)) if number in of.members[:others] else body

    run_stage(machine, members, tampered=told)
    why = "has not signed its keys for this sum" if signed else "another model, list, length or"
    with pytest.raises((ProtocolError, TooFewError), match=why):
        run_all(machine, members)


def test_one_who_was_told_of_another_model_is_no_part_of_a_sum_of_the_others() -> None:
    # Enough others are there to go on: but nobody can take the masks off that they have with it.
    of = context(6)
    lie = msgspec.structs.replace(of, model="b" * 64)
    machine = server(of)
    members = clients(of)
    members[10] = client(10, lie)
    told = {10: to_body(Offer(lie))}
    run_stage(machine, members, tampered=lambda number, body: told.get(number, body))
    run_stage(machine, members)
    refused(members[10], MASK, machine.ask()[10], "another model, list, length or threshold")
    # Nobody has unmasked anything: all can be in another sum of this model.
    with pytest.raises(TooFewError, match="0 of 6 have a share of client 10's secret, but 5 are"):
        run_stage(machine, members, lost=[10])


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ({"threshold": 4}, "the threshold is 4 of 6 members, but it has to be more than 2/3"),
        ({"threshold": 7}, "at most all"),
        ({"degree": 4, "threshold": 5}, "the threshold is 5 of 4 neighbours"),
        ({"degree": 3, "threshold": 2}, "has 3 neighbours, but the number has to be even"),
        ({"degree": 4, "threshold": 1}, "the threshold is 1 of 4 neighbours"),
        ({"degree": 6}, "6 neighbours are impossible among 6"),
        ({"degree": 0}, "0 neighbours"),
        ({"length": 0}, "no elements"),
        ({"fewest": 7}, "a sum needs 7 clients"),
        ({"members": (10, 10, 13, 16, 19, 22)}, "twice or out of order"),
        ({"members": (13, 10, 16, 19, 22, 25)}, "twice or out of order"),
        ({"members": (13, 16, 19, 22, 25, 28)}, "client 10 is not among the members"),
        ({"members": (10,), "degree": 0, "threshold": 1}, "1 members, but this client takes"),
    ],
)
def test_a_sum_that_protects_nobody_is_refused_on_both_sides(
    others: dict[str, Any], why: str
) -> None:
    of = context(6, **others)
    refused(client(10, of), ADVERTISE, to_body(Offer(of)), why)
    if 10 in of.members:
        with pytest.raises(ValueError, match=why.replace("but this client takes", "but a sum has")):
            server(of)


def test_sums_of_fewer_clients_than_a_site_allows_are_refused() -> None:
    of = context(6)
    why = "6 members, but this client takes part only in sums of 7 or more"
    refused(client(10, of, minimum=7), ADVERTISE, to_body(Offer(of)), why)
    machine = server(of)
    members = clients(of, minimum=6)
    run_until(UNMASK, machine, members, {MASK: [25]})
    refused(members[10], UNMASK, machine.ask()[10], "5 clients that have survived, but this client")
    with pytest.raises(ProtocolError, match="5 clients that have keys"):
        run_all(server(of), clients(of, minimum=6), {ADVERTISE: [25]})


# Keys


def with_keys(machine: SecureSumServer, change: Callable[[list[PublicKeys]], None]) -> bytes:
    """The message of keys for client 10, changed."""
    told = from_body(machine.ask()[10], Keys)
    keys = list(told.keys)
    change(keys)
    return to_body(Keys(told.present, told.seed, tuple(keys)))


def others_keys(number: int = 99) -> Advertised:
    of = context(2, members=(number, number + 1))
    return from_body(client(number, of).answer(ADVERTISE, to_body(Offer(of)))[0], Advertised)


def swapped(place: int, signature: bool = True) -> Callable[[list[PublicKeys]], None]:
    def change(keys: list[PublicKeys]) -> None:
        theirs = others_keys()
        was = keys[place]
        kept = was.signature if signature else b""
        keys[place] = PublicKeys(was.client, theirs.channel, theirs.mask, kept)

    return change


def test_keys_that_were_swapped_or_are_not_signed_are_refused() -> None:
    machine, members = at(SHARE, signed=True)
    why = "client 19 has not signed its keys"
    refused(members[10], SHARE, with_keys(machine, swapped(3)), why)
    refused(members[10], SHARE, with_keys(machine, swapped(3, signature=False)), why)

    def unsigned(keys: list[PublicKeys]) -> None:
        keys[3] = msgspec.structs.replace(keys[3], signature=b"")

    def half(keys: list[PublicKeys]) -> None:
        keys[3] = msgspec.structs.replace(keys[3], mask=others_keys().mask)

    refused(members[10], SHARE, with_keys(machine, unsigned), why)
    refused(members[10], SHARE, with_keys(machine, half), why)
    summed, who = run_all(machine, members)
    assert torch.equal(summed, total(who))


def test_the_client_s_own_keys_have_to_be_its_own() -> None:
    machine, members = at(SHARE)
    why = "client 10 wrong keys as its own"
    refused(members[10], SHARE, with_keys(machine, swapped(0)), why)


def test_one_key_for_two_clients_or_for_two_purposes_is_refused() -> None:
    machine, members = at(SHARE)

    def same(keys: list[PublicKeys]) -> None:
        keys[3] = msgspec.structs.replace(keys[2], client=keys[3].client)

    def one_of_both(keys: list[PublicKeys]) -> None:
        keys[3] = msgspec.structs.replace(keys[3], mask=keys[3].channel)

    def own(keys: list[PublicKeys]) -> None:
        keys[3] = msgspec.structs.replace(keys[3], channel=keys[0].channel)

    for change in (same, one_of_both, own):
        refused(members[10], SHARE, with_keys(machine, change), "one key for two clients, or")


@pytest.mark.parametrize("point", [bytes(32), b"\1" + bytes(31)])
def test_a_key_that_the_server_would_know_the_secret_of_is_refused(point: bytes) -> None:
    machine, members = at(SHARE)
    for field in ("channel", "mask"):

        def low(keys: list[PublicKeys], field: str = field) -> None:
            keys[3] = msgspec.structs.replace(keys[3], **{field: point})

        refused(members[10], SHARE, with_keys(machine, low), "an invalid key of client 19")


def test_lists_of_keys_that_are_not_those_of_the_neighbours_are_refused() -> None:
    machine, members = at(SHARE)
    told = from_body(machine.ask()[10], Keys)
    cases = [
        (told.present, told.keys[1:], "clients that are not the client's neighbours"),
        (told.present, (*told.keys, told.keys[5]), "clients that are not the client's neighbours"),
        (told.present, told.keys[::-1], "clients that are not the client's neighbours"),
        (told.present[1:], told.keys[1:], "no keys for client 10"),
        (told.present[:4], told.keys[:4], "4 clients have keys, but at least 5 are needed"),
        ((*told.present, 28), told.keys, "of another sum"),
        (told.present[::-1], told.keys[::-1], "out of order"),
    ]
    for present, keys, why in cases:
        refused(members[10], SHARE, to_body(Keys(present, told.seed, keys)), why)


def test_a_server_does_not_choose_the_neighbours() -> None:
    machine, members = at(SHARE, n=20, degree=6, threshold=4)
    for number, body in machine.ask().items():
        told = from_body(body, Keys)
        assert len(told.keys) == 7
        other = to_body(Keys(told.present, bytes(32), told.keys))
        refused(members[number], SHARE, other, "clients that are not the client's neighbours")


def test_too_few_who_hold_a_client_s_shares_are_refused_whoever_else_is_there() -> None:
    machine, members = at(MASK, n=20, degree=6, threshold=4)
    shares = from_body(machine.ask()[10], SharesFromNeighbours).shares
    why = "3 of the holders of shares of client 10 have shared keys, but at least 4 are needed"
    refused(members[10], MASK, to_body(SharesFromNeighbours(shares[:2])), why)
    run_stage(machine, members)
    everybody = from_body(machine.ask()[10], Unmask).survivors
    gone = {one.client for one in shares[:4]}
    few = tuple(one for one in everybody if one not in gone)
    why = "3 of the holders of shares of client 10 have survived, but at least 4 are needed"
    refused(members[10], UNMASK, to_body(Unmask(few)), why)


# What was said before


def answers_of(of: SumContext, *, signed: bool) -> dict[int, dict[int, bytes]]:
    """All messages of a server, by stage and client."""
    machine = server(of, signed=signed)
    members = {
        one: client(one, of, signed=signed, secret=Secret.simulated(1000 + one))
        for one in of.members
    }
    said = {}
    while machine.stage is not None:
        said[machine.stage] = machine.ask()
        run_stage(machine, members)
    return said


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("field", ["run", "round", "attempt", "group", "model"])
def test_messages_of_another_sum_are_refused_at_every_stage(signed: bool, field: str) -> None:
    before = answers_of(context(6, **{field: OTHER[field]}), signed=signed)
    of = context(6)
    machine = server(of, signed=signed)
    members = clients(of, signed=signed)
    while machine.stage is not None:
        # A list of survivors without signatures says nothing of its sum: it is the same list.
        if machine.stage not in (CONFIRM, UNMASK) or (signed and machine.stage == UNMASK):
            for number in of.members:
                if before[machine.stage][number] == machine.ask()[number]:
                    continue
                with pytest.raises(ProtocolError):
                    members[number].answer(machine.stage, before[machine.stage][number])
        run_stage(machine, members)
    summed, who = machine.result()
    assert torch.equal(summed, total(who))


def test_shares_for_one_client_do_not_open_for_another_nor_under_another_name() -> None:
    machine, members = at(MASK)
    mine = machine.ask()[10]
    refused(members[13], MASK, mine, "of clients that are not neighbours")
    shares = from_body(mine, SharesFromNeighbours).shares
    turned = [
        msgspec.structs.replace(one, box=other.box)
        for one, other in zip(shares, [*shares[1:], shares[0]], strict=True)
    ]
    refused(
        members[10],
        MASK,
        to_body(SharesFromNeighbours(tuple(turned))),
        "the shares of 1 clients can be decrypted",
    )
    refused(
        members[10],
        MASK,
        to_body(SharesFromNeighbours(shares[:3])),
        "4 clients have shared keys, but at least 5",
    )
    refused(members[10], MASK, to_body(SharesFromNeighbours(shares[::-1])), "out of order")


def test_stages_go_in_order_and_each_is_answered_once() -> None:
    machine, members = at(ADVERTISE)
    one = members[10]
    for stage in (SHARE, MASK, CONFIRM, UNMASK, 5, -1):
        refused(one, stage, b"", 'the next stage is "advertise keys"')
    first = one.answer(ADVERTISE, machine.ask()[10])
    assert one.answer(ADVERTISE, machine.ask()[10]) == first
    other = to_body(Offer(context(7)))
    refused(one, ADVERTISE, other, '"advertise keys" twice, with different content')
    run_stage(machine, members)
    run_all(machine, members)
    refused(one, CONFIRM, b"", "the next stage is none")


def test_a_masked_vector_is_not_given_again_after_the_next_stage() -> None:
    machine, members = at(MASK)
    body = machine.ask()[10]
    run_stage(machine, members)
    run_stage(machine, members)
    refused(members[10], MASK, body, "again after a later stage")


def test_a_roster_without_an_own_key_or_with_another_one_is_refused() -> None:
    of = context(6)
    with pytest.raises(ValueError, match="a different key for client 10"):
        client(10, of, roster=roster(of.members))
    with pytest.raises(ValueError, match="a different key for client 10"):
        client(10, of, roster=roster(of.members), identity=identity(11))


def test_a_server_that_wants_no_signatures_gets_nothing_of_clients_with_a_roster() -> None:
    of = context(6)
    machine = server(of)
    members = clients(of, signed=True)
    for stage in (ADVERTISE, SHARE, MASK):
        assert machine.stage == stage
        run_stage(machine, members)
    refused(members[10], UNMASK, machine.ask()[10], 'the next stage is "consistency check"')
