"""What a task asks of training, asked of federations: done in each local step, or refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dure
from dure.contracts.fresh_model import seeded_model
from dure.contracts.strategy import Strategy
from small import largest_difference, network, same_bits, small_task

STEPS = 5
PLAIN = partial(torch.optim.SGD, lr=0.3)
ONE: dict[str, Any] = {"clients": 1, "batch_size": 8, "local_steps": 1}
THREE: dict[str, Any] = {"clients": 3, "batch_size": 8}


def partly_frozen() -> nn.Sequential:
    model = network()
    assert isinstance(model, nn.Sequential)
    model[0].weight.requires_grad_(False)
    return model


def halving(step: int) -> float:
    return 0.5**step


EVERYTHING: dict[str, Any] = {
    "clip_norm": 0.2,
    "ema": 0.8,
    "unfreeze": {"2.*": 3},
    "lr_schedule": halving,
    "model": partly_frozen,
}


ALIKE: dict[str, tuple[Strategy, str, dict[str, Any]]] = {
    "fed-avg": (dure.FedAvg(**ONE), "auto", {}),
    "fed-avg, loop-processes": (dure.FedAvg(**ONE), "loop-processes", {}),
    "fed-avg, one flat gradient": (
        dure.FedAvg(**ONE),
        "auto",
        {"unfreeze": None, "model": network},
    ),
    "fed-prox": (dure.FedProx(**ONE), "auto", {}),
    "fed-async": (dure.FedAsync(**ONE, alpha=1.0), "auto", {}),
    "fed-buff": (dure.FedBuff(**ONE, buffer=1), "auto", {}),
    "fed-per": (dure.FedPer(**ONE, held_out=0.0, personal_layers=1), "auto", {"ema": None}),
    "ditto": (dure.Ditto(**ONE, held_out=0.0), "auto", {}),
    "scaffold": (dure.Scaffold(**ONE), "auto", {"clip_norm": None}),
}
"""Federations of one client that walk the path of one worker, and what they refuse."""


@pytest.mark.parametrize("name", ALIKE)
def test_a_federation_of_one_trains_as_the_single_worker_with_all_of_it(name: str) -> None:
    strategy, engine, changes = ALIKE[name]
    task = small_task(**{"optimizer": PLAIN, **EVERYTHING, **changes})
    world = dure.Simulated(engine=engine)
    many = dure.train(task, strategy, world, dure.Stop(rounds=STEPS), seed=3)
    one = dure.train(task, dure.SingleWorker(8), stop=dure.Stop(steps=STEPS), seed=3)
    assert largest_difference(many, one) < 1e-12
    assert many.summary["test_loss"] == pytest.approx(one.summary["test_loss"], abs=1e-12)


@pytest.mark.parametrize(
    "strategy",
    [
        dure.FedSGD(clients=1),
        dure.ByzantineGD(clients=1, groups=1),
        dure.PerFedAvg(
            clients=1, batch_size=None, local_steps=1, alpha=0.0, held_out=0.0, fine_tune=0
        ),
    ],
    ids=lambda one: one.name,
)
def test_a_client_that_sends_one_gradient_has_clipped_it(strategy: Strategy) -> None:
    asked = {**EVERYTHING, "unfreeze": None, "optimizer": PLAIN}
    task = small_task(**asked)
    many = dure.train(task, strategy, stop=dure.Stop(rounds=STEPS), seed=3)
    one = dure.train(task, dure.SingleWorker(None), stop=dure.Stop(steps=STEPS), seed=3)
    assert largest_difference(many, one) < 1e-12


def test_every_local_step_of_every_client_is_clipped() -> None:
    """What none of two steps goes further than, nor the mean of the clients."""
    task = small_task(optimizer=PLAIN, clip_norm=0.01)
    two = dure.FedAvg(clients=3, batch_size=8, local_steps=2)
    run = dure.train(task, two, stop=dure.Stop(rounds=1), seed=3)
    free = dure.train(small_task(optimizer=PLAIN), two, stop=dure.Stop(rounds=1), seed=3)
    start = seeded_model(task, 3).state_dict()

    def way(run: dure.Run) -> float:
        moved = [one - start[name] for name, one in run.model.state_dict().items()]
        return float(torch.cat([one.reshape(-1) for one in moved]).norm())

    assert 0 < way(run) <= 2 * 0.3 * 0.01 * (1 + 1e-6)
    assert way(free) > 2 * way(run)


def test_clients_compute_in_bfloat16() -> None:
    asked: dict[str, Any] = {
        "optimizer": PLAIN,
        "model": partial(network, torch.float32),
        "dtype": torch.float32,
    }
    strategy = dure.FedAvg(**ONE)
    stop = dure.Stop(rounds=2)
    short = dure.train(small_task(precision="bf16", **asked), strategy, stop=stop, seed=3)
    full = dure.train(small_task(**asked), strategy, stop=stop, seed=3)
    one = dure.train(
        small_task(precision="bf16", **asked), dure.SingleWorker(8), stop=dure.Stop(steps=2), seed=3
    )
    assert largest_difference(short, one) < 1e-6
    assert largest_difference(short, full) > 1e-5


class Told(nn.Module):
    """A model that computes something else where the compiler traces it, and draws nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.body(inputs)
        return scores * 0.5 if torch.compiler.is_compiling() else scores


