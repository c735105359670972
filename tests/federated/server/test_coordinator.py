"""The server of a federation as a state machine: driven by hand, with updates that are made up."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from driven import answer, assigned, combine, combines, model_of, server
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from dure.errors import TooFewClientsError
from dure.federated.aggregate import Krum
from dure.federated.algorithm import Algorithm
from dure.federated.algorithms.fed_async import ModelMixing
from dure.federated.algorithms.fed_buff import StalenessDiscount
from dure.federated.server import coordinator as module
from dure.federated.server.combining import MOST_EMPTY_MODELS, RoundResult
from dure.federated.server.coordinator import Coordinator
from dure.federated.server.pacing import BufferedPacing, Pacing, SynchronousPacing, asynchronous
from dure.federated.server.sampling import Poisson, Uniform
from dure.federated.server.server_optimizer import ServerOptimizer
from dure.protocol.messages import Assignment, Refuse, Update
from dure.record.checkpoint import tree_from_bytes, tree_to_bytes

SEEDS = st.integers(0, 1000)


def play(one: Coordinator, order: Callable[[int], list[int]]) -> tuple[RoundResult, list[Update]]:
    """One round whose updates arrive in `order`, a permutation of the round's clients."""
    assignments = assigned(one.tick(0.0))
    tickets = None
    for position in order(len(assignments)):
        assert tickets is None
        tickets = combines(one.update(assignments[position].ticket, 1.0))
    assert tickets is not None
    return combine(one, tickets, 1.0), [answer(assignment) for assignment in assignments]


def in_order(count: int) -> list[int]:
    return list(range(count))


@given(st.integers(1, 8), st.randoms(use_true_random=False))
def test_the_order_of_arrival_does_not_change_a_bit(clients: int, draws: random.Random) -> None:
    first, second = server(clients), server(clients)
    for _ in range(2):
        a, _ = play(first, in_order)
        b, _ = play(second, lambda n: draws.sample(range(n), n))
        assert a == b
        assert torch.equal(model_of(first), model_of(second))


@given(st.integers(1, 8), st.floats(0.1, 3.0))
def test_the_new_model_is_the_mean_update_weighted_by_examples(clients: int, lr: float) -> None:
    one = server(clients, lr=lr)
    before = [weight.clone() for weight in one.model.weights]
    result, updates = play(one, in_order)
    total = sum(update.examples for update in updates)
    for part, start in enumerate(before):
        mean = sum(u.examples * u.delta[part] for u in updates) / total
        assert torch.allclose(one.model.weights[part], start + lr * mean, rtol=1e-12, atol=1e-12)
    assert result.samples == 2 * total
    assert result.loss == pytest.approx(sum(u.loss * u.samples for u in updates) / (2 * total))
    assert result.clients == list(range(clients))
    assert one.round == 1


def test_floating_point_buffers_are_averaged_and_counters_take_the_largest() -> None:
    one = server(3, lr=0.5)
    _, updates = play(one, in_order)
    total = sum(update.examples for update in updates)
    for position in (0, 2):
        assert torch.allclose(
            one.model.buffers[position],
            sum(u.examples * u.buffers[position] for u in updates) / total,
        )
    assert int(one.model.buffers[1]) == max(5, *(int(u.buffers[1]) for u in updates))
    assert [b.dtype for b in one.model.buffers] == [torch.float64, torch.int64, torch.float64]


def test_what_was_handed_out_stays_as_it_was_when_the_model_moves_on() -> None:
    one = server(2)
    assignments = assigned(one.tick(0.0))
    before = [weight.clone() for weight in assignments[0].weights]
    one.update(assignments[0].ticket, 0.0)
    combine(one, combines(one.update(assignments[1].ticket, 0.0)) or [])
    assert all(map(torch.equal, assignments[0].weights, before))
    assert not torch.equal(one.model.weights[0], before[0])
    assert assignments[0].nbytes == 8 * 8 + 6 * 8 + 8


