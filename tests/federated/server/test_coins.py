"""Rounds of coins: who is in one depends on a coin and on the client itself, and on nobody else."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from driven import assigned, combine, combines, server

import dure
from dure.federated.server.coordinator import RETRY
from dure.federated.server.pacing import SynchronousPacing
from dure.federated.server.poisson_sampling import poisson_sampler
from dure.federated.server.sampling import PerClientPoisson, parse
from dure.protocol.messages import Refuse
from dure.randomness.secret import Secret
from dure.record.checkpoint import tree_from_bytes, tree_to_bytes
from small import small_task


def coordinator(*chosen: Sequence[int], deadline: float = math.inf, clients: int = 6):  # type: ignore[no-untyped-def]
    """A coordinator whose rounds have these clients; more rounds have nobody."""

    def sample_clients(number: int) -> Sequence[int]:
        return chosen[number] if number < len(chosen) else []

    return server(
        clients,
        SynchronousPacing(0.5, PerClientPoisson(deadline=deadline)),
        sample_clients=sample_clients,
    )


def test_those_are_asked_whose_coins_say_so_and_no_others() -> None:
    one = coordinator([1, 4])
    assert [asked.client for asked in assigned(one.tick(0.0))] == [1, 4]
    assert one.tick(1.0) == []


def test_nobody_comes_in_the_place_of_one_that_fails_or_falls_silent() -> None:
    one = coordinator([1, 3, 4], deadline=100.0)
    first, second, third = assigned(one.tick(0.0))
    assert one.failed(first.ticket, "dropped out", 1.0) == []
    assert one.missing(second.ticket, 2.0) == []
    # The silent one is waited for: else it would be in it or not as the third is fast.
    assert one.update(third.ticket, 3.0) == []
    assert combines(one.tick(100.0)) == [third.ticket]
    assert combine(one, [third.ticket]).clients == [4]


def test_a_silent_client_that_comes_back_in_time_counts() -> None:
    one = coordinator([1, 3], deadline=100.0)
    first, second = assigned(one.tick(0.0))
    one.missing(first.ticket, 1.0)
    one.update(second.ticket, 2.0)
    one.back(first.ticket, 3.0)
    assert combines(one.update(first.ticket, 4.0)) == [first.ticket, second.ticket]


def test_a_round_ends_early_only_when_all_who_were_asked_have_answered() -> None:
    one = coordinator([0, 1, 2])
    asked = assigned(one.tick(0.0))
    assert one.update(asked[2].ticket, 1.0) == []
    assert one.update(asked[0].ticket, 2.0) == []
    assert combines(one.update(asked[1].ticket, 3.0)) == [each.ticket for each in asked]


def test_who_is_late_is_refused_and_the_round_is_not_begun_again() -> None:
    one = coordinator([0, 1], deadline=10.0)
    first, second = assigned(one.tick(0.0))
    one.update(first.ticket, 1.0)
    assert combines(one.tick(10.0)) == [first.ticket]
    combine(one, [first.ticket], 10.0)
    assert one.round == 1
    assert one.update(second.ticket, 11.0) == [Refuse(second.ticket, 1, "it came too late")]


def test_a_round_of_nobody_makes_a_model_at_once() -> None:
    one = coordinator([], [2])
    assert combines(one.tick(0.0)) == []
    assert combine(one, []).clients == []
    assert one.round == 1
    assert [asked.client for asked in assigned(one.tick(0.0))] == [2]


def test_a_round_whose_clients_are_all_away_lasts_a_while() -> None:
    # Else a night in which all are away would be hundreds of rounds of nothing but noise.
    one = coordinator([2])
    (asked,) = assigned(one.tick(0.0))
    assert one.failed(asked.ticket, "offline", 0.0) == []
    assert one.wake == RETRY
    assert combines(one.tick(RETRY)) == []


def test_where_nobody_is_there_no_coin_is_tossed() -> None:
    tossed = []

    def sample_clients(number: int) -> list[int]:
        tossed.append(number)
        return [0, 1]

    one = server(3, SynchronousPacing(0.5, PerClientPoisson()), sample_clients=sample_clients)
    one.arrive(2)
    one.leave(2)
    assert one.tick(0.0) == []
    assert not tossed
    # Who comes is asked if its coin says so; who is away stays out, though it comes later.
    assert [asked.client for asked in assigned(one.check_in(1, 5.0))] == [1]
    assert one.check_in(0, 6.0) == []


def test_one_at_work_for_a_round_that_is_over_is_not_asked_twice() -> None:
    one = coordinator([0, 1], [0, 2], deadline=10.0)
    slow, fast = assigned(one.tick(0.0))
    one.update(fast.ticket, 1.0)
    combine(one, combines(one.tick(10.0)) or [], 10.0)
    assert [asked.client for asked in assigned(one.tick(10.0))] == [2]
    assert isinstance(one.update(slow.ticket, 11.0)[0], Refuse)


def test_a_state_in_the_middle_of_a_round_goes_on_with_the_same_clients() -> None:
    one = coordinator([0, 3])
    first, second = assigned(one.tick(0.0))
    one.update(second.ticket, 1.0)
    other = coordinator([5])  # it is not asked again
    other.restore(tree_from_bytes(tree_to_bytes(one.state())))
    assert other.tick(2.0) == []
    assert combines(other.update(first.ticket, 3.0)) == [first.ticket, second.ticket]


def test_each_coin_falls_with_its_probability_and_is_tossed_once() -> None:
    clients, rate, rounds = 2000, 0.1, 20
    made: dict[str, dict[str, object]] = {}

    def once(what: str, make):  # type: ignore[no-untyped-def]
        return made.setdefault(what, make())

    sample_clients = poisson_sampler(Secret.system(), once, rate, clients)
    drawn = [sample_clients(number) for number in range(rounds)]
    assert [sample_clients(number) for number in range(rounds)] == drawn
    counts = torch.tensor([len(chosen) for chosen in drawn], dtype=torch.float64)
    deviation = math.sqrt(clients * rate * (1 - rate))
    # Six deviations of the mean: by chance once in 10^9.
    assert abs(float(counts.mean()) - clients * rate) < 6 * deviation / math.sqrt(rounds)
    assert len({len(chosen) for chosen in drawn}) > 1
    simulated = poisson_sampler(Secret.simulated(3), lambda what, make: make(), rate, clients)
    assert simulated(5) == simulated(5) != simulated(6)


def test_where_most_are_away_those_who_are_there_are_not_asked_more_often() -> None:
    # A fifth is there, all along: Poisson sampling fills up each round with them.
    def turns(selection: str) -> float:
        run = dure.train(
            small_task(n=200),
            dure.FedAvg(clients=100, fraction=0.1, selection=selection),
            dure.Simulated(availability="probability:0.2:1e9"),
            dure.Stop(rounds=30),
            evaluate_every=30,
        )
        taken = dict(run.summary["facts"][0]["turns"])
        return max(taken.values()) / 30

    assert turns("coins") < 0.35 < turns("poisson")


def test_asking_more_or_beginning_again_is_refused() -> None:
    assert str(parse("coins:1:60")) == "coins:1.0:60.0"
    for text in ("coins:1.3", "coins:1:60:8"):
        with pytest.raises(ValueError, match="asked more often than their coins determine"):
            parse(text)


def test_a_pacing_of_coins_needs_somebody_who_tosses_them() -> None:
    with pytest.raises(ValueError, match="a selection by coins"):
        server(3, SynchronousPacing(0.5, PerClientPoisson()))
