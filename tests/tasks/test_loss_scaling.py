"""Precision fp16: a scale of the loss keeps small gradients; steps that overflow are skipped."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.run.registry import parse_strategy
from small import examples, network, same_bits, small_task, weights_of

SYSTEMS = ["single-worker", "data-parallel", "local-sgd", "diloco", "parallel-sgd", "admm"]


def single() -> nn.Module:
    return network(torch.float32)


def task(**changes: object) -> dure.Task:
    return small_task(model=single, dtype=torch.float32, **changes)


def run(system: str, task: dure.Task, ranks: int = 1, **more: object) -> dure.Run:
    strategy = parse_strategy(system)
    stop = dure.Stop(steps=6) if strategy.unit == "step" else dure.Stop(rounds=2)
    return dure.train(task, strategy, dure.Processes(ranks), stop, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("system", SYSTEMS)
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_overflows_is_skipped_on_all_ranks(ranks: int) -> None:
    tuned = partial(torch.optim.SGD, lr=0.3 / 50)
    half = run("data-parallel", task(loss=huge_loss, optimizer=tuned, precision="fp16"), ranks)
    assert bool(weights_of(half).isfinite().all())
    assert half.summary["steps"] == 6


def test_ranks_agree_and_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    asked = task(precision="fp16", loss=huge_loss, clip_norm=1.0, train=examples(48))
    system = "data-parallel,batch_size=16"
    straight = run(system, asked, 2)
    dure.train(
        asked, parse_strategy(system), dure.Processes(2), dure.Stop(steps=3), out=tmp_path / "run"
    )
    resumed = dure.resume(tmp_path / "run", task=asked, stop=dure.Stop(steps=6))
    assert same_bits(straight, resumed)


@pytest.mark.parametrize("system", ["zero", "parameter-server", "fed-avg", "pipeline", "hogwild"])
def test_systems_that_do_not_scale_the_loss_refuse_it(system: str) -> None:
    with pytest.raises(ValueError, match="cannot train with precision='fp16'"):
        dure.train(task(precision="fp16"), parse_strategy(system), stop=dure.Stop(epochs=1))