def test_updates_that_nobody_waits_for_are_refused_with_the_reason() -> None:
    one = server(2)
    first, second = assigned(one.tick(0.0))
    assert one.update(99, 0.0) == [Refuse(99, -1, "nobody asked for it, or it was sent already")]
    assert one.update(first.ticket, 0.0) == []
    assert one.update(first.ticket, 0.0) == [
        Refuse(first.ticket, first.client, "it was sent already")
    ]
    combine(one, combines(one.update(second.ticket, 0.0)) or [])
    assert isinstance(one.update(second.ticket, 0.0)[0], Refuse)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"delta": [torch.full((6,), float("nan")).double(), torch.zeros(2).double()]},
            "not finite",
        ),
        (
            {"delta": [torch.full((6,), float("inf")).double(), torch.zeros(2).double()]},
            "not finite",
        ),
        ({"delta": [torch.zeros(6).double()]}, "not the model's tensors"),
        ({"delta": [torch.zeros(5).double(), torch.zeros(2).double()]}, "shapes and types"),
        ({"delta": [torch.zeros(6), torch.zeros(2)]}, "shapes and types"),
        ({"client": 17}, "not an answer to what was asked"),
        ({"samples": 0}, "of no examples"),
        ({"counted": -1.0}, "counts -1.0, which is no weight"),
        ({"counted": float("nan")}, "counts nan, which is no weight"),
        ({"counted": float("inf")}, "counts inf, which is no weight"),
    ],
)
def test_an_update_that_cannot_be_right_is_left_out_and_the_round_goes_on(
    change: dict[str, Any], reason: str
) -> None:
    one, honest = server(3), server(3)
    for each in (one, honest):
        assignments = assigned(each.tick(0.0))
        for assignment in assignments:
            tickets = combines(each.update(assignment.ticket, 0.0))
        assert tickets is not None
        if each is one:
            bad = tickets[1]
            for ticket in tickets:
                update = answer(each.assignment(ticket))
                each.fold(replace(update, **change) if ticket == bad else update)
            result = each.finish(0.0)
            assert reason in result.refused[bad]
        else:
            for ticket in (tickets[0], tickets[2]):
                each.fold(answer(each.assignment(ticket)))
            result = each.finish(0.0)
        assert result.clients == [0, 2]
    assert torch.equal(model_of(one), model_of(honest))


def test_a_round_of_too_few_updates_for_its_rule_leaves_the_model_as_it_is() -> None:
    one = server(8)
    one.model.aggregator = Krum(2)
    before = model_of(one)
    asked = assigned(one.tick(0.0))
    for assignment in asked[:6]:
        one.update(assignment.ticket, 0.0)
    one.failed(asked[6].ticket, "dropped out", 0.0)
    result = combine(one, combines(one.failed(asked[7].ticket, "dropped out", 0.0)) or [])
    assert len(result.refused) == 6
    assert "at least 7 updates" in result.refused[asked[0].ticket]
    assert torch.equal(model_of(one), before)
    assert (one.round, result.clients, result.loss) == (1, [], None)


def test_a_rule_s_own_error_is_not_taken_for_too_few_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = server(8)
    one.model.aggregator = Krum(2)
    monkeypatch.setattr(
        Krum,
        "combine_finite",
        lambda *given: (_ for _ in ()).throw(ValueError("a mistake in a rule")),
    )
    with pytest.raises(ValueError, match="a mistake in a rule"):
        play(one, lambda count: list(range(count)))


