"""Natural owners of examples: what may be a key, and how clients are called after it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import dure
from dure.data.keys import client_label, keys_of
from dure.data.partition import NaturalKey
from small import small_task

N = 12
OWNERS = [number % 3 for number in range(N)]


def owned(keys: Any) -> dure.Examples:
    return dure.Examples(torch.zeros(N), torch.zeros(N), keys)


def divided(keys: Any) -> list[list[int]]:
    return [part.tolist() for part in NaturalKey().divide(None, owned(keys))]


@pytest.mark.parametrize(
    "keys",
    [
        OWNERS,
        tuple(OWNERS),
        torch.tensor(OWNERS),
        torch.tensor(OWNERS, dtype=torch.uint8),
        list(torch.tensor(OWNERS)),
        np.array(OWNERS),
        list(np.array(OWNERS)),
        np.array(OWNERS, dtype=object),
        torch.tensor(OWNERS, dtype=torch.float64),
        [str(owner) for owner in OWNERS],
        np.array([str(owner) for owner in OWNERS]),
        list(np.array([str(owner) for owner in OWNERS])),
        [str(owner).encode() for owner in OWNERS],
        [(owner, "ward") for owner in OWNERS],
    ],
)
def test_however_keys_are_given_equal_ones_are_one_client(keys: Any) -> None:
    assert divided(keys) == [list(range(client, N, 3)) for client in range(3)]
    assert len(NaturalKey().names(None, keys) or ()) == 3


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([float("nan"), *[1.0] * (N - 1)], "example 0 has the key nan, which is not a valid key"),
        ([*["a"] * (N - 1), None], "example 11 has the key None, which is not a valid key"),
        (torch.full((N,), float("inf")), "example 0 has the key inf"),
        ([0, "0"] * (N // 2), "keys have different types .int, str."),
        ([True, 1] * (N // 2), "keys have different types .bool, int."),
        ([[0]] * N, "keys have to be texts or numbers"),
        ([(0, None)] * N, "keys have to be texts or numbers"),
        ([(0, "a"), ("a", 0)] * (N // 2), "keys have to be texts or numbers"),
        (list(torch.zeros(N, 2)), "keys have to be texts or numbers"),
    ],
)
def test_keys_that_are_none_are_refused_where_they_are_used(keys: Any, message: str) -> None:
    data = small_task(n=N).train
    task = small_task(train=dure.Examples(data.inputs, data.targets, keys))  # nobody asks yet
    dure.train(task, dure.FedAvg(clients=2), stop=dure.Stop(rounds=1))
    with pytest.raises(ValueError, match=message) as refused:
        dure.train(task, dure.FedAvg(clients=None, partition="natural-key"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("keys", [torch.zeros(N, 1), np.zeros((1, N)), "a" * N, set(range(N))])
def test_what_does_not_say_which_example_has_which_key_is_refused(keys: Any) -> None:
    with pytest.raises(ValueError, match="keys"):
        keys_of(keys)


@pytest.mark.parametrize("keys", [OWNERS, [str(owner) for owner in OWNERS]])
def test_a_wrong_number_of_clients_is_told_with_names(keys: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"3 natural clients \(0, 1, 2\), not 10: give clients="):
        NaturalKey().divide(10, owned(keys))


def test_clients_are_named_where_the_data_name_them() -> None:
    names = NaturalKey().names(None, ["10", "9", "9"])
    assert names == ["10", "9"]
    assert client_label(1, names) == 'client 1 ("9")'
    assert client_label(1, None) == "client 1"
    assert NaturalKey().names(1, ["10", "9"]) is None, "one client has the data of both"
    assert NaturalKey().names(None, [10, 9]) == ["9", "10"]
