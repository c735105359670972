"""Which clients take part in a round."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.federated.sampling import clients_per_round, uniform


@given(st.integers(0, 99), st.integers(0, 99), st.integers(1, 60), st.floats(0.001, 1.0))
def test_a_round_s_clients_are_a_pure_function_without_replacement(seed, round, clients, fraction):
    chosen = uniform(seed, round, clients, fraction)
    torch.rand(3)
    assert chosen == uniform(seed, round, clients, fraction)
    assert len(chosen) == clients_per_round(clients, fraction)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(range(clients))


@pytest.mark.parametrize(
    ("clients", "fraction", "expected"),
    [(100, 0.1, 10), (100, 0.001, 1), (10, 1.0, 10), (1, 0.1, 1), (10, 0.29, 3), (3, 0.7, 2), (7, 1 / 7, 1)],
)
def test_a_round_has_max_of_c_k_and_1_clients(clients, fraction, expected):
    assert clients_per_round(clients, fraction) == expected


def test_rounds_and_seeds_draw_anew_and_everybody_has_a_turn():
    assert len({tuple(uniform(0, round, 50, 0.1)) for round in range(10)}) > 5
    assert uniform(0, 0, 50, 0.1) != uniform(1, 0, 50, 0.1)
    turns = [client for round in range(200) for client in uniform(0, round, 10, 0.3)]
    assert set(turns) == set(range(10))
    assert max(map(turns.count, range(10))) < 2 * min(map(turns.count, range(10)))
