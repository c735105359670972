"""Check that a strategy supports the training options of a task, and the sampling of its data.

The strategy decides which rank trains on which examples. The owner of the data may request a
sampler, a batch size or a stream. A strategy that supports the request (`Strategy.samples`)
honours it; every other strategy refuses the task.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dure.contracts.adapter import LoRA
from dure.contracts.own_loss import OwnLoss
from dure.contracts.strategy import Strategy
from dure.contracts.task import Task
from dure.contracts.training_options import PARTS, Part, check_unfrozen, training_options_of
from dure.contracts.world import Kind, World
from dure.data.datasets import DatasetExamples
from dure.data.examples import Examples
from dure.data.sampling import SamplingRequest
from dure.data.streams import StreamExamples
from dure.errors import DureError
from dure.randomness.seeds import generators_state, restore_generators
from dure.tasks.loss_scaling import check_weights
from dure.tasks.parts import parts_of


def check_data_asks(task: Task, strategy: Strategy, kind: Kind) -> None:
    """Raise ValueError if the strategy cannot sample as the data request in such a world."""
    sampling = task.train.sampling
    size = strategy.batch_size
    if sampling.batch_size is not None and sampling.batch_size != size:
        raise ValueError(
            f"the DataLoader has batches of {sampling.batch_size}, and {strategy.name} has "
            f"batch_size={size}: give the strategy the same batch_size, or give the task the "
            "dataset itself"
        )
    # The simulation of a strategy of ranks draws batches of its own.
    able = (
        strategy.traits.samples
        if kind == strategy.traits.kind or kind != "clients"
        else frozenset()
    )
    for way in sorted(_asked(task) - able):
        raise ValueError(
            f"{strategy.name} itself decides which client or rank trains on which examples and in "
            f"which order, so it cannot use {way}: give the dataset itself, or use a system with "
            "joint batches, such as data-parallel"
        )
    for way in sorted(_asked(task)):
        if strategy.run_traits.uses_poisson_sampling:
            raise ValueError(
                f"differential privacy draws its own batches and cannot use {way}: give the "
                "dataset itself"
            )
    if sampling.drop_last and size is not None and len(task.train) < size:
        raise ValueError(
            f"drop_last drops all {len(task.train)} examples, because a batch has {size}"
        )
    if isinstance(task.loss, OwnLoss):
        why = strategy.cannot("own_loss", kind)
        if why is not None:
            raise ValueError(
                f"{type(strategy).__name__} cannot train with a model's own loss: {why}"
            )
        _check_counts(task.loss, task.train)


def check_drawn(task: Task, strategy: Strategy, workers: int | None, seed: int) -> None:
    """Raise ValueError if a rank or client would have no example of positive weight."""
    if task.train.sampling.weights is not None and len(task.train):
        for part in strategy.parts(task, seed, workers):
            task.train.sampling.of(part)


def _check_counts(loss: OwnLoss, train: Examples) -> None:
    """Raise ValueError if the model's own loss cannot count the labels of the first example."""
    if not isinstance(train, DatasetExamples):
        return
    # Reading an example may draw random numbers, and the run must not depend on this check.
    before = generators_state()
    try:
        _, labels = train.batch(torch.tensor([train.first]))
    except DureError:
        # A bad example raises its error during training, with more context.
        return
    finally:
        restore_generators(before)
    loss.count(labels)


def _asked(task: Task) -> frozenset[SamplingRequest]:
    """Return the requested kinds of sampling; an empty set if the strategy is free to choose."""
    ways: frozenset[SamplingRequest] = task.train.sampling.asks
    return ways | {"a stream"} if isinstance(task.train, StreamExamples) else ways


def _asking(task: Task) -> list[Task]:
    """Return the task and its parts, which may differ in their learning options."""
    return [task, *(part for _, part in parts_of(task))]


def check_can(task: Task, strategy: Strategy, world: World) -> None:
    """Raise ValueError for the first learning option that the strategy does not support here."""
    for one in _asking(task):
        _check_ranks(one.adapter, world)
        for part, value in training_options_of(one).items():
            why = _unserved(part, strategy) if world.serves else None
            why = why or strategy.cannot(part, world.kind)
            if why is not None:
                raise ValueError(
                    f"{type(strategy).__name__} cannot train with {part}={value!r}: {why}; leave "
                    f"it out"
                )


def _check_ranks(adapter: LoRA | None, world: World) -> None:
    """Raise ValueError for ranks of clients in a world without clients."""
    if adapter is not None and adapter.has_unlike_ranks and world.kind != "clients":
        raise ValueError(
            f"LoRA(rank={adapter.rank}) has a rank for each client of a federation: give one rank"
        )


def _unserved(part: Part, strategy: Strategy) -> str | None:
    """Return why clients on a network cannot honour the option; None if they can.

    See `dure.tasks.task_summary`.
    """
    if strategy.traits.trains_at_server:
        return "sites that train parts of one model over a network do not compare it"
    if part == "compile":
        return "each site of a network compiles its own model: set it in the client's task"
    return None


def check_learned(task: Task, model: nn.Module) -> None:
    """Check that the model has the parameters that the learning options of the task need.

    Raises ValueError for an unknown name, and for weights that loss scaling cannot protect.
    """
    check_unfrozen(task, model)
    if task.precision == "fp16":
        check_weights(model)


def learning_of(task: Task) -> dict[str, Any]:
    """Return the learning options of the task for config.json; {} if the task sets none."""
    return {str(name): value for name, value in training_options_of(task).items()}


def with_learning(task: Task, asked: Mapping[str, Any]) -> Task:
    """Return a task that was loaded again, with the learning options of its config.json.

    Raises ValueError for a name that is no learning option.
    """
    # Only learning options: config.json is data, and data must not name files to read weights from.
    unknown = sorted(set(asked) - set(PARTS))
    if unknown:
        raise ValueError(f"this version of dure does not know the training option {unknown[0]!r}")
    return dataclasses.replace(task, **asked) if asked else task
