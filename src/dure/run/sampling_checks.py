"""Check that a strategy honours the sampling that a task's data request.

The strategy decides which rank trains on which examples. The owner of the data may request a
sampler, a batch size or a stream. A strategy that supports the request (`Strategy.samples`)
honours it; every other strategy refuses the task.
"""

from __future__ import annotations

import torch

from dure.contracts.own_loss import OwnLoss
from dure.contracts.strategy import Strategy
from dure.contracts.task import Task
from dure.contracts.world import Kind
from dure.data.datasets import DatasetExamples
from dure.data.examples import Examples
from dure.data.sampling import SamplingRequest
from dure.data.streams import StreamExamples
from dure.errors import DureError
from dure.randomness.seeds import generators_state, restore_generators


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
