"""Every field of every message of a secure sum, changed: a refusal by name, and nothing else.

Fields are changed where they stand, and not bytes alone: numbers, texts, lengths, order and counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sums_of_clients import SETTINGS, Averages, Site, asked_of, hand_out
from torch import Tensor

from dure.federated.aggregate.aggregator import Groups
from dure.federated.privacy.secure_aggregation.cohort import MASK, MOST_MEMBERS, STAGES, UNMASK
from dure.federated.privacy.secure_aggregation.messages import (
    SealedSharePair,
    SharesForNeighbours,
    SharesFromNeighbours,
    to_body,
)
from dure.federated.privacy.secure_aggregation.rounds import SecureRounds, SecureSums
from dure.protocol.messages import ProtocolAnswer, ProtocolStep, WantedTensor
from dure.randomness.secret import Secret
from dure.wire.requests import MOST_STEP_BYTES

N = 4
MODEL = [torch.tensor([0.5, -1.0, 2.0])]
SUMS = SecureSums(SETTINGS, "run")


def whole(count: int, turn: Any) -> Sequence[Sequence[int]]:
    return [range(count)]


def leaves(message: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Where everything of a message stands, lists too."""
    if path:
        yield path
    if isinstance(message, list):
        for at, one in enumerate(message):
            yield from leaves(one, (*path, at))


def changed(draw: st.DrawFn, message: Any) -> bytes:
    """The message, as bytes, with one field changed."""
    path = draw(st.sampled_from(list(leaves(message))))
    holder = message
    for at in path[:-1]:
        holder = holder[at]
    was = holder[path[-1]]
    how = draw(st.sampled_from(["other", "less", "more", "twice", "gone"]))
    if how == "gone":
        del holder[path[-1]]
    elif how == "twice":
        holder.insert(path[-1], was)
    elif isinstance(was, int):
        holder[path[-1]] = draw(st.sampled_from([was - 1, was + 1, -1, 2**31, 2**63, 0]))
    elif isinstance(was, bytes):
        flipped = bytes([was[0] ^ 1]) + was[1:] if was else b"\1"
        others = [was[:-1], was + b"\0", bytes(len(was)), b"", flipped]
        holder[path[-1]] = draw(st.sampled_from(others))
    elif isinstance(was, list):
        holder[path[-1]] = draw(st.sampled_from([was[:-1], was + was[-1:], was[::-1], [], None]))
    else:
        holder[path[-1]] = draw(st.sampled_from(["", "other", None, 1.5, float("nan"), [was]]))
    return msgspec.msgpack.encode(message)


def site(number: int) -> Site:
    """A client whose secrets are the same each time."""
    one = Site(number, SUMS, None, None, None)
    one.holding.secret = Secret.simulated(number)
    return one


def sites() -> dict[int, Site]:
    made = {number: site(number) for number in range(N)}
    hand_out(made, 100, MODEL)
    return made


def asked() -> dict[int, Any]:
    return {100 + number: asked_of(number, 100 + number, MODEL) for number in range(N)}


Change = Callable[[ProtocolStep, ProtocolAnswer | None], ProtocolAnswer | None]


def sums_of(there: dict[int, Site], change: Change) -> dict[str, Any]:
    """What a server makes of what clients answer. change: what becomes of an answer."""

    def exchange(says: Sequence[ProtocolStep]) -> Iterator[ProtocolAnswer]:
        for say in says:
            answer = change(say, there[say.client].holding.answer(say))
            if answer is not None:
                yield answer

    groups: Groups = whole
    return SecureRounds(SUMS, groups, Secret.simulated(0)).sums_of(asked(), (), exchange)


@cache
def recorded() -> list[ProtocolStep]:
    """All that a server says to client 1 in a sum that goes well."""
    said: list[ProtocolStep] = []

    def noted(say: ProtocolStep, answer: ProtocolAnswer | None) -> ProtocolAnswer | None:
        if say.client == 1:
            said.append(say)
        return answer

    assert len(sums_of(sites(), noted)["sums"][0]["tickets"]) == N
    return said


@settings(max_examples=100)
@given(st.data(), st.sampled_from([0, 1, 2, 3]))
def test_a_client_refuses_each_changed_field_by_name_and_raises_nothing(
    data: st.DataObject, place: int
) -> None:
    one = site(1)
    hand_out({1: one}, 100, MODEL)
    said = recorded()
    for say in said[:place]:
        one.holding.answer(say)
    right = said[place]
    body = data.draw(st.composite(lambda draw: changed(draw, msgspec.msgpack.decode(right.body)))())
    before = len(one.refused)
    answer = one.holding.answer(ProtocolStep(right.ticket, 1, right.stage, body, right.wants))
    assert answer is not None or len(one.refused) == before + 1
    if answer is None:
        [why] = one.refused[before:]
        assert why
        assert "\n" not in why


