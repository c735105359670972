"""Clients that fall silent and come back, as the server of a federation sees them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from driven import answer, assigned, combine, combines, model_of, server
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from dure.errors import TooFewClientsError
from dure.federated.algorithms.fed_buff import StalenessDiscount
from dure.federated.server import coordinator as module
from dure.federated.server.combining import MOST_EMPTY_MODELS
from dure.federated.server.coordinator import Coordinator
from dure.federated.server.pacing import BufferedPacing, Pacing, SynchronousPacing, asynchronous
from dure.federated.server.sampling import Poisson, Uniform, Weighted
from dure.protocol.carrier import Assign
from dure.protocol.messages import Refuse
from dure.record.checkpoint import tree_from_bytes, tree_to_bytes

CLIENTS = 6


def two_of_three() -> tuple[Coordinator, list[Any], Any]:
    """A round of two: (the server, who was asked first, who in place of the missing first one)."""
    one = server(3, SynchronousPacing(0.67, Uniform(deadline=100.0)))
    asked = assigned(one.tick(0.0))
    (instead,) = assigned(one.missing(asked[0].ticket, 1.0))
    return one, asked, instead


def test_the_place_of_a_missing_client_is_another_s_and_its_ticket_stays_open() -> None:
    one, (first, second), instead = two_of_three()
    assert instead.client not in (first.client, second.client)
    assert one.waits_for(first.ticket)
    assert one.busy[first.client] == first.ticket
    one.update(second.ticket, 2.0)
    assert combines(one.update(instead.ticket, 2.0)) == sorted(
        [second.ticket, instead.ticket], key=lambda t: one.assignment(t).client
    )
    assert one.update(first.ticket, 3.0) == [Refuse(first.ticket, first.client, "it came too late")]


def test_a_missing_client_that_answers_first_counts_and_the_other_is_late() -> None:
    one, (first, second), instead = two_of_three()
    assert one.update(first.ticket, 2.0) == []
    tickets = combines(one.update(second.ticket, 3.0))
    assert tickets is not None
    assert sorted(tickets) == [first.ticket, second.ticket]
    assert sorted(combine(one, tickets, 3.0).clients) == sorted([first.client, second.client])
    late = one.update(instead.ticket, 4.0)
    assert late == [Refuse(instead.ticket, instead.client, "it came too late")]


def test_who_is_back_has_a_place_again_so_that_the_failure_of_the_other_is_no_loss() -> None:
    one = server(5, SynchronousPacing(0.4, Uniform(deadline=100.0)))
    first, second = assigned(one.tick(0.0))
    (instead,) = assigned(one.missing(first.ticket, 1.0))
    assert one.back(first.ticket, 2.0) == []
    # Three are at work for two places: nobody is asked for one that fails.
    assert one.failed(instead.ticket, "dropped out", 3.0) == []
    assert len(assigned(one.failed(second.ticket, "dropped out", 3.0))) == 1


@pytest.mark.parametrize(
    "pacing", [SynchronousPacing(0.4, Uniform(deadline=100.0)), BufferedPacing(2, 4)]
)
def test_a_missing_client_that_fails_leaves_no_second_place(pacing: Pacing) -> None:
    one = server(5, pacing)
    first, _ = assigned(one.tick(0.0))
    assert len(assigned(one.missing(first.ticket, 1.0))) == 1
    assert one.failed(first.ticket, "gone", 2.0) == []
    assert first.client not in one.busy


@pytest.mark.parametrize(
    "pacing", [SynchronousPacing(0.4, Uniform(deadline=100.0)), BufferedPacing(2, 4)]
)
def test_told_twice_or_of_a_ticket_that_is_not_at_work_nothing_changes(pacing: Pacing) -> None:
    one = server(5, pacing)
    first, second = assigned(one.tick(0.0))
    one.missing(first.ticket, 1.0)
    one.update(second.ticket, 1.0)
    before = tree_to_bytes(one.state())
    for ticket in (first.ticket, second.ticket, 99):
        assert one.missing(ticket, 2.0) == []
    for ticket in (second.ticket, 99):
        assert one.back(ticket, 2.0) == []
        assert one.expired(ticket, 2.0) == []
    assert tree_to_bytes(one.state()) == before


def test_a_round_whose_others_are_missing_waits_for_them_until_its_deadline() -> None:
    one = server(3, SynchronousPacing(1.0, Uniform(deadline=100.0)))
    first, second, third = assigned(one.tick(0.0))
    one.update(first.ticket, 1.0)
    assert one.missing(second.ticket, 2.0) == []
    assert one.missing(third.ticket, 2.0) == []
    assert one.wake == 100.0
    assert one.tick(99.0) == []
    assert combines(one.tick(100.0)) == [first.ticket]


def test_a_missing_client_is_asked_again_once_it_has_failed_and_checked_in() -> None:
    one = server(3, SynchronousPacing(0.67, Uniform(deadline=10.0)))
    for client in range(3):
        one.arrive(client)
    first, _ = assigned(one.tick(0.0))
    one.missing(first.ticket, 1.0)
    # The round begins again, and all are still busy with their old tickets.
    assert assigned(one.tick(10.0)) == []
    one.failed(first.ticket, "begins afresh", 11.0)
    assert assigned(one.tick(11.0)) == []
    (again,) = assigned(one.check_in(first.client, 12.0))
    assert again.client == first.client
    assert (again.ticket, again.deadline) == (3, 20.0)


@pytest.mark.parametrize("says", ["back", "update"])
def test_who_has_come_back_need_not_check_in_to_be_asked_again(says: str) -> None:
    one = server(2, SynchronousPacing(1.0, Uniform(deadline=10.0)))
    for client in range(2):
        one.arrive(client)
    first, second = assigned(one.tick(0.0))
    one.missing(first.ticket, 1.0)
    if says == "back":
        one.back(first.ticket, 2.0)
    one.update(first.ticket, 3.0)
    combine(one, combines(one.update(second.ticket, 3.0)) or [], 3.0)
    assert {a.client for a in assigned(one.tick(3.0))} == {0, 1}


def test_without_rounds_a_ticket_has_a_deadline_of_its_own_after_which_it_is_late() -> None:
    one = server(5, BufferedPacing(2, 4), answer_timeout=30.0)
    first, _ = assigned(one.tick(5.0))
    assert first.deadline == 35.0
    (instead,) = assigned(one.expired(first.ticket, 35.0))
    assert instead.deadline == 65.0
    assert not one.waits_for(first.ticket)
    assert first.client in one.busy
    late = one.update(first.ticket, 36.0)
    assert late == [Refuse(first.ticket, first.client, "it came too late")]
    assert first.client not in one.busy


def test_a_missing_ticket_that_expires_leaves_no_second_place() -> None:
    one = server(5, BufferedPacing(2, 4), answer_timeout=30.0)
    first, _ = assigned(one.tick(0.0))
    assert len(assigned(one.missing(first.ticket, 1.0))) == 1
    assert one.expired(first.ticket, 30.0) == []


def test_without_rounds_a_client_that_never_comes_back_does_not_keep_the_others_from_work() -> None:
    """The only one at work answers, and the missing one does not count as being at work."""
    one = server(3, BufferedPacing(1, 12), StalenessDiscount(), answer_timeout=1e6)
    (first,) = assigned(one.tick(0.0))
    (current,) = assigned(one.missing(first.ticket, 0.0))
    for _ in range(11):
        (current,) = assigned(one.update(current.ticket, 0.0))
    assert len(combines(one.update(current.ticket, 0.0)) or []) == 12


@pytest.mark.parametrize(
    ("pacing", "ends"),
    [
        (SynchronousPacing(0.5), 45.0),
        (SynchronousPacing(0.5, Uniform(deadline=7.0)), 7.0),
        (asynchronous(2), 45.0),
    ],
    ids=["rounds", "the selection's own", "asynchronous"],
)
def test_a_deadline_of_the_deployment_holds_where_the_pacing_has_none(
    pacing: Pacing, ends: float
) -> None:
    assert {a.deadline for a in assigned(server(4, pacing, answer_timeout=45.0).tick(0.0))} == {
        ends
    }
    with pytest.raises(ValueError, match="more than 0 seconds"):
        server(4, pacing, answer_timeout=0.0)


def test_nobody_is_asked_before_the_first_tick_where_clients_only_arrive() -> None:
    one = server(5, SynchronousPacing(0.4))
    for client in (3, 1, 4):
        one.arrive(client)
    assert (one.tickets, one.present) == (0, {1, 3, 4})
    asked = {a.client for a in assigned(one.tick(9.0))}
    assert len(asked) == 2
    assert asked < {1, 3, 4}


def test_a_client_that_has_more_examples_by_now_may_send_an_update_of_as_many() -> None:
    sizes = [50, 50]
    one = server(2)
    one.sizes = one.updates.sizes = sizes
    one.check_in(0, 0.0, 50)
    one.check_in(1, 0.0, 80)
    assert (list(one.sizes), sizes) == ([50, 80], [50, 50]), "the given list is another's"
    again = server(2)
    again.restore(tree_from_bytes(tree_to_bytes(one.state())))
    for each in (one, again):
        for ticket in list(each.open):
            tickets = combines(each.update(ticket, 1.0))
        assert tickets is not None
        for ticket in tickets:
            asked = each.assignment(ticket)
            each.fold(replace(answer(asked), examples=51 + asked.client * 29, samples=100))
        result = each.finish(1.0)
        assert (result.clients, result.wrong) == ([1], [0])
    with pytest.raises(ValueError, match="a client has 0 examples"):
        one.check_in(1, 2.0, 0)


def test_a_selection_by_size_follows_the_sizes_that_clients_say() -> None:
    one = server(40, SynchronousPacing(0.025, Weighted()))
    (before,) = assigned(one.tick(0.0))
    grown = (before.client + 1) % 40
    for client in range(40):
        one.arrive(client, 10**9 if client == grown else 50)
    # The order of this round is drawn anew, with the sizes of now.
    (after,) = assigned(one.failed(before.ticket, "gone", 1.0))
    assert after.client == grown


def test_checkpoints_without_what_is_new_are_read() -> None:
    one = server(4, SynchronousPacing(0.5))
    assigned(one.tick(0.0))
    state = one.state()
    del state["sizes"]
    for each in state["open"]:
        del each["missing"]
    again = server(4, SynchronousPacing(0.5))
    again.restore(tree_from_bytes(tree_to_bytes(state)))
    assert tree_to_bytes(again.state()) == tree_to_bytes(one.state())


def test_who_is_patient_tells_of_attempts_in_vain_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ATTEMPTS", 5)
    told: list[str] = []
    one = server(2, patient=True, tell=told.append)
    one.present = set()
    for _ in range(100):
        one.tick(one.wake if math.isfinite(one.wake) else 0.0)
    assert one.unsuccessful_attempts == 100
    assert [text.split(" attempts")[0] for text in told] == [
        "no client answered in 10",
        "no client answered in 100",
    ]
    asked = assigned(one.check_in(0, 0.0)) + assigned(one.check_in(1, 0.0))
    for each in asked:
        tickets = combines(one.update(each.ticket, 0.0))
    combine(one, tickets or [])
    assert (one.round, one.unsuccessful_attempts) == (1, 0)


def test_rounds_that_end_in_vain_at_their_deadline_are_told_too() -> None:
    told: list[str] = []
    one = server(2, SynchronousPacing(1.0, Uniform(deadline=10.0)), patient=True, tell=told.append)
    for now in range(0, 101, 10):
        one.tick(float(now))
    assert told == [
        "round 1 ended 10 times with fewer than 1 updates at its deadline: "
        "give it more time, select more clients, or set a smaller minimum"
    ]


@pytest.mark.parametrize("patient", [False, True])
def test_rounds_of_nothing_end_a_run_unless_it_is_patient(patient: bool) -> None:
    told: list[str] = []
    one = server(1, patient=patient, tell=told.append)

    def in_vain() -> None:
        (asked,) = assigned(one.tick(0.0))
        tickets = combines(one.update(asked.ticket, 0.0)) or []
        combine(
            one, tickets, 0.0, lambda a: replace(answer(a), delta=[w * math.nan for w in a.weights])
        )

    for _ in range(MOST_EMPTY_MODELS - 1):
        in_vain()
    if not patient:
        with pytest.raises(TooFewClientsError, match=f"in {MOST_EMPTY_MODELS} rounds in a row"):
            in_vain()
        return
    for _ in range(MOST_EMPTY_MODELS + 1):
        in_vain()
    assert [text.split(" rounds")[0] for text in told] == [
        f"every update was rejected in {MOST_EMPTY_MODELS}",
        f"every update was rejected in {2 * MOST_EMPTY_MODELS}",
    ]


# In whatever order


PACINGS: dict[str, Pacing] = {
    "rounds": SynchronousPacing(0.5, Uniform(1.4, 20.0, 2)),
    "by size": SynchronousPacing(0.4, Weighted(1.0, 20.0)),
    "poisson": SynchronousPacing(0.3, Poisson(1.2, 20.0)),
    "asynchronous": asynchronous(3),
    "stale": asynchronous(1, 2),
    "buffered": BufferedPacing(4, 3),
}
KINDS = (
    *("update", "update", "missing", "missing", "back", "failed", "expired", "tick"),
    *("check_in", "arrive", "leave", "combine"),
)
EVENTS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 100)), max_size=60)


def told(one: Coordinator, kind: str, number: int, now: float) -> list[Any]:
    """Tells it of one event. number: draws the ticket, the client and the examples."""
    ticket, client = number % (one.tickets + 2), number % CLIENTS
    simple: dict[str, Callable[[], list[Any] | None]] = {
        "update": lambda: one.update(ticket, now),
        "missing": lambda: one.missing(ticket, now),
        "back": lambda: one.back(ticket, now),
        "failed": lambda: one.failed(ticket, "gone", now),
        "expired": lambda: one.expired(ticket, now),
        "tick": lambda: one.tick(now),
        "check_in": lambda: one.check_in(client, now, 50 + number % 9),
        "arrive": lambda: one.arrive(client),
        "leave": lambda: one.leave(client),
        "combine": lambda: None if not one.combining else made(one, now),
    }
    return simple[kind]() or []


def made(one: Coordinator, now: float) -> list[Any]:
    combine(one, one.combining, now)
    return one.tick(now)


def plain(actions: list[Any]) -> list[Any]:
    """Actions as values that can be compared."""
    return [
        ("assign", a.assignment.ticket, a.assignment.client, a.assignment.turn)
        if isinstance(a, Assign)
        else a
        for a in actions
    ]


def twin(one: Coordinator, pacing: Pacing) -> Coordinator:
    again = server(CLIENTS, pacing, answer_timeout=20.0, patient=True)
    again.restore(tree_from_bytes(tree_to_bytes(one.state())))
    return again


@pytest.mark.parametrize("pacing", PACINGS.values(), ids=list(PACINGS))
@given(events=EVENTS, known=st.booleans())
@example(
    events=[("tick", 1), ("missing", 0), ("check_in", 1), ("update", 1), ("back", 0), ("tick", 1)],
    known=False,
)
def test_in_whatever_order_clients_come_and_go(
    pacing: Pacing, events: list[tuple[str, int]], known: bool
) -> None:
    one, now = server(CLIENTS, pacing, answer_timeout=20.0, patient=True), 0.0
    one.present = set() if known else None
    comebacks, most_tickets = set[int](), 0
    for kind, number in events:
        now = max(now, one.wake) if number % 2 and math.isfinite(one.wake) else now + 1.0
        ticket = number % (one.tickets + 2)
        held = one.open.get(ticket)
        if kind in ("back", "update") and held is not None and held.missing:
            comebacks.add(ticket)
        waited = one.waits_for(ticket)
        again = twin(one, pacing)
        busy = set(one.busy) if kind not in ("update", "failed", "combine") else set()
        actions = told(one, kind, number, now)
        assert plain(actions) == plain(told(again, kind, number, now))
        assert tree_to_bytes(one.state()) == tree_to_bytes(again.state())

        if kind == "update":
            reasons = [a.reason for a in actions if isinstance(a, Refuse) and a.ticket == ticket]
            # It may be the one that shows that the deadline has passed with too few.
            assert waited == (reasons in ([], ["the round was begun again"]))
        for asked in assigned(actions):
            assert asked.ticket >= most_tickets, "no ticket is given twice"
            assert asked.client not in busy
        most_tickets = one.tickets
        working = {t: each for t, each in one.open.items() if not each.reported}
        clients = [each.assignment.client for each in working.values()]
        assert len(clients) == len(set(clients))
        if one.synchronous:
            all_open = [each.assignment.client for each in one.open.values()]
            assert len(all_open) == len(set(all_open))
        assert all(one.busy[each.assignment.client] == t for t, each in working.items())
        present = [t for t, each in working.items() if not each.missing]
        assert len(set(present) - comebacks) <= one.asks
        tickets = one.combining
        in_rounds = {one.assignment(t).client for t in tickets}
        assert not one.synchronous or len(in_rounds) == len(tickets)
        if kind == "tick" and one.synchronous:
            assert tickets or one.deadline > now, "a round ends, or begins again, in time"

    # Whatever was open, ends.
    if one.combining:
        combine(one, one.combining, now)
    left = [t for t, each in one.open.items() if not each.reported]
    now += 20.0
    one.tick(now)
    if one.combining:
        combine(one, one.combining, now)
    if not one.synchronous:
        for ticket in left:
            one.expired(ticket, now)
    assert not set(left) & set(one.open)
    assert bool(model_of(one).isfinite().all())
