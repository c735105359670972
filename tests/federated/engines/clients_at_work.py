"""Jobs of many clients, and the plain loop that says what should come of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import dure
from dure.data.batches import Batches
from dure.federated.engines.job import ClientEngine, ClientJob, JobResult
from dure.tensors.flat import FlatParameters, views_of
from small import network


def weights_of(model: Callable[[], nn.Module] = network, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    return FlatParameters(model()).copy()


def jobs_of(
    sizes: Sequence[int], steps: Sequence[int], weights: list[Tensor], **settings: Any
) -> list[ClientJob]:
    """Client k has the `sizes[k]` examples after those of client k-1, and makes `steps[k]`
    steps."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    settings = {"round": 2, "buffers": [], "first_step": 3, **settings}
    settings.setdefault("turn", settings["round"])
    return [
        ClientJob(
            client, indices=torch.arange(end - size, end), weights=weights, steps=count, **settings
        )
        for client, (size, end, count) in enumerate(zip(sizes, ends, steps, strict=True))
    ]


def plain(
    task: dure.Task, job: ClientJob, batch_size: int | None, seed: int
) -> tuple[Tensor, float]:
    """A client's training as anyone would write it: (the update in one vector, the mean loss)."""
    model = task.model()
    parameters = list(model.parameters())
    with torch.no_grad():
        for parameter, value in zip(parameters, views_of(job.weights[0], parameters), strict=True):
            parameter.copy_(value)
    optimizer = task.optimizer(model.parameters())
    batches = Batches(len(job.indices), batch_size, seed, job.client)
    total, samples = 0.0, 0
    for step in range(job.first_step, job.first_step + job.steps):
        inputs, targets = task.train.batch(job.indices[batches.at(step)])
        optimizer.zero_grad()
        loss = task.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(targets)
        samples += len(targets)
    return torch.cat([p.detach().reshape(-1) for p in parameters]) - job.weights[0], total / samples


def vectors(trained: Sequence[JobResult]) -> Tensor:
    """The updates, a row each."""
    return torch.stack([each.delta[0] for each in trained])


def same(first: Sequence[JobResult], second: Sequence[JobResult]) -> bool:
    """To the bit."""
    return torch.equal(vectors(first), vectors(second)) and [
        (t.loss, t.samples) for t in first
    ] == [(t.loss, t.samples) for t in second]


def results(engine: ClientEngine, jobs: Sequence[ClientJob]) -> list[JobResult]:
    return list(engine.train(jobs))
