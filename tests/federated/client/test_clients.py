"""Clients on a network are told by anybody: what cannot be right is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dure
from dure.contracts.fresh_model import seeded_model
from dure.federated.algorithm import AlgorithmInputs
from dure.federated.builders import build_clients
from dure.protocol.messages import Assignment, Failure, Update, nbytes
from dure.tensors.flat import FlatParameters
from small import network, small_task


def asked(client: int, value: float = 0.1) -> Assignment:
    weights = [torch.full_like(part, value) for part in FlatParameters(network()).copy()]
    return Assignment(
        ticket=7,
        client=client,
        round=0,
        turn=0,
        weights=weights,
        buffers=[],
        nbytes=nbytes(weights),
    )


def clients_of(strategy: Any, task: dure.Task) -> Any:
    return build_clients(strategy, task, seeded_model(task, 0), dure.Simulated(engine="loop"), 0)


@pytest.mark.parametrize("client", [-1, 3, 1_000])
def test_an_assignment_for_nobody_is_refused(client: int) -> None:
    clients = clients_of(dure.FedAvg(clients=3), small_task())
    with pytest.raises(ValueError, match=f"there is no client {client}: there are 3 clients"):
        clients.receive(asked(client))


@pytest.mark.parametrize(
    ("value", "failure"),
    [(float("nan"), "its first loss is not finite"), (1e308, "its first loss is not finite")],
)
@pytest.mark.parametrize("strategy", [dure.FedAvg(clients=3), dure.Ditto(clients=3)])
def test_a_client_that_fails_says_so_and_keeps_what_it_had(
    strategy: Any, value: float, failure: Failure
) -> None:
    clients = clients_of(strategy, small_task())
    answer = clients.receive(asked(1, value))
    assert isinstance(answer, Update)
    assert (answer.ticket, answer.client, answer.failure) == (7, 1, failure)
    assert (answer.samples, list(answer.delta), list(answer.buffers)) == (0, [], [])
    assert not clients.memories


def test_a_part_of_another_shape_than_the_model_s_is_not_taken_for_it() -> None:
    model = network()
    weights = FlatParameters(model).copy()
    algorithm = dure.FedPer(clients=3).algorithm(AlgorithmInputs(model, weights, 3, 0.1))
    shared = algorithm.shared(weights)
    for wrong in ([torch.zeros(3).double()], [*algorithm.initial, torch.zeros(1).double()]):  # type: ignore[attr-defined]
        assert torch.equal(algorithm.whole(shared, wrong)[0], weights[0])
    right = [torch.zeros_like(part) for part in algorithm.initial]  # type: ignore[attr-defined]
    assert not torch.equal(algorithm.whole(shared, right)[0], weights[0])