def test_a_round_asks_more_than_it_needs_and_refuses_who_comes_too_late() -> None:
    one = server(10, SynchronousPacing(0.4, Uniform(over=1.5)))
    assignments = assigned(one.tick(0.0))
    assert len(assignments) == 6
    tickets = None
    for assignment in assignments[:4]:
        tickets = combines(one.update(assignment.ticket, 1.0))
    assert tickets is not None
    assert len(tickets) == 4
    combine(one, tickets, 1.0)
    asked = assigned(one.tick(1.0))
    late = {assignment.client for assignment in assignments[4:]}
    assert not late & {assignment.client for assignment in asked}, (
        "who is at work is not asked again"
    )
    (refused,) = one.update(assignments[4].ticket, 2.0)
    assert refused == Refuse(assignments[4].ticket, assignments[4].client, "it came too late")


def test_at_the_deadline_a_round_ends_with_those_who_have_answered() -> None:
    one = server(6, SynchronousPacing(1.0, Uniform(deadline=10.0, minimum=2)))
    assignments = assigned(one.tick(0.0))
    assert {a.deadline for a in assignments} == {10.0}
    assert one.wake == 10.0
    for assignment in assignments[:3]:
        assert one.update(assignment.ticket, 5.0) == []
    assert one.tick(9.9) == []
    tickets = combines(one.tick(10.0))
    assert tickets is not None
    assert len(tickets) == 3


def test_with_too_few_at_the_deadline_it_begins_again_with_others_and_the_model_stays() -> None:
    one = server(6, SynchronousPacing(0.5, Uniform(deadline=10.0, minimum=2)))
    before = model_of(one)
    first = assigned(one.tick(0.0))
    one.update(first[0].ticket, 5.0)
    actions = one.tick(10.0)
    assert Refuse(first[0].ticket, first[0].client, "the round was begun again") in actions
    again = assigned(actions)
    assert len(again) == 3
    assert not {a.client for a in first[1:]} & {a.client for a in again}
    assert one.round == 0
    assert torch.equal(model_of(one), before)
    assert one.wake == 20.0


def test_who_fails_is_replaced_as_long_as_there_is_somebody() -> None:
    one = server(5, SynchronousPacing(0.4))
    first, second = assigned(one.tick(0.0))
    (third,) = assigned(one.failed(first.ticket, "offline", 0.0))
    assert third.client not in (first.client, second.client)
    one.update(second.ticket, 1.0)
    assert combines(one.update(third.ticket, 1.0)) is not None


def test_who_is_there_is_chosen_as_if_only_they_had_been_asked() -> None:
    there = {1, 4, 5, 8}
    one = server(10, SynchronousPacing(0.3))
    waiting, chosen = one.tick(0.0), []
    while waiting:
        assignment = waiting.pop(0).assignment
        if assignment.client in there:
            chosen.append(assignment.client)
        else:
            waiting += one.failed(assignment.ticket, "offline", 0.0)
    order = Uniform().order(7, 0, 0, [1] * 10)
    assert chosen == [client for client in map(order, range(10)) if client in there][:3]


def test_a_round_in_which_all_others_have_gone_ends_with_the_rest() -> None:
    one = server(3)
    first, second, third = assigned(one.tick(0.0))
    one.update(first.ticket, 1.0)
    assert one.failed(second.ticket, "dropped out", 2.0) == []
    assert combines(one.failed(third.ticket, "dropped out", 3.0)) == [first.ticket]


def test_where_nobody_is_there_it_asks_again_later_and_gives_up_at_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ATTEMPTS", 5)
    one = server(2)

    def ask_forever() -> None:
        now = 0.0
        while True:
            waiting = one.tick(now)
            while waiting:
                waiting += one.failed(waiting.pop(0).assignment.ticket, "offline", now)
            assert now < one.wake <= now + module.RETRY
            now = one.wake

    with pytest.raises(
        TooFewClientsError, match="no client answered in 5 attempts to continue with round 1"
    ):
        ask_forever()


def test_those_who_check_in_are_asked_and_no_others() -> None:
    one = server(4, SynchronousPacing(0.5))
    one.present = set()
    assert one.tick(0.0) == []
    (first,) = assigned(one.check_in(3, 1.0))
    (second,) = assigned(one.check_in(1, 2.0))
    assert (first.client, second.client) == (3, 1)
    one.leave(2)
    one.update(first.ticket, 3.0)
    assert combines(one.update(second.ticket, 3.0)) == [second.ticket, first.ticket]


