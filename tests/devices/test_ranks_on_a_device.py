"""Every system of ranks computes on the devices of its ranks: the CPU's weights, to 1e-12.

The device refuses an operator that mixes memories, so a run that ends has mixed none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dure
from dure.run.registry import parse_strategy
from small import largest_difference

pytestmark = pytest.mark.usefixtures("accelerator")

LINEAR = "linear"
"""A model without random draws and batch norm, which some systems require."""

CASES = [
    ("data-parallel,batch_size=8", 2, ""),
    ("data-parallel,batch_size=16,all_reduce=native,accumulate=2", 3, ""),
    ("data-parallel,batch_size=8,compression=top-k:0.1", 2, ""),
    ("data-parallel,batch_size=8,compression=power-sgd:1", 2, ""),
    ("data-parallel,batch_size=8,compression=int8", 2, ""),
    ("data-parallel,batch_size=8,offload=optimizer+activations", 2, ""),
    ("data-parallel,batch_size=8,recompute=all", 2, ""),
    ("data-parallel,batch_size=8,privacy=dp-sgd:1:1:seed", 2, LINEAR),
    ("zero,batch_size=8,stage=1", 2, ""),
    ("zero,batch_size=8,stage=2", 2, ""),
    ("zero,batch_size=8,stage=3", 2, ""),
    ("pipeline,batch_size=8,schedule=gpipe", 2, ""),
    ("pipeline,batch_size=8,schedule=interleaved", 2, LINEAR),
    ("pipeline,batch_size=8,schedule=zero-bubble", 2, LINEAR),
    ("tensor-parallel,batch_size=8", 2, LINEAR),
    ("parallel,batch_size=8,microbatches=2,data=2,pipeline=2,zero=1", 4, LINEAR),
    ("parallel,batch_size=8,microbatches=1,data=2,tensor=2", 4, LINEAR),
    ("parallel-sgd,batch_size=4", 2, ""),
    ("local-sgd,batch_size=8", 2, ""),
    ("local-sgd,batch_size=8,momentum=average,compression=sign", 2, ""),
    ("diloco,batch_size=8", 2, ""),
    ("admm,batch_size=4", 2, LINEAR),
    ("parameter-server,batch_size=8,workers=2,staleness=0", 4, ""),
    ("parameter-server,batch_size=8,workers=1,compression=top-k:0.1", 3, ""),
    ("downpour,batch_size=8,replicas=1,overlap=false", 3, ""),
]


def task_of(model: str) -> dure.Task:
    from on_device import noting_task, wide_network

    return noting_task(wide_network) if model == LINEAR else noting_task()


def run(system: str, ranks: int, model: str, device: str, **more: Any) -> dure.Run:
    strategy = parse_strategy(system)
    stop = dure.Stop(steps=5) if strategy.unit == "step" else dure.Stop(rounds=2)
    world = dure.Processes(ranks, device=device)
    return dure.train(task_of(model), strategy, world, stop, **more)


@pytest.mark.parametrize(("system", "ranks", "model"), CASES)
def test_a_system_has_the_weights_of_the_cpu(
    system: str,
    ranks: int,
    model: str,
    accelerator: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from on_device import NOTES, noted

    here = run(system, ranks, model, "cpu")
    monkeypatch.setenv(NOTES, str(tmp_path / "notes"))
    # Where the number of parts is odd, ranks share a device; else each has its own.
    device = f"{accelerator}:1" if CASES.index((system, ranks, model)) % 2 else accelerator
    there = run(system, ranks, model, device)
    assert largest_difference(here, there) <= 1e-12
    assert noted(tmp_path / "notes")[accelerator] >= 5
    assert there.model[0].weight.device.type == "cpu"


@pytest.mark.parametrize("first", ["cpu", "acc"])
def test_a_run_goes_on_on_another_device(first: str, accelerator: str, tmp_path: Path) -> None:
    from on_device import noting_task

    second = {"cpu": accelerator, accelerator: "cpu"}[first]
    strategy = parse_strategy("zero,batch_size=8,stage=2")
    train = dure.train(noting_task(), strategy, dure.Processes(2), dure.Stop(steps=6))
    dure.train(
        noting_task(),
        strategy,
        dure.Processes(2, device=first),
        dure.Stop(steps=3),
        out=tmp_path / "run",
    )
    resumed = dure.resume(
        tmp_path / "run",
        task=noting_task(),
        world=dure.Processes(2, device=second),
        stop=dure.Stop(steps=6),
    )
    assert largest_difference(train, resumed) <= 1e-12
