"""A coordinator that is driven by hand: a small model, and updates that are made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dure.federated.algorithm import Algorithm
from dure.federated.server.combining import RoundResult
from dure.federated.server.coordinator import Coordinator
from dure.federated.server.global_model import GlobalModel
from dure.federated.server.pacing import Pacing, SynchronousPacing
from dure.federated.server.server_optimizer import ServerOptimizer
from dure.protocol.carrier import Assign, Combine
from dure.protocol.messages import Assignment, Update


def server(
    clients: int,
    pacing: Pacing | None = None,
    algorithm: Algorithm | None = None,
    lr: float = 1.0,
    dtype: torch.dtype = torch.float64,
    optimizer: ServerOptimizer | None = None,
    **more: Any,
) -> Coordinator:
    """Weights of 6 and 2 elements; a batch norm's buffers: mean, count of batches, variance.

    more: further arguments of the coordinator.
    """
    draws = torch.Generator().manual_seed(0)
    weights = [torch.randn(n, generator=draws).to(dtype) for n in (6, 2)]
    buffers = [torch.zeros(3, dtype=dtype), torch.tensor(5), torch.ones(3, dtype=dtype)]
    model = GlobalModel(weights, buffers, optimizer=optimizer or ServerOptimizer(lr=lr))
    given = (model, pacing or SynchronousPacing(), algorithm or Algorithm(), [50] * clients)
    return Coordinator(*given, seed=7, **more)


def answer(assignment: Assignment, seed: int = 0) -> Update:
    """A made-up update: of 1 to 50 examples, the numbers of batches seen drawn around 5."""
    draws = torch.Generator().manual_seed(1000 * seed + 7 * assignment.round + assignment.client)
    examples = int(torch.randint(1, 51, (), generator=draws))

    def noise(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=draws).to(tensor.dtype)

    delta = [noise(weight) for weight in assignment.weights]
    buffers = [
        noise(b) if b.is_floating_point() else torch.randint(0, 11, (), generator=draws)
        for b in assignment.buffers
    ]
    return Update(
        *(
            assignment.ticket,
            assignment.client,
            assignment.round,
            examples,
            2 * examples,
            float(examples % 7),
        ),
        *(delta, buffers),
    )


def assigned(actions: list[Any]) -> list[Assignment]:
    return [action.assignment for action in actions if isinstance(action, Assign)]


def combines(actions: list[Any]) -> list[int] | None:
    found = [action.tickets for action in actions if isinstance(action, Combine)]
    assert len(found) <= 1
    return found[0] if found else None


def combine(
    one: Coordinator,
    tickets: list[int],
    now: float = 0.0,
    make: Callable[[Assignment], Update] = answer,
) -> RoundResult:
    for ticket in tickets:
        one.fold(make(one.assignment(ticket)))
    return one.finish(now)


def model_of(one: Coordinator) -> torch.Tensor:
    return torch.cat([t.double().reshape(-1) for t in (*one.model.weights, *one.model.buffers)])