def test_asynchronous_clients_are_always_at_work_and_every_update_makes_a_model() -> None:
    one = server(10, asynchronous(3))
    assignments = assigned(one.tick(0.0))
    assert len(assignments) == 3
    seen = []
    for number in range(6):
        actions = one.update(assignments.pop(0).ticket, float(number))
        result = combine(one, combines(actions) or [], float(number))
        seen += result.staleness
        assignments += assigned(one.tick(float(number)))
        assert len(assignments) == 3
        assert len({a.client for a in assignments}) == 3
    assert seen == [0, 1, 2, 2, 2, 2]
    assert one.round == 6


def test_the_mixing_rate_depends_on_an_update_s_own_staleness_alone() -> None:
    one = server(3, asynchronous(3), ModelMixing(0.5, "polynomial", 1.0, 0.0, 0.0))
    one.model.buffers = []
    start = [w.clone() for w in one.model.weights]
    first, second, third = assigned(one.tick(0.0))
    expected = start
    for staleness, assignment in enumerate((third, first, second)):
        update = replace(answer(assignment), buffers=[])
        combine(one, combines(one.update(assignment.ticket, 1.0)) or [], make=lambda a, u=update: u)  # type: ignore[misc]
        rate = 0.5 / (staleness + 1)
        models = [s + d for s, d in zip(start, update.delta, strict=True)]
        expected = [(1 - rate) * x + rate * new for x, new in zip(expected, models, strict=True)]
    assert all(
        torch.allclose(a, b, atol=1e-14) for a, b in zip(one.model.weights, expected, strict=True)
    )


def test_a_buffer_of_k_moves_against_the_models_that_clients_started_from_and_divides_by_k() -> (
    None
):
    one = server(4, BufferedPacing(2, 2), StalenessDiscount(), lr=0.5)
    waiting, expected = assigned(one.tick(0.0)), [w.clone() for w in one.model.weights]
    applied: list[list[torch.Tensor]] = []
    tickets = None
    while one.round < 4:
        assignment = waiting.pop(0)
        actions = one.update(assignment.ticket, 1.0)
        waiting += assigned(actions)
        staleness = one.round - assignment.round
        applied.append([d / math.sqrt(1 + staleness) for d in answer(assignment).delta])
        tickets = combines(actions)
        if tickets is not None:
            combine(one, tickets)
            waiting += assigned(one.tick(1.0))
            expected = [
                w + 0.5 * sum(parts) / 2 for w, *parts in zip(expected, *applied, strict=True)
            ]
            applied = []
    assert all(
        torch.allclose(a, b, atol=1e-13) for a, b in zip(one.model.weights, expected, strict=True)
    )


def test_without_rounds_turns_count_the_answers_of_each_client() -> None:
    one = server(4, BufferedPacing(3, 5), StalenessDiscount())
    waiting, answered = assigned(one.tick(0.0)), []
    while one.round < 6:
        while not waiting:
            waiting += assigned(one.tick(one.wake))
        assignment = waiting.pop(0)
        if len(answered) % 7 == 6 and assignment.turn:  # what was not answered is asked again
            answered.append((-1, 0, 0))
            waiting += assigned(one.failed(assignment.ticket, "gone", 0.0))
            continue
        answered.append((assignment.client, assignment.turn, assignment.round))
        actions = one.update(assignment.ticket, 0.0)
        waiting += assigned(actions)
        tickets = combines(actions)
        if tickets is not None:
            combine(one, tickets)
            waiting += assigned(one.tick(0.0))
    for client in range(4):
        turns = [turn for who, turn, _ in answered if who == client]
        assert turns == list(range(len(turns)))
    pairs = [(who, number) for who, _, number in answered if who >= 0]
    assert len(set(pairs)) < len(pairs), "some trained twice from the same model"


