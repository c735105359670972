"""Simulated clients whose model is on a GPU: the numbers of the CPU, and the same bits again."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from on_gpu import CLOSE, GPU, alike, apart, drawn_there, there, with_dropout
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.run.registry import parse_strategy
from small import CLASSES, examples, network, small_task

pytestmark = pytest.mark.needs_cuda

ROUNDS = dure.Stop(rounds=3)
SYSTEMS = [
    "fed-sgd,clients=4",
    "fed-avg,clients=4",
    "fed-avg,clients=4,held_out=0.3,fine_tune=1",
    "fed-prox,clients=4,mu=0.1",
    "scaffold,clients=4",
    "fed-adam,clients=4,server_lr=0.05",
    "fed-per,clients=4,held_out=0.3",
    "ditto,clients=4,held_out=0.3",
    "per-fed-avg,clients=4",
    "per-fed-avg,clients=4,order=hessian-free",
    "fed-buff,clients=4",
    "fed-async,clients=4",
    "fed-avg,clients=9,aggregate=krum:1:1",
    "fed-avg,clients=9,aggregate=median",
    "fed-avg,clients=9,aggregate=geometric-median",
    "fed-avg,clients=9,aggregate=trimmed-mean:0.2",
    "fed-avg,clients=9,aggregate=centred-clipping",
    "fed-avg,clients=9,aggregate=bulyan:1",
]


@pytest.mark.parametrize("engine", ["loop", "auto"])
@pytest.mark.parametrize("name", SYSTEMS)
def test_clients_on_a_gpu_walk_the_path_of_the_cpu(name: str, engine: Any) -> None:
    own = "" if name.startswith("fed-sgd") else ",batch_size=5"
    strategy = parse_strategy(name + own)
    world = dure.Simulated(engine=engine)
    on_gpu = dure.train(small_task(model=there(network)), strategy, world, ROUNDS, seed=3)
    on_cpu = dure.train(small_task(), strategy, world, ROUNDS, seed=3)
    assert apart(on_gpu, on_cpu) < CLOSE
    for one, other in zip(on_gpu.history.evaluations, on_cpu.history.evaluations, strict=True):
        assert one.metrics == pytest.approx(other.metrics, abs=1e-6)


def test_a_device_of_the_world_is_that_of_a_model_made_there() -> None:
    strategy = dure.FedAvg(4, batch_size=5)
    named = dure.train(small_task(), strategy, dure.Simulated(device="cuda"), ROUNDS, seed=3)
    made = dure.train(small_task(model=there(network)), strategy, stop=ROUNDS, seed=3)
    assert named.model[0].weight.device.type == "cpu"  # type: ignore[index,union-attr]
    assert apart(named, made) < CLOSE


def pictures() -> nn.Module:
    layers = [
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * 3 * 3, CLASSES),
    ]
    return nn.Sequential(*layers).double()


def test_many_clients_at_once_have_convolutions_on_a_gpu() -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(24, 1, 8, 8, generator=generator, dtype=torch.float64)
    data = dure.Examples(inputs, torch.arange(24) % CLASSES)
    runs = [
        dure.train(
            small_task(model=model, train=data, test=data),
            dure.FedAvg(4, batch_size=3),
            dure.Simulated(engine="batched"),
            ROUNDS,
        )
        for model in (there(pictures), pictures)
    ]
    assert apart(*runs) < CLOSE


def own(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(outputs, targets, reduction="sum"), len(targets)


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)),
        partial(F.cross_entropy, ignore_index=1),
        own,
    ],
)
def test_losses_of_every_kind_are_counted_on_a_gpu(loss: Any, engine: Any) -> None:
    world = dure.Simulated(engine=engine)
    runs = [
        dure.train(small_task(model=model, loss=loss), dure.FedAvg(4, batch_size=5), world, ROUNDS)
        for model in (there(network), network)
    ]
    assert apart(*runs) < CLOSE


@pytest.mark.parametrize("model", [there(with_dropout), drawn_there])
def test_the_same_seed_draws_the_same(model: Any) -> None:
    def run(seed: int) -> dure.Run:
        torch.cuda.manual_seed(seed + 100)  # the global generator must not matter
        task = small_task(n=40, model=model)
        return dure.train(task, dure.FedAvg(4, batch_size=5), stop=ROUNDS, seed=seed)

    assert alike(run(1), run(1))
    assert not alike(run(1), run(2))


@pytest.mark.parametrize(
    "name",
    [
        "fed-avg,clients=4,batch_size=5",
        "scaffold,clients=4,batch_size=5",
        "fed-adam,clients=4,batch_size=5",
        "fed-buff,clients=4,batch_size=5",
        "fed-per,clients=4,batch_size=5,held_out=0.3",
        "fed-avg,clients=9,batch_size=5,aggregate=centred-clipping",
    ],
)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(
    name: str, tmp_path: Path
) -> None:
    task = small_task(n=60, model=there(with_dropout))
    strategy = parse_strategy(name)
    whole = dure.train(task, strategy, stop=dure.Stop(rounds=4), seed=3)
    dure.train(task, strategy, stop=dure.Stop(rounds=2), seed=3, out=tmp_path / "run")
    resumed = dure.resume(tmp_path / "run", task=task, stop=dure.Stop(rounds=4))
    assert apart(whole, resumed) == 0


@pytest.mark.parametrize("attack", ["sign-flip", "gaussian", "alie", "label-flip", "nan"])
def test_liars_lie_on_a_gpu_as_on_the_cpu(attack: str) -> None:
    world = dure.Simulated(attack=attack, attackers=0.2)
    strategy = parse_strategy("fed-avg,clients=9,batch_size=5,aggregate=median")
    runs = [
        dure.train(small_task(model=model), strategy, world, ROUNDS)
        for model in (there(network), network)
    ]
    assert apart(*runs) < CLOSE


def test_the_model_that_comes_of_it_is_where_it_was_made() -> None:
    run = dure.train(small_task(model=there(network)), dure.FedAvg(4), stop=ROUNDS)
    with torch.no_grad():
        assert run.model(examples().inputs.to(GPU)).device == GPU
