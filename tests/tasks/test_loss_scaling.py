"""Precision fp16: a scale of the loss keeps small gradients.

Steps that overflow are skipped by all ranks that share them, or repeated where others count on them
(`dure.tasks.loss_scaling`).
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.contracts.fresh_model import seeded_model
from dure.data.batches import Batches
from dure.errors import GradientNotFiniteError
from dure.run.registry import parse_strategy
from dure.tasks.loss_scaling import LossScaling
from small import examples, network, same_bits, small_task, weights_of

SKIP = ["single-worker", "data-parallel", "zero,stage=1", "zero,stage=2", "zero,stage=3"]
AVERAGE = ["local-sgd", "diloco", "parallel-sgd", "admm"]
THREADS = ["layers-per-core", "hogwild"]
REPEAT = [
    "parameter-server",
    "downpour,overlap=false,replicas=1",
    "fed-avg,clients=3",
    "per-fed-avg,clients=3",
]


def single() -> nn.Module:
    return network(torch.float32)


def task(**changes: object) -> dure.Task:
    return small_task(**{"model": single, "dtype": torch.float32, **changes})


def run(system: str, task: dure.Task, ranks: int = 1, **more: object) -> dure.Run:
    strategy = parse_strategy(system)
    stop = dure.Stop(steps=6) if strategy.traits.unit == "step" else dure.Stop(rounds=2)
    world: dure.World = dure.Processes(max(ranks, strategy.run_traits.ranks or 1))
    if strategy.traits.kind != "ranks":
        world = dure.Threads(1) if strategy.traits.kind == "threads" else dure.Simulated()
    return dure.train(task, strategy, world, stop, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("system", [*SKIP, *AVERAGE, *THREADS, *REPEAT, "scaffold", "fed-sgd"])
def test_fp16_trains_as_in_full_precision_but_for_rounding(system: str) -> None:
    full = weights_of(run(system, task()))
    half = weights_of(run(system, task(precision="fp16")))
    assert 0 < float((full - half).abs().max()) < 0.02


def tiny_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss whose gradients at the outputs, below 6e-8, are zeros in float16."""
    return F.cross_entropy(outputs, targets) * 1e-7


def test_gradients_below_the_smallest_number_of_float16_arrive() -> None:
    large = partial(torch.optim.SGD, lr=3e6)
    full = weights_of(run("single-worker", task(loss=tiny_loss, optimizer=large)))
    half = weights_of(run("single-worker", task(loss=tiny_loss, optimizer=large, precision="fp16")))
    start = weights_of(run("single-worker", task(optimizer=partial(torch.optim.SGD, lr=0.0))))
    assert float((full - half).abs().max()) < 0.02 * float((full - start).abs().max()) + 1e-3


def huge_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that overflows with the first scale, 65,536, in the gradients of float16."""
    return F.cross_entropy(outputs, targets) * 50


TUNED = partial(torch.optim.SGD, lr=0.3 / 50)


def plain_loop(steps: int, batch_size: int = 64) -> Tensor:
    """The same steps in torch, by its own `GradScaler`."""
    asked = task(loss=huge_loss, optimizer=TUNED)
    model = seeded_model(asked, 0)
    optimizer = asked.optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    batches = Batches(len(asked.train), batch_size, 0)
    for step in range(steps):
        inputs, targets = asked.train.batch(batches.at(step))
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = huge_loss(model(inputs.float()), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return torch.cat([one.detach().double().reshape(-1) for one in model.parameters()])


def test_it_skips_the_steps_that_torchs_own_scaler_skips() -> None:
    half = run("single-worker", task(loss=huge_loss, optimizer=TUNED, precision="fp16"))
    assert torch.equal(weights_of(half), plain_loop(6))


@pytest.mark.parametrize("system", [*SKIP[1:]])
def test_a_step_that_overflows_is_skipped_on_all_ranks(system: str) -> None:
    half = run(system, task(loss=huge_loss, optimizer=TUNED, precision="fp16"), 2)
    assert half.summary["steps"] == 6
    # The ranks skip the same steps as one worker: a step more would differ by far more.
    assert float((weights_of(half) - plain_loop(6)).abs().max()) < 2e-3
    assert float((weights_of(half) - plain_loop(5)).abs().max()) > 5e-3


@pytest.mark.parametrize("system", REPEAT)
def test_a_step_that_overflows_is_repeated_where_others_count_on_it(system: str) -> None:
    larger = task(loss=enormous_loss, optimizer=partial(torch.optim.SGD, lr=0.3 / 5e6))
    full = weights_of(run(system, larger))
    half = weights_of(run(system, dataclasses.replace(larger, precision="fp16")))
    assert 0 < float((full - half).abs().max()) < 0.02


def enormous_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that overflows with the first scale of a repeated pass, 4,096, and with 1."""
    return F.cross_entropy(outputs, targets) * 5e6


