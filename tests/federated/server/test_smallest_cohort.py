"""No model is made of updates of fewer clients than one of them asks for, whatever happens."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from driven import answer, assigned, model_of, server
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from dure.federated.aggregate import Aggregator, Krum, Mean, Median, parse
from dure.federated.server.coordinator import Coordinator
from dure.federated.server.pacing import BufferedPacing, Pacing, SynchronousPacing, asynchronous
from dure.federated.server.sampling import PerClientPoisson, Poisson, Uniform
from dure.federated.server.smallest_cohort import cohort_objection
from dure.protocol.carrier import Assign, Combine
from dure.protocol.messages import Assignment
from dure.record.checkpoint import tree_from_bytes, tree_to_bytes


class Driver:
    """Drives a coordinator by chance: clients come, answer, fail, fall silent, come back, and send
    what cannot be. Says of how many clients each model was made."""

    def __init__(self, one: Coordinator, draws: random.Random) -> None:
        self.one = one
        self.draws = draws
        self.now = 0.0
        self.work: dict[int, Assignment] = {}
        self.silent: dict[int, Assignment] = {}
        self.cohorts: list[tuple[int, int]] = []
        self.told: list[str] = []
        one.patient = True
        one.tell = self.told.append

    def do(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, Assign):
                self.work[action.assignment.ticket] = action.assignment
            elif isinstance(action, Combine):
                self.combine(action.tickets)

    def combine(self, tickets: list[int]) -> None:
        before = model_of(self.one).clone()
        for ticket in tickets:
            asked = self.one.assignment(ticket)
            update = answer(asked)
            if self.draws.random() < 0.2:
                bad = [torch.full_like(weight, float("nan")) for weight in update.delta]
                update = replace(update, delta=bad)
            self.one.fold(update)
        result = self.one.finish(self.now)
        clients = set(result.clients)
        if torch.equal(model_of(self.one), before):
            return
        self.cohorts.append((len(clients), self.one.fewest))

    def step(self) -> None:
        self.now += self.draws.choice([0.0, 1.0, 40.0])
        one = self.one
        what = self.draws.randrange(7)
        client = self.draws.randrange(len(one.sizes))
        at_work = list(self.work)
        ticket = self.draws.choice(at_work) if at_work else None
        if what == 0 and client not in one.busy:
            self.do(one.check_in(client, self.now))
        elif what == 1 and client not in one.busy:
            one.leave(client)
        elif what == 2 and ticket is not None:
            self.work.pop(ticket)
            self.do(one.failed(ticket, "it broke", self.now))
        elif what == 3 and ticket is not None:
            self.silent[ticket] = self.work.pop(ticket)
            self.do(one.missing(ticket, self.now))
        elif what == 4 and self.silent:
            ticket, asked = self.silent.popitem()
            self.work[ticket] = asked
            self.do(one.back(ticket, self.now))
        elif ticket is not None:
            self.work.pop(ticket)
            self.do(one.update(ticket, self.now))
        self.do(one.tick(self.now))


PACINGS: list[Pacing] = [
    SynchronousPacing(),
    SynchronousPacing(0.5),
    SynchronousPacing(0.2, Uniform(over=1.5, deadline=60.0, minimum=1)),
    SynchronousPacing(0.4, Poisson(deadline=60.0)),
    BufferedPacing(4, 3),
    BufferedPacing(2, 2),
    asynchronous(3),
]


@given(st.sampled_from(PACINGS), st.integers(2, 4), st.randoms(use_true_random=False))
def test_no_model_is_made_of_fewer_clients(
    pacing: Pacing, fewest: int, draws: random.Random
) -> None:
    one = server(6, pacing, answer_timeout=60.0)
    one.present = set()
    driver = Driver(one, draws)
    for number in range(120):
        if number == 30:
            one.require_clients(fewest)
        if number == 70:
            again = server(6, pacing, answer_timeout=60.0)
            again.restore(tree_from_bytes(tree_to_bytes(one.state())))
            assert again.fewest == fewest
            driver.one = one = again
            one.patient, one.tell = True, driver.told.append
        driver.step()
    assert all(clients >= asked for clients, asked in driver.cohorts)


@given(st.sampled_from(PACINGS))
@example(SynchronousPacing())
def test_a_run_of_enough_clients_goes_on(pacing: Pacing) -> None:
    one = server(6, pacing)
    one.require_clients(3)
    driver = Driver(one, random.Random(0))
    driver.draws.random = lambda: 1.0  # type: ignore[method-assign]
    for client in range(6):
        driver.do(one.check_in(client, 0.0))
    for _ in range(60):
        driver.now += 1.0
        if driver.work:
            ticket = next(iter(driver.work))
            driver.work.pop(ticket)
            driver.do(one.update(ticket, driver.now))
        driver.do(one.tick(driver.now))
    assert len(driver.cohorts) >= 3
    assert all(clients >= 3 for clients, _ in driver.cohorts)


def test_a_round_does_not_begin_with_fewer_and_says_so_once() -> None:
    told: list[str] = []
    one = server(3, SynchronousPacing(), patient=True, tell=told.append)
    one.require_clients(2)
    assert one.check_in(0, 0.0) == []
    assert one.tick(100.0) == []
    assert len(assigned(one.check_in(1, 101.0))) == 2
    [sentence] = told
    assert "1 clients are connected" in sentence
    assert "at least 2" in sentence


def test_a_round_that_has_fewer_at_its_deadline_begins_again() -> None:
    one = server(3, SynchronousPacing(1.0, Uniform(deadline=60.0)), patient=True)
    one.require_clients(2)
    for client in range(3):
        one.arrive(client)
    first, *_ = assigned(one.tick(0.0))
    assert one.update(first.ticket, 1.0) == []
    actions = one.tick(61.0)
    assert not any(isinstance(action, Combine) for action in actions)
    assert one.round == 0


def test_what_is_left_after_refusals_is_counted() -> None:
    one = server(3, SynchronousPacing())
    one.require_clients(2)
    asked = assigned(one.tick(0.0))
    [combine] = [action for one_ in asked for action in one.update(one_.ticket, 1.0)]
    before = model_of(one).clone()
    for ticket in combine.tickets:
        update = answer(one.assignment(ticket))
        if ticket:
            update = replace(update, failure="its weights became not finite")
        one.fold(update, computed=True)
    result = one.finish(1.0)
    assert torch.equal(model_of(one), before)
    assert result.clients == []
    assert set(result.refused) == set(combine.tickets)
    assert "1 clients' updates could be combined" in result.refused[0]


def test_one_client_is_no_two_clients_however_often_it_answers() -> None:
    one = server(3, BufferedPacing(3, 3))
    one.require_clients(2)
    one.arrive(0)
    work = assigned(one.tick(0.0))
    tickets = []
    while work:
        tickets.append(work.pop().ticket)
        actions = one.update(tickets[-1], 1.0)
        assert not any(isinstance(action, Combine) for action in actions)
        work += assigned(actions) + assigned(one.tick(100.0 * len(tickets)))
    # It keeps a place free for another.
    assert len(tickets) == 2
    [asked] = assigned(one.check_in(1, 1000.0))
    [combine] = one.update(asked.ticket, 1001.0)
    assert isinstance(combine, Combine)


PRIVATE = SynchronousPacing(1.0, PerClientPoisson())


@pytest.mark.parametrize(
    ("asked", "pacing", "rule", "sums", "said"),
    [
        (10**9, SynchronousPacing(), Mean(), None, "has at most 10 clients"),
        (3, SynchronousPacing(0.2), Mean(), None, "a round of the run has 2"),
        (2, asynchronous(5), Mean(), None, "a model of every 1"),
        (5, BufferedPacing(5, 4), Mean(), None, "a model of every 4"),
        (2, PRIVATE, Mean(), None, "own coin"),
        (4, SynchronousPacing(), Mean(), 3, "a secure sum of the run may have 3"),
        (2, SynchronousPacing(), Krum(2), None, "the updates of 1"),
        (4, SynchronousPacing(), parse("krum:2:3"), None, "the updates of 3"),
        (3, SynchronousPacing(), parse("bucketing:2/krum:1"), None, "the updates of 2"),
        (2, SynchronousPacing(), parse("clipped:1/krum:2"), None, "the updates of 1"),
    ],
)
def test_a_client_that_asks_for_what_cannot_be_is_told_why(
    asked: int, pacing: Pacing, rule: Aggregator, sums: int | None, said: str
) -> None:
    assert said in (cohort_objection(asked, 10, pacing, rule, sums) or "")


@pytest.mark.parametrize(
    ("asked", "pacing", "rule", "sums"),
    [
        (1, asynchronous(5), Krum(2), None),
        (10, SynchronousPacing(), Median(), None),
        (2, SynchronousPacing(0.2), Mean(), None),
        (4, BufferedPacing(5, 4), Mean(), None),
        (8, SynchronousPacing(0.1, Poisson()), Mean(), None),
        (3, PRIVATE, Mean(), 3),
        (3, SynchronousPacing(), parse("krum:2:3"), None),
        (3, SynchronousPacing(), parse("mixing:2/median"), None),
    ],
)
def test_a_client_that_asks_for_what_can_be_is_taken(
    asked: int, pacing: Pacing, rule: Aggregator, sums: int | None
) -> None:
    assert cohort_objection(asked, 10, pacing, rule, sums) is None


def test_a_round_waits_for_others_in_place_of_those_that_are_excluded() -> None:
    told: list[str] = []
    one = server(6, SynchronousPacing(), patient=True, tell=told.append)
    one.require_clients(3)
    for client in range(4):
        one.arrive(client)
    one.exclude(0, "it spoils sums")
    one.exclude(1, "it spoils sums")
    assert one.tick(0.0) == []
    assert one.tick(one.wake) == []
    assert one.assignable_clients == 4
    assert len(told) == 1
    asked = assigned(one.check_in(4, 100.0))
    assert sorted(each.client for each in asked) == [2, 3, 4]