def test_in_rounds_the_turn_is_the_round() -> None:
    one = server(5, SynchronousPacing(0.4))
    for number in range(3):
        asked = assigned(one.tick(0.0))
        assert [(a.round, a.turn) for a in asked] == [(number, number)] * 2
        one.update(asked[0].ticket, 0.0)
        combine(one, combines(one.update(asked[1].ticket, 0.0)) or [])


@pytest.mark.parametrize("stale", [0, 3])
def test_models_of_simulated_staleness_are_drawn_from_the_last_ones(stale: int) -> None:
    one, seen = server(20, asynchronous(1, stale)), []
    for _ in range(60):
        (assignment,) = assigned(one.tick(0.0))
        seen += combine(one, combines(one.update(assignment.ticket, 0.0)) or []).staleness
    assert set(seen[stale:]) == set(range(stale + 1))
    assert all(value <= number for number, value in enumerate(seen))


def event(
    one: Coordinator, at_work: list[int], folded: list[int], now: float, draws: random.Random
) -> float:
    """One event drawn at random; the time after it. at_work, folded: tickets, as the driver knows
    them."""
    if one.combining and draws.random() < 0.6:
        if len(folded) < len(one.combining):
            folded.append(one.combining[len(folded)])
            one.fold(answer(one.assignment(folded[-1])))
        else:
            one.finish(now)
            folded.clear()
            at_work += [assignment.ticket for assignment in assigned(one.tick(now))]
        return now
    now += 1.0
    kind = draws.choice(["update", "update", "failed", "tick"]) if at_work else "tick"
    if kind == "tick":
        now = now if at_work or math.isinf(one.wake) else max(now, one.wake)
        actions = one.tick(now)
    else:
        ticket = at_work.pop(draws.randrange(len(at_work)))
        actions = one.update(ticket, now) if kind == "update" else one.failed(ticket, "gone", now)
    at_work += [assignment.ticket for assignment in assigned(actions)]
    return now


SERVERS: dict[str, Callable[[], Coordinator]] = {
    "rounds": lambda: server(8, SynchronousPacing(0.5, Uniform(1.4, 20.0, 2))),
    "poisson": lambda: server(8, SynchronousPacing(0.5, Poisson(1.4, 20.0))),
    "adam": lambda: server(8, SynchronousPacing(0.5), optimizer=ServerOptimizer("adam", 0.1, 0.9)),
    "asynchronous": lambda: server(8, asynchronous(3)),
    "mixing": lambda: server(8, asynchronous(3), ModelMixing(0.5, "polynomial", 1.0, 0.0, 0.0)),
    "stale": lambda: server(8, asynchronous(1, 2)),
    "buffered": lambda: server(8, BufferedPacing(4, 3), StalenessDiscount()),
}


@pytest.mark.parametrize("made", SERVERS.values(), ids=list(SERVERS))
@given(seed=SEEDS, at=st.integers(0, 79))
def test_restored_at_any_event_it_goes_on_with_the_same_bits(
    made: Callable[[], Coordinator], seed: int, at: int
) -> None:
    one, at_work, folded, now, saved = made(), list[int](), list[int](), 0.0, b""
    for number in range(80):
        if number == at:
            saved = tree_to_bytes(
                {"state": one.state(), "out": list(at_work), "folded": list(folded), "now": now}
            )
        now = event(one, at_work, folded, now, random.Random(1000 * seed + number))
    kept = tree_from_bytes(saved)
    again, at_work, folded, now = made(), kept["out"], kept["folded"], kept["now"]
    again.restore(kept["state"])
    for ticket in folded:  # whose updates lie with the driver until the model is made
        again.fold(answer(again.assignment(ticket)))
    for number in range(at, 80):
        now = event(again, at_work, folded, now, random.Random(1000 * seed + number))
    assert torch.equal(model_of(one), model_of(again))
    assert tree_to_bytes(again.state()) == tree_to_bytes(one.state())
    assert one.round > 0