class Halved(Told):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * 0.5


@pytest.mark.parametrize(
    "strategy", [dure.FedAvg(**THREE), dure.PerFedAvg(**THREE)], ids=lambda one: one.name
)
def test_clients_call_what_the_compiler_made(strategy: Strategy) -> None:
    stop = dure.Stop(rounds=1)
    world = dure.Simulated(engine="loop")
    compiled = small_task(model=Told, compile="eager", optimizer=PLAIN)
    halved = dure.train(small_task(model=Halved, optimizer=PLAIN), strategy, world, stop, seed=3)
    assert same_bits(dure.train(compiled, strategy, world, stop, seed=3), halved)


@pytest.mark.parametrize(
    "strategy",
    [
        dure.FedAvg(**THREE, held_out=0.2),
        dure.FedAsync(**THREE),
        dure.FedAdam(**THREE),
        dure.FedAvgM(**THREE),
        dure.FedAdagrad(**THREE),
        dure.FedYogi(**THREE),
    ],
    ids=lambda one: one.name,
)
def test_the_average_is_that_of_the_servers_models_and_goes_on_to_the_same_bits(
    strategy: Strategy, tmp_path: Path
) -> None:
    averaged = small_task(optimizer=PLAIN, ema=0.8)

    def after(rounds: int, task: dure.Task, **where: Any) -> dure.Run:
        return dure.train(task, strategy, stop=dure.Stop(rounds=rounds), seed=3, **where)

    whole = after(3, averaged)
    after(2, averaged, out=tmp_path / "run")
    resumed = dure.resume(tmp_path / "run", task=averaged, stop=dure.Stop(rounds=3))
    assert same_bits(resumed, whole)
    plain = small_task(optimizer=PLAIN)
    models = [after(count, plain).model.state_dict() for count in (1, 2, 3)]
    right = {name: one.clone() for name, one in models[0].items()}
    for model in models[1:]:
        for name, one in right.items():
            one.lerp_(model[name], 1 - 0.8)
    found = whole.model.state_dict()
    assert max(float((found[name] - right[name]).abs().max()) for name in right) < 1e-15
    assert max(float((found[name] - models[-1][name]).abs().max()) for name in right) > 1e-6


@pytest.mark.parametrize(
    ("strategy", "engine", "asked", "message"),
    [
        (dure.Scaffold(**THREE), "auto", {"clip_norm": 1.0}, "Scaffold cannot .*option II"),
        (dure.FedPer(**THREE), "auto", {"ema": 0.9}, "FedPer cannot .*belongs to each client"),
        (dure.PerFedAvg(**THREE), "auto", {"unfreeze": {"0.*": 1}}, "PerFedAvg cannot .*adapted"),
        (
            dure.FedAvg(**THREE, privacy="dp-sgd:1:1.1"),
            "auto",
            {"precision": "bf16"},
            "per-example gradients",
        ),
        (dure.FedAvg(**THREE), "batched", {"clip_norm": 1.0}, "engine batched cannot .*one client"),
        (dure.FedAvg(**THREE), "batched", {"precision": "bf16"}, "engine batched cannot .*weights"),
        (dure.FedAvg(**THREE), "batched", {"unfreeze": {"0.*": 1}}, "engine batched cannot .*all"),
        (
            dure.FedAvg(**THREE),
            "loop-processes",
            {"compile": "eager"},
            "the model is compiled in",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_trained(
    strategy: Strategy, engine: str, asked: dict[str, Any], message: str
) -> None:
    task = small_task(optimizer=PLAIN, **asked)
    with pytest.raises(ValueError, match=message):
        dure.train(task, strategy, dure.Simulated(engine=engine), dure.Stop(rounds=1))


def test_many_clients_at_once_still_have_an_average_and_a_schedule() -> None:
    task = small_task(optimizer=PLAIN, ema=0.8, lr_schedule=halving)
    runs = [
        dure.train(
            task, dure.FedAvg(**THREE), dure.Simulated(engine=engine), dure.Stop(rounds=2), seed=3
        )
        for engine in ("loop", "batched")
    ]
    assert largest_difference(*runs) < 1e-12
