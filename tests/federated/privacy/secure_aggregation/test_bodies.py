"""What comes from a peer is data: all that is wrong is refused, and changes nothing."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from secure_sums import client, clients, context, run_all, run_stage, server, total

from dure.federated.privacy.secure_aggregation.cohort import (
    ADVERTISE,
    CONFIRM,
    MASK,
    SHARE,
    STAGES,
    UNMASK,
)
from dure.federated.privacy.secure_aggregation.messages import (
    MOST_BODY,
    Advertised,
    Body,
    Confirmed,
    Keys,
    Masked,
    Offer,
    ProtocolError,
    SharesForNeighbours,
    SharesFromNeighbours,
    Survivors,
    TooFewError,
    Unmask,
    Unmasked,
    from_body,
    to_body,
)

KINDS: list[type[Body]] = [
    Offer,
    Advertised,
    Keys,
    SharesForNeighbours,
    SharesFromNeighbours,
    Masked,
    Survivors,
    Confirmed,
    Unmask,
    Unmasked,
]


def nested() -> st.SearchStrategy[Any]:
    leaves = st.one_of(
        st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.binary(max_size=80)
    )
    names = st.sampled_from([kind.__name__ for kind in KINDS] + ["PublicKeys", "Sealed", "Share"])
    return st.recursive(st.one_of(leaves, names), lambda inner: st.lists(inner, max_size=12))


def bodies() -> st.SearchStrategy[bytes]:
    return st.one_of(st.binary(max_size=200), nested().map(msgspec.msgpack.encode))


@settings(deadline=None, max_examples=150)
@given(bodies(), st.sampled_from(KINDS))
def test_any_bytes_are_a_message_or_a_protocol_error(body: bytes, kind: type[Body]) -> None:
    error = None
    try:
        message = from_body(body, kind)
    except ProtocolError as raised:
        error = raised
    if error is None:
        assert isinstance(message, kind)
        return
    assert str(error) == f"the message is not a valid {kind.__name__}, which this stage requires"
    assert error.__cause__ is None
    assert error.__context__ is None


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\x92\xa9Survivors\xdd\x7f\xff\xff\xff",
        b"\x92\xa9Confirmed\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,
        bytes(MOST_BODY + 1),
        msgspec.msgpack.encode(["Survivors", list(range(4097))]),
        msgspec.msgpack.encode(["Survivors", [2**31]]),
        msgspec.msgpack.encode(["Survivors", [-1]]),
        msgspec.msgpack.encode(["Survivors", [1.0]]),
        msgspec.msgpack.encode(["Survivors", [True]]),
        msgspec.msgpack.encode(["Survivors", [], 1]),
        msgspec.msgpack.encode(["Survivors"]),
        to_body(Survivors(())) + b"\0",
        b"",
    ],
)
def test_what_is_too_long_too_deep_or_of_another_type_is_refused(body: bytes) -> None:
    for kind in (Survivors, Confirmed):
        with pytest.raises(ProtocolError):
            from_body(body, kind)


def test_a_message_that_is_too_long_is_not_even_read() -> None:
    long = to_body(Survivors(())) + bytes(MOST_BODY)
    with pytest.raises(
        ProtocolError, match=f"has {len(long)} bytes, but at most {MOST_BODY} are allowed"
    ):
        from_body(long, Survivors)


def mutated(draw: st.DrawFn, body: bytes) -> bytes:
    """A message with some bytes changed, left out, or put in."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(body)))
        what = draw(st.integers(0, 2))
        some = draw(st.binary(min_size=1, max_size=4))
        if what == 0:
            body = body[:at] + some + body[at + len(some) :]
        elif what == 1:
            body = body[:at] + body[at + len(some) :]
        else:
            body = body[:at] + some + body[at:]
    return body


@cache
def recorded(signed: bool) -> dict[int, tuple[dict[int, bytes], dict[int, bytes]]]:
    """What is said and answered at each stage of a sum that goes well."""
    of = context(4)
    machine = server(of, signed=signed)
    members = clients(of, signed=signed)
    said = {}
    while machine.stage is not None:
        stage = machine.stage
        asked = machine.ask()
        answers = run_stage(machine, members)
        said[stage] = (asked, {one: body for one, (body, _) in answers.items()})
    return said


@settings(deadline=None, max_examples=200)
@given(st.data(), st.booleans(), st.sampled_from(range(len(STAGES))))
def test_a_client_refuses_a_changed_message_and_goes_on_with_the_right_one(
    data: st.DataObject, signed: bool, stage: int
) -> None:
    said = recorded(signed)
    if stage not in said:
        return
    one = client(13, context(4), signed=signed)
    for before in (each for each in said if each < stage):
        one.answer(before, said[before][0][13])
    right = said[stage][0][13]
    body = data.draw(st.just(right).flatmap(st.composite(mutated)))
    try:
        answer, _ = one.answer(stage, body)
    except ProtocolError:
        assert one.answer(stage, right)[0] == said[stage][1][13]
        return
    # Taken is what says the same in other words (numbers of MessagePack have several lengths), or
    # has another seed of a graph that there is not, or one share that does not open.
    assert stage in (ADVERTISE, SHARE, MASK) or answer == said[stage][1][13]
    if signed and stage == UNMASK:
        assert from_body(body, Unmask) == from_body(right, Unmask)


@settings(deadline=None, max_examples=80)
@given(st.data(), st.booleans(), st.sampled_from(range(len(STAGES))))
def test_a_server_takes_no_harm_of_changed_answers(
    data: st.DataObject, signed: bool, stage: int
) -> None:
    said = recorded(signed)
    if stage not in said:
        return
    of = context(4)
    machine = server(of, signed=signed)
    members = clients(of, signed=signed)
    while machine.stage is not None:
        now = machine.stage
        for number, body in machine.ask().items():
            try:
                answer, tensor = members[number].answer(now, body)
            except ProtocolError:
                # It is told its own keys as they were changed. Nobody else minds.
                assert (number, stage, now) == (13, ADVERTISE, SHARE)
                continue
            if (number, now) == (13, stage):
                answer = data.draw(
                    st.one_of(bodies(), st.just(answer).flatmap(st.composite(mutated)))
                )
            machine.take(number, answer, [] if tensor is None else [tensor])
        try:
            machine.close_stage()
        except TooFewError:
            assert 13 in machine.lost
            return
    failure = ""
    try:
        summed, who = machine.result()
    except TooFewError as error:
        failure = str(error)
    if failure:
        assert "client 13's secret" in failure
        return
    assert torch.equal(summed, total(who))
    assert set(of.members) - set(who) <= {13}
    assert set(machine.lost) <= {13}


def test_what_is_said_is_read_as_it_was_written() -> None:
    of = context(4)
    for asked, answers in recorded(True).values():
        for body in (*asked.values(), *answers.values()):
            (kind,) = (
                one for one in KINDS if one.__struct_config__.tag == msgspec.msgpack.decode(body)[0]
            )
            assert to_body(from_body(body, kind)) == body
    assert from_body(to_body(Offer(of)), Offer).context == of
    assert {ADVERTISE, SHARE, MASK, CONFIRM, UNMASK} == set(recorded(True))
    assert run_all(server(of), clients(of))[1] == list(of.members)