def test_who_is_restored_in_the_middle_of_its_work_forgets_what_was_folded() -> None:
    one, other = server(3), server(3)
    state = tree_to_bytes(one.state())
    tickets = [assignment.ticket for assignment in assigned(one.tick(0.0))]
    for ticket in tickets:
        one.update(ticket, 0.0)
    one.fold(answer(one.assignment(tickets[0])))
    one.restore(tree_from_bytes(state))
    play(one, in_order)
    play(other, in_order)
    assert torch.equal(model_of(one), model_of(other))


def test_an_update_is_folded_once_and_only_where_it_is_combined() -> None:
    one = server(2)
    first, second = assigned(one.tick(0.0))
    with pytest.raises(
        ValueError, match="the update with ticket 0 is not expected, or was already aggregated"
    ):
        one.fold(answer(first))
    one.update(first.ticket, 0.0)
    one.update(second.ticket, 0.0)
    assert sorted(one.combining) == [first.ticket, second.ticket]
    one.fold(answer(first))
    with pytest.raises(ValueError, match="ticket 0"):
        one.fold(answer(first))
    one.fold(answer(second))
    assert sorted(one.finish(0.0).clients) == [0, 1]
    assert one.combining == []


def refuse_all(one: Coordinator, now: float = 0.0) -> None:
    """A round whose updates are all NaN."""
    for assignment in assigned(one.tick(now)):
        tickets = combines(one.update(assignment.ticket, now))
    assert tickets is not None
    combine(
        one, tickets, now, lambda a: replace(answer(a), delta=[w * math.nan for w in a.weights])
    )


def test_where_every_update_of_many_rounds_is_refused_it_gives_up_with_the_reason() -> None:
    one = server(3)
    for number in range(2 * MOST_EMPTY_MODELS - 2):
        if number == MOST_EMPTY_MODELS - 1:  # one that counts begins it anew
            play(one, in_order)
        refuse_all(one)
    again = server(3)
    again.restore(tree_from_bytes(tree_to_bytes(one.state())))
    for each in (one, again):
        with pytest.raises(
            TooFewClientsError, match="every update was rejected in 100 rounds in a row: it is"
        ):
            refuse_all(each)


def test_the_only_client_at_work_that_reports_is_no_attempt_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ATTEMPTS", 5)
    one = server(10, BufferedPacing(1, 40), StalenessDiscount())
    (assignment,) = assigned(one.tick(0.0))
    for _ in range(39):
        (assignment,) = assigned(one.update(assignment.ticket, 0.0))
    assert len(combines(one.update(assignment.ticket, 0.0)) or []) == 40


def test_who_gives_up_says_how_many_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ATTEMPTS", 5)
    one = server(4, SynchronousPacing(1.0, Uniform(minimum=3)))
    (first, *waiting) = one.tick(0.0)
    one.update(first.assignment.ticket, 0.0)

    def ask_forever(waiting: list[Any]) -> None:
        while True:
            while waiting:
                waiting += one.failed(waiting.pop(0).assignment.ticket, "offline", 0.0)
            waiting = one.tick(one.wake)

    with pytest.raises(
        TooFewClientsError, match="only 1 of at least 3 clients answered in 5 attempts"
    ):
        ask_forever(waiting)


def test_who_has_answered_cannot_fail_any_more() -> None:
    one = server(3)
    first, *others = assigned(one.tick(0.0))
    one.update(first.ticket, 0.0)
    before = tree_to_bytes(one.state())
    assert one.failed(first.ticket, "gone", 0.0) == []
    assert tree_to_bytes(one.state()) == before
    for assignment in others:
        tickets = combines(one.update(assignment.ticket, 0.0))
    assert one.failed(first.ticket, "gone", 0.0) == []
    assert combine(one, tickets or []).clients == [0, 1, 2]