@settings(max_examples=100)
@given(
    st.integers(-3, 9) | st.integers(-(2**63), 2**63),
    st.integers(-3, 200),
    st.integers(-3, 9),
    st.binary(max_size=30),
    st.lists(
        st.builds(WantedTensor, st.text(max_size=5), st.tuples(st.integers(0, 2**60))), max_size=2
    ),
)
def test_a_client_answers_nothing_to_what_is_no_step_of_its_sum(
    stage: int, ticket: int, client: int, body: bytes, wants: list[WantedTensor]
) -> None:
    one = site(1)
    hand_out({1: one}, 100, MODEL)
    assert one.holding.answer(ProtocolStep(ticket, client, stage, body, wants)) is None


@settings(max_examples=100)
@given(st.data(), st.sampled_from([0, 1, 2, UNMASK]), st.integers(0, N - 1))
def test_a_server_loses_who_changes_a_field_by_name_and_sums_the_others(
    data: st.DataObject, stage: int, liar: int
) -> None:
    tampered: list[bool] = []

    def change(say: ProtocolStep, answer: ProtocolAnswer | None) -> ProtocolAnswer | None:
        if answer is None or (say.stage, say.client) != (stage, liar) or tampered:
            return answer
        tampered.append(True)
        message = msgspec.msgpack.decode(answer.body)
        body = data.draw(st.composite(lambda draw: changed(draw, message))())
        return ProtocolAnswer(answer.ticket, answer.client, stage, body, answer.tensors)

    made = sums_of(sites(), change)
    # Whoever is blamed has lied: nobody else, whatever was changed.
    assert set(made["guilty"]) <= {liar}
    for reason in [*made["lost"].values(), *made["guilty"].values()]:
        assert reason
        assert "\n" not in reason
    in_sums = {ticket for one in made["sums"] for ticket in one["tickets"]}
    assert in_sums | set(made["lost"]) == set(asked())
    assert not in_sums & set(made["lost"])
    for one in made["sums"]:
        how = SUMS.contribution(asked()[100], (), one["members"])
        total = how.decode(one["sum"], len(one["tickets"]), asked()[100], ())
        assert total.weight == 100 * len(one["tickets"])


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [torch.zeros(3)],
        [torch.zeros(3, dtype=torch.int32)],
        [torch.zeros((), dtype=torch.int32)],
        [torch.zeros(0, dtype=torch.int32)] * 2,
    ],
)
def test_a_server_loses_who_sends_another_tensor(tensors: list[Tensor]) -> None:
    def change(say: ProtocolStep, answer: ProtocolAnswer | None) -> ProtocolAnswer | None:
        if answer is None or (say.stage, say.client) != (MASK, 2):
            return answer
        return ProtocolAnswer(say.ticket, 2, MASK, answer.body, tensors)

    made = sums_of(sites(), change)
    assert list(made["guilty"]) == [2]
    assert 'at "masked input": its vector is' in made["guilty"][2] or "tensors, and not 1" in str(
        made["guilty"]
    )


@settings(max_examples=50)
@given(st.integers(0, N - 1), st.integers(0, 2**32))
def test_a_vector_of_noise_makes_no_model(liar: int, seed: int) -> None:
    def change(say: ProtocolStep, answer: ProtocolAnswer | None) -> ProtocolAnswer | None:
        if answer is None or (say.stage, say.client) != (MASK, liar):
            return answer
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randint(-(2**31), 2**31, answer.tensors[0].shape, generator=generator)
        return ProtocolAnswer(say.ticket, liar, MASK, answer.body, [noise.int()])

    made = sums_of(sites(), change)
    # Nobody can tell who it was: nobody is blamed.
    assert made["guilty"] == {}
    assert made["sums"] == []
    assert "cannot determine which one" in next(iter(made["lost"].values()))
    assert set(made["helped"]) == set(range(N))


def test_the_largest_messages_fit_into_a_body() -> None:
    box, digest = bytes(88), bytes(32)
    sealed = tuple(SealedSharePair(2**31 - 1, box, digest, digest) for _ in range(MOST_MEMBERS))
    assert len(to_body(SharesForNeighbours(digest, sealed))) <= MOST_STEP_BYTES
    assert len(to_body(SharesFromNeighbours(sealed))) <= MOST_STEP_BYTES


def test_all_stages_but_the_consistency_check_are_changed_here() -> None:
    assert [say.stage for say in recorded()] == [0, 1, 2, UNMASK]
    assert len(STAGES) == 5
    assert Averages.alike is False