def noisy() -> nn.Module:
    """A model with random draws and with buffers that change in every forward pass."""
    return nn.Sequential(
        nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3)
    )


@pytest.mark.parametrize("system", ["parameter-server", "fed-avg,clients=3"])
def test_a_repeated_pass_draws_the_same_and_moves_buffers_once(system: str) -> None:
    """A loss larger by a power of two is repeated, and else the same to the bit."""
    found = []
    for factor in (1.0, 2.0**12):
        asked = task(
            model=noisy,
            loss=lambda outputs, targets, by=factor: F.cross_entropy(outputs.float(), targets) * by,
            optimizer=partial(torch.optim.SGD, lr=0.25 / factor),
            precision="fp16",
        )
        found.append(weights_of(run(system, asked)))
    assert float((found[0] - found[1]).abs().max()) < 1e-6


@pytest.mark.parametrize("system", ["data-parallel,batch_size=16", "zero,batch_size=16"])
def test_ranks_agree_and_a_resumed_run_has_the_same_bits(system: str, tmp_path: Path) -> None:
    asked = task(precision="fp16", loss=huge_loss, clip_norm=1.0, train=examples(48))
    straight = run(system, asked, 2)
    dure.train(
        asked, parse_strategy(system), dure.Processes(2), dure.Stop(steps=3), out=tmp_path / "run"
    )
    resumed = dure.resume(tmp_path / "run", task=asked, stop=dure.Stop(steps=6))
    assert same_bits(straight, resumed)


@given(st.lists(st.sampled_from([1.0, 3e-7, math.inf, math.nan]), max_size=40))
def test_the_scale_is_that_of_torchs_own_scaler(gradients: list[float]) -> None:
    with patch("dure.tasks.loss_scaling.GROWTH_STEPS", 3):
        own = LossScaling("rank 0", torch.device("cpu"))
        other = torch.amp.GradScaler("cpu", growth_interval=3)
        other.scale(torch.zeros(1))
        weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
        optimizers = [torch.optim.SGD([one], lr=0.1) for one in weights]
        for value in gradients:
            for one in weights:
                one.grad = torch.tensor([1.0, value])
            own.unscale(weights[:1])
            own.step(optimizers[0])
            other.step(optimizers[1])
            other.update()
            assert own.scale == other.get_scale()
            assert torch.equal(*weights)


def test_a_run_whose_gradients_are_never_finite_ends() -> None:
    def steep(outputs: Tensor, targets: Tensor) -> Tensor:
        # The gradient of a root at 0 is infinite.
        return outputs.float().mul(0).sqrt().sum() + F.cross_entropy(outputs, targets)

    with pytest.raises(GradientNotFiniteError, match="rank 0 are not finite in float16, with any"):
        dure.train(
            task(loss=steep, precision="fp16"), dure.SingleWorker(8), stop=dure.Stop(steps=99)
        )


@pytest.mark.parametrize(
    ("system", "refusal"),
    [
        ("pipeline", "cannot train with precision='fp16': its layers and stages"),
        ("split", "cannot train with precision='fp16': values and gradients at the cut"),
        ("data-parallel,compression=top-k:0.1", "adds what it left out to the next"),
    ],
)
def test_a_system_that_cannot_scale_the_loss_refuses_it(system: str, refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal):
        run(system, task(precision="fp16"), 2)


def test_weights_in_float16_are_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.weight is in float16: make the model in float32"):
        run("single-worker", task(model=partial(network, torch.float16), precision="fp16"))