def test_what_comes_while_a_round_is_combined_comes_too_late() -> None:
    one = server(4, SynchronousPacing(0.5, Uniform(over=1.5)))
    first, second, third = assigned(one.tick(0.0))
    one.update(first.ticket, 0.0)
    tickets = combines(one.update(second.ticket, 0.0)) or []
    assert one.update(third.ticket, 0.0) == [Refuse(third.ticket, third.client, "it came too late")]
    assert len(combine(one, tickets).clients) == 2
    assert one.busy == {}


PACINGS = {
    "rounds": SynchronousPacing(0.5, Uniform(1.4, 20.0, 2)),
    "poisson": SynchronousPacing(0.3, Poisson(1.2, 20.0)),
    "asynchronous": asynchronous(3),
    "stale": asynchronous(1, 2),
    "buffered": BufferedPacing(4, 3),
}
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["update", "update", "update", "failed", "tick", "check_in", "leave", "combine"]
        ),
        st.integers(0, 100),
    ),
    max_size=80,
)


@pytest.mark.parametrize("pacing", PACINGS.values(), ids=list(PACINGS))
@given(events=EVENTS, known=st.booleans())
@example(events=[("check_in", 0), ("update", 0), ("update", 1), ("tick", 0)], known=True)
def test_in_whatever_order_it_is_told_every_ticket_is_answered_once(
    pacing: Pacing, events: list[tuple[str, int]], known: bool
) -> None:
    one, now, waiting = server(6, pacing), 0.0, list[int]()
    one.present = set() if known else None
    accepted, refused, folded = set[int](), set[int](), set[int]()
    for kind, number in events:
        now = max(now, one.wake) if number % 2 and math.isfinite(one.wake) else now + 1.0
        ticket, client = number % (one.tickets + 2), number % 6
        actions: list[Any] = []
        if kind == "combine" and waiting:
            assert len(combine(one, waiting, now).clients) == len(waiting)
            folded |= set(waiting)
            waiting = []
        elif kind == "update":
            actions = one.update(ticket, now)
            if not any(
                isinstance(action, Refuse) and action.ticket == ticket for action in actions
            ):
                assert ticket < one.tickets
                assert ticket not in accepted
                accepted.add(ticket)
        elif kind == "failed":
            actions = one.failed(ticket, "gone", now)
        elif kind == "tick":
            actions = one.tick(now)
        elif known and kind == "check_in":
            actions = one.check_in(client, now)
        elif known and kind == "leave" and client not in one.busy:
            one.leave(client)
        others = [action.ticket for action in actions if isinstance(action, Refuse)]
        if kind == "update":  # its own is looked at above
            others = [other for other in others if other != ticket]
        assert set(others) <= accepted - refused - folded
        assert len(set(others)) == len(others)
        refused |= set(others)
        tickets = combines(actions)
        if tickets is not None:
            assert not waiting
            assert all(one.open[each].reported for each in tickets)
            waiting = tickets
        reported = {each for each, held in one.open.items() if held.reported}
        assert reported == accepted - refused - folded, (
            "what was accepted is open until it is combined or refused"
        )
        assert one._reports == len(reported - set(waiting))
        assert all(
            one.busy[held.assignment.client] == each
            for each, held in one.open.items()
            if not held.reported
        )


class Controlled(Algorithm):
    """Something goes down besides the model, other in every round, and as much comes up."""

    def __init__(self) -> None:
        self.control = [torch.zeros(6).double(), torch.zeros(2).double()]

    def down(self) -> list[torch.Tensor]:
        return self.control

    def absorb(self, extra: list[torch.Tensor], updates: int) -> None:
        self.control = [c + mean for c, mean in zip(self.control, extra, strict=True)]

    def state(self) -> Any:
        return self.control

    def restore(self, state: Any) -> None:
        self.control = state


