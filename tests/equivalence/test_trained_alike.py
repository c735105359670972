"""What a task asks of training is done alike in every system, or refused in one line.

First the single worker is compared with the same loop written by hand with torch's own tools; then
every system that walks its path with the single worker, with all of it asked for at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dure
from dure.contracts.learning import PARTS
from dure.contracts.strategy import Strategy, World, examples_for, seeded_model
from dure.data.batches import Batches
from small import FEATURES, examples, largest_difference, network, same_bits, small_task

STEPS = 6
MOMENTUM = partial(torch.optim.SGD, lr=0.3, momentum=0.5, weight_decay=0.01)
PLAIN = partial(torch.optim.SGD, lr=0.3)
SCHEDULE = (1.0, 0.5, 0.25, 1.0, 0.1, 0.7)


def schedule(step: int) -> float:
    return SCHEDULE[step % len(SCHEDULE)]


class Partly(nn.Module):
    """A network whose first layer is frozen for good."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()
        self.body[0].weight.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.body(inputs)
        return scores


def groups(parameters: Any) -> torch.optim.Optimizer:
    """Two groups of parameters, with rates of their own."""
    first, *others = list(parameters)
    return torch.optim.SGD(
        [{"params": [first], "lr": 0.05}, {"params": others}], lr=0.3, momentum=0.5
    )


EVERYTHING: Mapping[str, Any] = {
    "clip_norm": 0.2,
    "ema": 0.8,
    "unfreeze": {"2.*": 3},
    "lr_schedule": schedule,
}


def by_hand(task: dure.Task, steps: int, seed: int, batch_size: int = 8) -> dict[str, Tensor]:
    """The loop that people write, with torch's own tools."""
    model = seeded_model(task, seed).train()
    optimizer = task.optimizer(model.parameters())
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, task.lr_schedule or (lambda step: 1.0))
    decay = task.ema if task.ema is not None else 0.0
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    train = examples_for(model, task)[0]
    batches = Batches(len(train), batch_size, seed)
    for step in range(steps):
        inputs, targets = train.batch(batches.at(step))
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=task.precision == "bf16"):
            loss = task.loss(model(inputs), targets)
        assert isinstance(loss, Tensor)
        loss.backward()  # type: ignore[no-untyped-call]
        if step < 3 and task.unfreeze:
            model[2].weight.grad = model[2].bias.grad = None  # type: ignore[index, union-attr]
        if task.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
        optimizer.step()
        rates.step()
        average.update_parameters(model)
    return dict((model if task.ema is None else average.module).state_dict())


def apart(run: dure.Run, right: Mapping[str, Tensor]) -> float:
    weights = run.model.state_dict()
    return max(float((weights[name] - right[name]).abs().max()) for name in right)


@pytest.mark.parametrize(
    "asked",
    [
        {"clip_norm": 0.2},
        {"ema": 0.8},
        {"unfreeze": {"2.*": 3}},
        {"lr_schedule": schedule},
        {"optimizer": groups},
        {"precision": "bf16", "model": partial(network, torch.float32)},
        {"optimizer": partial(torch.optim.AdamW, lr=0.01), **EVERYTHING},
    ],
    ids=["clip", "ema", "unfreeze", "schedule", "groups", "bf16", "everything"],
)
def test_the_single_worker_trains_as_the_loop_that_people_write(asked: dict[str, Any]) -> None:
    task = small_task(**{"optimizer": MOMENTUM, **asked})
    run = dure.train(task, dure.SingleWorker(8), stop=dure.Stop(steps=STEPS), seed=3)
    assert apart(run, by_hand(task, STEPS, 3)) == 0
    plain = small_task(optimizer=MOMENTUM, model=asked.get("model", network))
    untouched = dure.train(plain, dure.SingleWorker(8), stop=dure.Stop(steps=STEPS), seed=3)
    assert largest_difference(run, untouched) > 1e-6


ALIKE: dict[str, tuple[Strategy, World | None, dict[str, Any]]] = {
    "single-worker": (dure.SingleWorker(8, accumulate=3), None, {}),
    "data-parallel": (dure.DataParallel(8, accumulate=2), dure.Processes(2), {}),
    "data-parallel, threads": (dure.DataParallel(8), dure.Threads(2), {}),
    "layers-per-core": (dure.LayersPerCore(8, 2), dure.Threads(2), {}),
    "hogwild": (dure.Hogwild(8, period=1, accumulate=2), dure.Threads(1), {}),
    "hogwild, processes": (dure.Hogwild(8, period=1), dure.Processes(1), {"ema": None}),
    "zero 1": (dure.ZeRO(1, 8, accumulate=2), dure.Processes(2), {"ema": None}),
    "zero": (dure.ZeRO(2, 8), dure.Processes(2), {"ema": None}),
    "zero 3": (dure.ZeRO(3, 8), dure.Processes(2), {"ema": None}),
    "tensor-parallel": (dure.TensorParallel(8), dure.Processes(2), {}),
    "pipeline": (dure.Pipeline(8, 2), dure.Processes(2), {}),
    "parallel": (dure.Parallel(dure.Mesh(2, 2), 8, 2), dure.Processes(4), {}),
    "local-sgd": (dure.LocalSGD(8, 1, accumulate=2), dure.Processes(1), {}),
    "diloco": (
        dure.DiLoCo(8, 1, outer_lr=1.0, outer_momentum=0.0),
        dure.Processes(1),
        {},
    ),
    "parameter-server": (
        dure.ParameterServer(workers=1, batch_size=8, period=1, accumulate=2),
        dure.Simulated(),
        {"ema": None, "optimizer": PLAIN},
    ),
    "parameter-server, processes": (
        dure.ParameterServer(workers=1, batch_size=8, period=1),
        None,
        {"ema": None, "optimizer": PLAIN},
    ),
    "downpour": (
        dure.Downpour(replicas=1, batch_size=8, overlap=False, period=1, accumulate=2),
        dure.Simulated(),
        {"ema": None, "optimizer": PLAIN},
    ),
}
"""Systems that walk the path of one worker, and what of `EVERYTHING` they refuse."""


@pytest.mark.parametrize("name", ALIKE)
def test_every_system_trains_as_the_single_worker_with_all_of_it(name: str) -> None:
    strategy, world, changes = ALIKE[name]
    task = small_task(**{"optimizer": MOMENTUM, **EVERYTHING, **changes})
    stop = dure.Stop(rounds=STEPS) if strategy.unit == "round" else dure.Stop(steps=STEPS)
    one = dure.train(task, dure.SingleWorker(8), stop=dure.Stop(steps=STEPS), seed=3)
    many = dure.train(task, strategy, world, stop, seed=3)
    assert largest_difference(many, one) < 1e-12
    assert many.summary["test_loss"] == pytest.approx(one.summary["test_loss"], abs=1e-12)
