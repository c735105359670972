"""Loops of training by DistributedDataParallel on ranks, beside the same loop on one process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.contracts.world import RankContext
from dure.parallel import DistributedDataParallel
from dure.worlds.backend import Backend

FEATURES, CLASSES = 6, 3

Batch = tuple[Tensor, Tensor]


def on_ranks(
    ranks: int,
    program: Callable[[RankContext], Any],
    backend: Backend = "dure",
    deadline: float = 20,
) -> list[Any]:
    """What `program` returns on every rank, in order of rank."""

    def gathered(context: RankContext) -> list[Any]:
        return [
            pickle.loads(part)
            for part in context.group.gather_bytes(pickle.dumps(program(context)))
        ]

    result: list[Any] = dure.Processes(ranks, deadline=deadline, backend=backend).run(
        gathered, lambda event: None
    )
    return result


def network() -> nn.Module:
    """215 parameters in float64, the same ones on every rank."""
    torch.manual_seed(1)
    layers = [
        nn.Linear(FEATURES, 12),
        nn.Tanh(),
        nn.Linear(12, 8),
        nn.Tanh(),
        nn.Linear(8, CLASSES),
    ]
    return nn.Sequential(*layers).double()


def batches(count: int, examples: int) -> list[Batch]:
    """Joint batches."""
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(examples, FEATURES, generator=generator, dtype=torch.float64),
            torch.randint(0, CLASSES, (examples,), generator=generator),
        )
        for _ in range(count)
    ]


def part(batch: Batch, context: RankContext) -> Batch:
    """This rank's."""
    inputs, targets = (each.tensor_split(context.group.size)[context.group.rank] for each in batch)
    return inputs, targets


def train(
    model: nn.Module,
    joint: Iterable[Batch],
    loss: Callable[[nn.Module, Batch], Tensor] = lambda model, batch: F.cross_entropy(
        model(batch[0]), batch[1]
    ),
    clip: float | None = None,
) -> None:
    """SGD with momentum."""
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9
    )
    for batch in joint:
        optimizer.zero_grad()
        loss(model, batch).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def vector(model: nn.Module) -> Tensor:
    """All weights and buffers."""
    return torch.cat([value.detach().double().reshape(-1) for value in model.state_dict().values()])


def distance(one: nn.Module, other: nn.Module) -> float:
    return float((vector(one) - vector(other)).abs().max())


def both(
    context: RankContext,
    make: Callable[[], nn.Module] = network,
    steps: int = 4,
    loss: Callable[[nn.Module, Batch], Tensor] | None = None,
    clip: float | None = None,
    **options: Any,
) -> tuple[float, bytes]:
    """How far the ranks' model is from one process's after the same batches, and the bits of this
    rank's."""
    alone = make()
    model = DistributedDataParallel(copy.deepcopy(alone), context.group, **options)
    joint = batches(steps, 4 * context.group.size)
    more = {} if loss is None else {"loss": loss}
    train(alone, joint, clip=clip, **more)
    train(model, [part(batch, context) for batch in joint], clip=clip, **more)
    return distance(model.module, alone), vector(model.module).numpy().tobytes()
