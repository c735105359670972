"""The table of docs/features.md on a device: all options that a system supports, at once.

A run with a frozen layer, a schedule, validation, early stopping and every supported option begins
on the device, is resumed there, and ends with the weights of an uninterrupted run on the CPU.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dure
from dure.contracts.strategy import Strategy
from dure.contracts.training_options import Part
from dure.contracts.world import Kind
from features import strategies
from small import largest_difference, network

on_device = pytest.importorskip("on_device", exc_type=ImportError)
pytestmark = pytest.mark.usefixtures("accelerator")

FEW: dict[str, dict[str, int]] = {"parameter-server": {"workers": 1}, "downpour": {"replicas": 1}}
"""Settings with which systems that start many processes start few."""

CASES = [
    pytest.param(replace(strategy, **FEW.get(name, {})), kind, id=f"{name}-{kind}")
    for name, strategy in strategies().items()
    for kind in strategy.traits.kinds
    # Refused: its processes share the weights in the CPU's memory.
    if (name, kind) != ("hogwild", "ranks")
]

OPTIONS: dict[Part, Any] = {
    "clip_norm": 0.5,
    "precision": "bf16",
    "ema": 0.9,
    "compile": "eager",
    "unfreeze": {"0.*": 1},
}


def half_frozen() -> nn.Module:
    """The small network, whose last layer is not trained."""
    model = network()
    model[4].requires_grad_(False)
    return model


def falling(step: int) -> float:
    """A schedule."""
    return 1 / (1 + step)


def world_of(strategy: Strategy, kind: Kind, device: str) -> dure.World:
    """As few workers as there can be."""
    if kind == "ranks":
        return dure.Processes(strategy.run_traits.ranks or 1, device=device)
    return dure.Threads(1, (device,)) if kind == "threads" else dure.Simulated(device=device)


def limit(strategy: Strategy, count: int) -> dure.Stop:
    return dure.Stop(**{f"{strategy.traits.unit}s": count}, patience=9)  # type: ignore[arg-type]


def task_of(strategy: Strategy, kind: Kind) -> dure.Task:
    options = {part: OPTIONS[part] for part in OPTIONS if strategy.cannot(part, kind) is None}
    # ZeRO and others cast weights to the reduced precision: another system than in float64.
    options.pop("precision", None)
    return on_device.noting_task(
        half_frozen,
        **options,
        optimizer=partial(torch.optim.SGD, lr=0.3),
        lr_schedule=falling,
        validation=0.2,
    )


@pytest.mark.parametrize(("strategy", "kind"), CASES)
def test_a_system_with_all_its_options_has_the_weights_of_the_cpu(
    strategy: Strategy, kind: Kind, accelerator: str, tmp_path: Path
) -> None:
    task = task_of(strategy, kind)
    here = dure.train(task, strategy, world_of(strategy, kind, "cpu"), limit(strategy, 2))
    there = world_of(strategy, kind, f"{accelerator}:0")
    if strategy.run_traits.computes_on:
        strategy = replace(strategy, device=f"{accelerator}:0")  # type: ignore[call-arg]
        there = world_of(strategy, kind, "cpu")
    dure.train(task, strategy, there, limit(strategy, 1), out=tmp_path / "run")
    resumed = dure.resume(tmp_path / "run", task=task, stop=limit(strategy, 2))
    assert ("validation_loss" in resumed.summary) == ("validation_loss" in here.summary)
    if strategy.run_traits.deterministic:
        assert largest_difference(here, resumed) <= 1e-12


@pytest.mark.parametrize("system", ["single-worker", "data-parallel", "fed-avg"])
def test_adapters_on_a_device_have_the_weights_of_the_cpu(system: str, accelerator: str) -> None:
    """Not with all other options: an adapter freezes what `half_frozen` trains."""
    pytest.importorskip("peft")
    task = on_device.noting_task(
        network, adapter=dure.LoRA(rank=2, targets="0|2", alpha=4), validation=0.2
    )
    strategy = strategies()[system]
    kind = strategy.traits.kind
    here = dure.train(task, strategy, world_of(strategy, kind, "cpu"), limit(strategy, 2))
    there = dure.train(
        task, strategy, world_of(strategy, kind, f"{accelerator}:0"), limit(strategy, 2)
    )
    assert largest_difference(here, there) <= 1e-12


@pytest.mark.parametrize(
    ("system", "ranks", "precision"),
    [
        ("data-parallel", 2, "bf16"),
        ("data-parallel", 2, "fp16"),
        ("zero", 2, "bf16"),
        ("zero", 2, "fp16"),
        ("parameter-server,workers=1", 3, "fp16"),
        ("local-sgd", 2, "fp16"),
    ],
)
def test_reduced_precision_on_a_device(
    system: str, ranks: int, precision: str, accelerator: str
) -> None:
    from rank_systems import run_system

    task = on_device.noting_task(
        partial(network, torch.float32), precision=precision, dtype=torch.float32
    )
    here = run_system(task, f"{system},batch_size=8", ranks, "cpu")
    there = run_system(task, f"{system},batch_size=8", ranks, accelerator)
    # A device rounds other operations than the CPU does.
    assert largest_difference(here, there) <= 0.05
