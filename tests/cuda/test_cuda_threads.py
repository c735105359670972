"""Threads that share a GPU, or have a GPU and the CPU: the path of one worker on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from on_gpu import CLOSE, alike, apart, there, with_dropout
from torch import Tensor, nn

import dure
from small import CLASSES, FEATURES, network, small_task

pytestmark = pytest.mark.needs_cuda

STOP = dure.Stop(epochs=2)
PLACES = [("cuda:0", "cuda:0"), ("cuda:0", "cpu"), ("cpu", "cuda:0")]
STRATEGIES = [
    dure.DataParallel(8),
    dure.LayersPerCore(8, 2),
    dure.LayersPerCore(8, 2, balance="measured"),
]


def alone(strategy: Any, **changes: Any) -> dure.Run:
    """The same strategy on one core."""
    task = small_task(**changes)
    return dure.train(task, strategy, dure.Threads(1, ("cpu",)), STOP, seed=3)


@pytest.mark.parametrize("devices", PLACES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_threads_on_devices_walk_the_path_of_one(strategy: Any, devices: Any) -> None:
    task = small_task(clip_norm=0.5)
    run = dure.train(task, strategy, dure.Threads(2, devices), STOP, seed=3)
    expected = alone(strategy, clip_norm=0.5)
    assert apart(run, expected) < CLOSE
    for one, other in zip(run.history.evaluations, expected.history.evaluations, strict=True):
        assert one.metrics == pytest.approx(other.metrics, abs=CLOSE)


@pytest.mark.parametrize("devices", PLACES)
@pytest.mark.parametrize("strategy", [dure.DataParallel(8), dure.LayersPerCore(8, 2)])
def test_class_weights_go_to_where_the_loss_is_computed(strategy: Any, devices: Any) -> None:
    weight = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    loss = nn.CrossEntropyLoss(weight=weight)
    run = dure.train(small_task(loss=loss), strategy, dure.Threads(2, devices), STOP, seed=3)
    assert apart(run, alone(strategy, loss=loss)) < CLOSE


@pytest.mark.parametrize("strategy", [dure.DataParallel(8), dure.LayersPerCore(8, 2)])
def test_a_model_made_on_the_gpu_is_divided_there(strategy: Any) -> None:
    world = dure.Threads(2, ("cuda:0",))
    run = dure.train(small_task(model=there(network)), strategy, world, STOP, seed=3)
    assert apart(run, alone(strategy)) < CLOSE


@pytest.mark.parametrize("devices", PLACES)
@pytest.mark.parametrize("strategy", [dure.DataParallel(8), dure.LayersPerCore(8, 2)])
def test_each_draws_from_its_own_generator(strategy: Any, devices: Any) -> None:
    def run() -> dure.Run:
        task = small_task(n=40, model=with_dropout)
        return dure.train(task, strategy, dure.Threads(2, devices), STOP, seed=3)

    assert alike(run(), run())


class Seen(nn.Module):
    """A layer that notes in what dtype it computes, and where."""

    found: set[tuple[str, torch.dtype]] = set()  # noqa: RUF012 (all replicas share it)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.linear(inputs)
        if self.training:
            self.found.add((outputs.device.type, outputs.dtype))
        return outputs


@pytest.mark.parametrize("devices", PLACES)
def test_every_worker_computes_in_half_precision(devices: Any) -> None:
    Seen.found.clear()
    task = small_task(model=Seen, precision="bf16")
    dure.train(task, dure.DataParallel(8), dure.Threads(2, devices), STOP, seed=3)
    kinds = {name.partition(":")[0] for name in devices}
    assert Seen.found == {(kind, torch.bfloat16) for kind in kinds}


@pytest.mark.parametrize(
    "strategy", [dure.DataParallel(8), dure.LayersPerCore(8, 2), dure.Hogwild(8)]
)
def test_a_run_on_a_gpu_is_resumed(strategy: Any, tmp_path: Path) -> None:
    world = dure.Threads(2, ("cuda:0",))
    task = small_task(n=40, model=with_dropout)
    unit = "rounds" if strategy.traits.unit == "round" else "steps"
    whole = dure.train(task, strategy, world, dure.Stop(**{unit: 4}), seed=3)
    dure.train(task, strategy, world, dure.Stop(**{unit: 2}), seed=3, out=tmp_path / "run")
    run = dure.resume(tmp_path / "run", task=task, stop=dure.Stop(**{unit: 4}))
    # Hogwild's workers race: no run repeats another.
    assert apart(run, whole) < (10.0 if strategy.name == "hogwild" else 1e-15)


def test_hogwild_takes_one_device() -> None:
    with pytest.raises(ValueError, match="give only one"):
        dure.train(small_task(), dure.Hogwild(8), dure.Threads(2, ("cuda:0", "cpu")), STOP)
