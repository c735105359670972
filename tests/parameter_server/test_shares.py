"""A push that is a step by itself: its share of the batch, its weight decay, and its rate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from histories import History
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import dure
from dure.collectives.compression import parse
from dure.contracts.fresh_model import seeded_model
from small import examples, small_task, weights_of

RATE = 1e-6
STALE = [1, None]
ADAM = partial(torch.optim.Adam, lr=0.01)


def moved(task: dure.Task, strategy: dure.Strategy) -> Tensor:
    """Return how far one batch of all data moves the weights, for each unit of the rate."""
    start = nn.utils.parameters_to_vector(seeded_model(task, 0).parameters()).detach()
    run = dure.train(task, strategy, dure.Simulated(), dure.Stop(rounds=1))
    return (weights_of(run) - start) / RATE


def servers(staleness: int | None, **fields: Any) -> dure.ParameterServer:
    return dure.ParameterServer(workers=3, batch_size=None, staleness=staleness, **fields)


@pytest.mark.parametrize("staleness", STALE)
@pytest.mark.parametrize(
    ("kind", "times"),
    [
        (torch.optim.SGD, 1.0),
        # The velocity of the first pushes moves the weights again with the later ones.
        (partial(torch.optim.SGD, momentum=0.5), (1 + 1.5 + 1.75) / 3),
        (torch.optim.AdamW, 1.0),
        (partial(torch.optim.NAdam, decoupled_weight_decay=True), 1.0),
    ],
)
def test_a_clock_of_all_workers_decays_the_weights_once(
    kind: Callable[..., torch.optim.Optimizer], times: float, staleness: int | None
) -> None:
    def with_decay(decay: float) -> dure.Task:
        return small_task(n=42, optimizer=partial(kind, lr=RATE, weight_decay=decay))

    task = with_decay(0.0)
    start = nn.utils.parameters_to_vector(seeded_model(task, 0).parameters()).detach()
    decayed = moved(task, servers(staleness)) - moved(with_decay(0.5), servers(staleness))
    assert torch.allclose(decayed, 0.5 * times * start, rtol=0, atol=1e-4)


@pytest.mark.parametrize("staleness", STALE)
def test_a_clock_of_equal_parts_moves_as_far_as_a_step_of_adam(staleness: int | None) -> None:
    inputs, targets = torch.randn(4, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 1])
    train = dure.Examples(inputs.repeat(3, 1), targets.repeat(3))
    task = small_task(train=train, optimizer=partial(torch.optim.Adam, lr=RATE, eps=1e-12))
    alone = dure.train(task, dure.SingleWorker(None), stop=dure.Stop(steps=1))
    run = dure.train(task, servers(staleness), dure.Simulated(), dure.Stop(rounds=1))
    assert torch.allclose(weights_of(run), weights_of(alone), rtol=0, atol=RATE * 1e-3)


def summed(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(outputs, targets, reduction="sum"), (targets != -100).sum()


def of_a_dataset(train: dure.Examples) -> TensorDataset:
    return TensorDataset(train.inputs, train.targets)  # type: ignore[arg-type]


def as_it_is(train: dure.Examples) -> dure.Examples:
    return train


@pytest.mark.parametrize("staleness", STALE)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("loss", "held"),
    [
        (F.cross_entropy, as_it_is),
        (partial(F.cross_entropy, weight=torch.tensor([1.0, 10.0, 0.1]).double()), as_it_is),
        (summed, as_it_is),
        (summed, of_a_dataset),
        (F.cross_entropy, of_a_dataset),
    ],
)
def test_parts_of_a_batch_have_the_shares_that_the_loss_counts(
    loss: Any, held: Callable[[dure.Examples], Any], accumulate: int, staleness: int | None
) -> None:
    train = examples()
    assert isinstance(train.targets, Tensor)
    targets = train.targets.clone()
    targets[:10] = -100  # most of the first worker's
    targets[[20, 30, 38]] = -100
    known = dure.Examples(train.inputs, targets)
    rate = partial(torch.optim.SGD, lr=RATE)
    task = small_task(loss=loss, train=held(known), optimizer=rate)
    model = seeded_model(task, 0)
    result = loss(model(known.inputs), targets)
    mean = result[0] / result[1] if isinstance(result, tuple) else result
    gradient = torch.autograd.grad(mean, list(model.parameters()))
    expected = -nn.utils.parameters_to_vector(gradient)
    found = moved(task, servers(staleness, accumulate=accumulate))
    assert float((found - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.parametrize("compression", ["none", "top-k:0.5"])
@pytest.mark.parametrize("staleness", STALE)
def test_a_part_without_examples_makes_no_step(staleness: int | None, compression: str) -> None:
    # 12 examples for 13 workers: the last has a mean of nothing, which is no number.
    history = History(
        groups=(tuple(range(13)),),
        staleness=staleness,
        clocks=3,
        optimizer=ADAM,
        compression=parse(compression),
    ).run()
    assert bool(history.weights.isfinite().all())
    for shard in history.owners:
        assert shard.version == 13 * 3
        (kept,) = shard.state()["optimizer"].values()
        assert float(kept["step"]) == 12 * 3


@pytest.mark.parametrize("staleness", [0, 1, None])
@pytest.mark.parametrize("groups", [1, 2])
def test_learning_rates_are_those_of_the_workers_own_steps(
    groups: int, staleness: int | None
) -> None:
    seen: list[int] = []

    def schedule(step: int) -> float:
        seen.append(step)
        return 1.0

    strategy = dure.ParameterServer(
        workers=4, groups=groups, batch_size=8, staleness=staleness, period=2
    )
    dure.train(small_task(lr_schedule=schedule), strategy, dure.Simulated(), dure.Stop(rounds=6))
    assert sorted(set(seen)) == list(range(12))
