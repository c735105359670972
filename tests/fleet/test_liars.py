"""Who lies."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.fleet.malicious import attacker_count, malicious_clients


@given(
    st.integers(1, 100),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 9),
    st.none() | st.integers(0, 9),
)
def test_exactly_the_share_lies_and_every_way_of_asking_says_the_same(clients, share, seed, turn):
    lying = malicious_clients(clients, share, seed, turn)
    assert len(lying) == attacker_count(clients, share) == round(share * clients)
    members = list(lying)
    assert members == sorted(set(members))
    assert len(members) == len(lying)
    assert members == [client for client in range(clients) if client in lying]


@given(st.integers(1, 100), st.data())
def test_a_count_is_taken_as_it_is(clients, data):
    attackers = data.draw(st.integers(1, clients))
    assert (
        len(list(malicious_clients(clients, attackers, 0)))
        == attackers
        == len(malicious_clients(clients, float(attackers), 0))
    )


def test_of_a_million_clients_a_tenth_lies_without_a_list_of_them():
    lying = malicious_clients(1_000_000, 0.1, 0)
    assert len(lying) == 100_000
    asked = sum(client in lying for client in range(0, 1_000_000, 250))
    assert abs(asked - 400) < 100


def test_the_same_lie_in_the_whole_run_unless_drawn_anew_in_every_turn():
    assert list(malicious_clients(50, 5, 0)) == list(malicious_clients(50, 5, 0))
    drawn = [tuple(malicious_clients(50, 5, 0, turn)) for turn in range(20)]
    assert len(set(drawn)) > 15
    often = Counter(client for turn in range(2_000) for client in malicious_clients(10, 3, 0, turn))
    assert all(abs(often[client] - 600) < 110 for client in range(10))


def test_another_seed_has_other_liars():
    assert len({tuple(malicious_clients(50, 5, seed)) for seed in range(20)}) > 15


@pytest.mark.parametrize(
    ("attackers", "complaint"),
    [
        (-1, "not -1"),
        (1.5, "not 1.5"),
        (math.nan, "not nan"),
        (math.inf, "not inf"),
        (11, "the run has 11 attackers"),
    ],
)
def test_what_is_no_number_of_clients_is_refused(attackers, complaint):
    with pytest.raises(ValueError, match=complaint):
        malicious_clients(10, attackers, 0)