def controlled(assignment: Assignment) -> Update:
    return replace(answer(assignment), extra=[1 + part for part in assignment.extra])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"extra": ()}, "what it sends besides"),
        ({"extra": [torch.zeros(6).double()]}, "what it sends besides"),
        ({"extra": [torch.zeros(6).double(), torch.zeros(3).double()]}, "what it sends besides"),
        ({"extra": [torch.zeros(6), torch.zeros(2)]}, "what it sends besides"),
        ({"extra": [torch.zeros(6).double(), torch.tensor([0.0, math.inf]).double()]}, "finite"),
        ({"examples": 51}, "of more examples than its client has"),
        ({"loss": math.nan}, "its loss is not finite"),
        ({"loss": -math.inf}, "its loss is not finite"),
        ({"failure": "its loss became not finite", "delta": ()}, "its loss became not finite"),
    ],
)
@pytest.mark.parametrize("finite", [False, True])
def test_one_wrong_answer_is_refused_and_the_others_make_the_model(
    change: dict[str, Any], reason: str, finite: bool
) -> None:
    one = server(4, algorithm=Controlled())
    assigned(one.tick(0.0))
    for ticket in list(one.open):
        tickets = combines(one.update(ticket, 0.0))
    assert tickets is not None
    for ticket in tickets:
        asked = one.assignment(ticket)
        update = controlled(asked)
        one.fold(replace(update, **change) if asked.client == 2 else update, finite=finite)
    result = one.finish(0.0)
    assert result.clients == [0, 1, 3]
    assert result.wrong == [2]
    assert all(reason in text for text in result.refused.values())
    assert result.loss is not None
    assert math.isfinite(result.loss)
    assert all(bool(part.isfinite().all()) for part in one.algorithm.down())


def test_a_failed_update_is_refused_also_where_what_is_computed_is_trusted() -> None:
    one = server(1)
    (asked,) = assigned(one.tick(0.0))
    one.update(asked.ticket, 0.0)
    failed = replace(answer(asked), delta=(), buffers=(), failure="its weights became not finite")
    assert one.fold(failed, finite=True, computed=True) is None
    assert one.finish(0.0).refused == {asked.ticket: "its weights became not finite"}


def test_what_went_with_an_older_model_is_that_of_its_moment_after_a_restart_too() -> None:
    """Models of simulated staleness have their own number, and the newest of what goes besides."""
    one = server(6, BufferedPacing(3, 2), Controlled())
    one.oldest = 3
    waiting = assigned(one.tick(0.0))
    seen = set()
    for now in range(12):
        tickets = None
        while tickets is None:
            actions = one.update(waiting.pop(0).ticket, float(now))
            waiting += assigned(actions)
            tickets = combines(actions)
        combine(one, tickets, float(now), controlled)
        waiting += assigned(one.tick(float(now)))
        again = server(6, BufferedPacing(3, 2), Controlled())
        again.restore(tree_from_bytes(tree_to_bytes(one.state())))
        for ticket, kept in one.open.items():
            mine, theirs = kept.assignment, again.assignment(ticket)
            seen.add(float(mine.extra[0][0]))
            for part, other in zip(
                [*mine.weights, *mine.extra], [*theirs.weights, *theirs.extra], strict=True
            ):
                assert torch.equal(part, other)
    assert len(seen) > 3


def test_a_count_is_refused_that_so_many_examples_cannot_have() -> None:
    one = server(2)
    one.updates.most_counted = 3.0
    for assignment in assigned(one.tick(0.0)):
        tickets = combines(one.update(assignment.ticket, 0.0))
    assert tickets is not None
    for ticket, each in zip(tickets, (3.0, 3.1), strict=True):
        update = answer(one.assignment(ticket))
        one.fold(replace(update, counted=each * update.samples))
    assert one.finish(0.0).refused == {tickets[1]: "its loss counts more than its examples have"}
