"""The sum is exact, whoever is lost at whatever stage; and where too many are, there is none."""

from __future__ import annotations

import weakref

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

from dure.errors import TooFewClientsError
from dure.federated.privacy.secure_aggregation.cohort import (
    ADVERTISE,
    CONFIRM,
    MASK,
    SHARE,
    UNMASK,
    SumContext,
)
from dure.federated.privacy.secure_aggregation.messages import TooFewError
from dure.protocol.messages import WantedTensor

NEVER = 9


def lost_at(of: SumContext, at: list[int]) -> dict[int, list[int]]:
    """By stage, who does not answer it: the i-th member at the i-th of these stages."""
    return {
        stage: [number for number, when in zip(of.members, at, strict=True) if when == stage]
        for stage in range(UNMASK + 1)
    }


@st.composite
def drop_outs(draw: st.DrawFn) -> tuple[SumContext, list[int], bool]:
    n = draw(st.integers(2, 9))
    threshold = draw(st.integers(2 * n // 3 + 1, n))
    when = st.sampled_from([NEVER, NEVER, NEVER, ADVERTISE, SHARE, MASK, CONFIRM, UNMASK])
    at = draw(st.lists(when, min_size=n, max_size=n))
    return context(n, threshold=threshold), at, draw(st.booleans())


@settings(deadline=None, max_examples=100)
@given(drop_outs())
def test_the_sum_is_exact_above_the_threshold_and_there_is_none_below(
    drawn: tuple[SumContext, list[int], bool],
) -> None:
    of, at, signed = drawn
    last = [when if signed or when != CONFIRM else NEVER for when in at]
    to_the_end = [when for when in last if when == NEVER]
    machine = server(of, signed=signed)
    if len(to_the_end) < of.least:
        said = rf" of {len(of.members)} clients .* {of.least} are needed"
        with pytest.raises(TooFewError, match=said):
            run_all(machine, clients(of, signed=signed), lost_at(of, last))
        return
    summed, who = run_all(machine, clients(of, signed=signed), lost_at(of, last))
    assert who == [one for one, when in zip(of.members, last, strict=True) if when > MASK]
    assert torch.equal(summed, total(who))
    gone = {one for one, when in zip(of.members, last, strict=True) if when != NEVER}
    assert set(machine.lost) == gone


@st.composite
def sparse_drop_outs(draw: st.DrawFn) -> tuple[SumContext, list[int]]:
    n = draw(st.integers(7, 20))
    degree = draw(st.sampled_from([4, 6]).filter(lambda k: k < n - 1))
    threshold = draw(st.integers(2, degree - 1))
    when = st.sampled_from([*[NEVER] * 8, ADVERTISE, SHARE, MASK, UNMASK])
    at = draw(st.lists(when, min_size=n, max_size=n))
    return context(n, degree=degree, threshold=threshold, fewest=n // 2), at


@settings(deadline=None, max_examples=100)
@given(sparse_drop_outs())
def test_with_a_few_neighbours_each_the_sum_is_exact_or_there_is_none(
    drawn: tuple[SumContext, list[int]],
) -> None:
    of, at = drawn
    machine = server(of)
    try:
        summed, who = run_all(machine, clients(of), lost_at(of, at))
    except TooFewError:
        assert any(when != NEVER for when in at)
        return
    assert who == [one for one, when in zip(of.members, at, strict=True) if when > MASK]
    assert torch.equal(summed, total(who))


def test_a_hundred_clients_with_twenty_neighbours_each() -> None:
    of = context(100, degree=20, threshold=11, fewest=80)
    lost = {
        ADVERTISE: of.members[:2],
        SHARE: of.members[10:12],
        MASK: of.members[50:55],
        UNMASK: of.members[98:],
    }
    summed, who = run_all(server(of), clients(of), lost)
    assert len(who) == 91
    assert torch.equal(summed, total(who))


def test_too_few_clients_are_named_with_the_stage_and_what_to_do() -> None:
    of = context(5)
    machine = server(of)
    with pytest.raises(TooFewClientsError) as raised:
        run_all(machine, clients(of), {MASK: of.members[:2]})
    assert str(raised.value) == (
        'secure aggregation of round 3: 3 of 5 clients have answered at "masked input", but 4 are '
        "needed: wait longer for them, or select more clients"
    )


def test_a_client_that_loses_those_who_hold_its_shares_is_named() -> None:
    of = context(12, degree=4, threshold=3, fewest=2)
    machine = server(of)
    members = clients(of)
    run_until(UNMASK, machine, members)
    with pytest.raises(TooFewError, match="holders of shares of client"):
        run_stage(machine, members, lost=of.members[:8])


def test_a_masked_vector_is_added_as_it_comes_and_kept_by_nobody() -> None:
    of = context(5)
    machine = server(of)
    members = clients(of)
    run_until(MASK, machine, members)
    kept = []
    for number, body in machine.ask().items():
        answer, tensor = members[number].answer(MASK, body)
        assert tensor is not None
        kept.append(weakref.ref(tensor))
        machine.take(number, answer, [tensor])
        members[number].forget_vector()
        del tensor
    assert [one() for one in kept] == [None] * 5
    machine.close_stage()
    summed, who = run_all(machine, members)
    assert torch.equal(summed, total(who))


def test_the_server_wants_one_tensor_of_32_bit_integers_and_only_at_the_masked_stage() -> None:
    machine = server(context(3))
    assert machine.wants(MASK) == (WantedTensor("int32", (LENGTH,)),)
    assert all(machine.wants(stage) == () for stage in (ADVERTISE, SHARE, CONFIRM, UNMASK))


def test_the_order_of_answers_and_answers_that_come_twice_change_nothing() -> None:
    of = context(5)
    machine = server(of)
    members = clients(of)
    while machine.stage is not None:
        for number, body in reversed(machine.ask().items()):
            answer, tensor = members[number].answer(machine.stage, body)
            tensors = [] if tensor is None else [tensor]
            assert machine.take(number, answer, tensors)
            assert not machine.take(number, answer, tensors)
            assert not machine.take(7, answer, tensors)
        machine.close_stage()
    summed, who = machine.result()
    assert torch.equal(summed, total(who))
    assert machine.lost == {}
    assert machine.ask() == {}
    assert not machine.take(10, b"")
    assert machine.lost == {}
    again, _ = machine.result()
    assert torch.equal(again, summed)


def test_once_the_vectors_are_there_shares_enough_are_enough() -> None:
    of = context(6, threshold=5, fewest=6)
    machine = server(of)
    summed, who = run_all(machine, clients(of), {UNMASK: [13]})
    assert who == list(of.members)
    assert torch.equal(summed, total(who))
    with pytest.raises(TooFewError, match="5 of 6 clients"):
        run_all(server(of), clients(of), {MASK: [13]})


def test_the_result_is_there_after_the_last_stage_only() -> None:
    with pytest.raises(ValueError, match="after the last stage"):
        server(context(3)).result()


def test_the_vector_is_asked_for_once_and_given_again_until_the_next_stage() -> None:
    of = context(3)
    machine = server(of)
    members = clients(of)
    asked = []

    def given() -> torch.Tensor:
        asked.append(1)
        return vector(10)

    members[10] = client(10, of, vector=given)
    run_until(MASK, machine, members)
    body = machine.ask()[10]
    first = members[10].answer(MASK, body)
    second = members[10].answer(MASK, body)
    assert first[0] == second[0]
    assert first[1] is second[1]
    assert asked == [1]


@pytest.mark.parametrize("wrong", [torch.zeros(LENGTH), torch.zeros(LENGTH + 1).int()])
def test_a_vector_of_another_form_is_refused_before_it_leaves(wrong: torch.Tensor) -> None:
    of = context(3)
    machine = server(of)
    members = clients(of)
    members[10] = client(10, of, vector=lambda: wrong)
    run_until(MASK, machine, members)
    with pytest.raises(ValueError, match="not int32"):
        members[10].answer(MASK, machine.ask()[10])
