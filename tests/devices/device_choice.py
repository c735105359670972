"""Devices of ranks: which rank computes where, and what is refused in a line before work starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dure
from dure.cli.worlds import entry
from dure.machine.devices import check_device_dtypes, device_of, devices_of_ranks
from dure.run.registry import parse_strategy
from small import small_task


def names(name: str, ranks: int) -> list[str]:
    return [str(device) for device in devices_of_ranks(name, ranks)]


def test_without_an_accelerator_auto_is_the_cpu() -> None:
    assert names("auto", 2) == ["cpu", "cpu"]
    assert dure.Processes(2, device="auto").device == "cpu"
    assert dure.Processes(2).describe() == "2 processes"


def test_a_type_is_a_device_a_rank_and_a_number_is_shared(accelerator: str) -> None:
    assert names("acc", 3) == ["acc:0", "acc:1", "acc:2"]
    assert names("acc:2", 2) == ["acc:2", "acc:2"]
    assert names("auto", 4) == ["acc:0", "acc:1", "acc:2", "acc:3"]
    assert names("auto", 5) == ["cpu"] * 5
    world = dure.Processes(2, device="auto")
    assert (world.device, world.describe()) == ("acc", "2 processes on acc")
    assert str(device_of("acc")) == "acc:0"


@pytest.mark.parametrize(
    ("name", "ranks", "said"),
    [
        ("gpu", 1, "'gpu' is not a device"),
        ("xpu", 1, "this machine has no XPU device, so xpu cannot be used: use cpu"),
        ("acc:9", 1, "this machine has no acc:9: its acc devices are acc:0 to acc:3"),
        ("acc", 5, "5 ranks need 5 acc devices, but this machine has 4: use at most 4 ranks"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    name: str, ranks: int, said: str, accelerator: str
) -> None:
    with pytest.raises(ValueError, match=said):
        dure.Processes(ranks, device=name)


@pytest.mark.parametrize(
    ("system", "said"),
    [
        ("hogwild", "hogwild's processes share the weights in the CPU's memory"),
        ("data-parallel,offload=parameters", "a GPU cannot offload parameters"),
    ],
)
def test_what_a_device_cannot_do_is_refused(system: str, said: str, accelerator: str) -> None:
    strategy = parse_strategy(system)
    world = dure.Processes(2, device=accelerator)
    with pytest.raises(ValueError, match=said):
        dure.train(small_task(), strategy, world, dure.Stop(steps=1))


def test_torchrun_gives_a_rank_the_device_of_its_local_rank(
    accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "RANK": 3,
        "WORLD_SIZE": 4,
        "LOCAL_RANK": 1,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1,
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    world = dure.Torchrun(device=accelerator)
    assert world.computes_on == ("acc:0", "acc:1")
    assert world.device_here == torch.device("acc:1")
    assert world.describe() == "torchrun, 4 ranks on acc"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    with pytest.raises(ValueError, match="5 ranks need 5 acc devices"):
        dure.Torchrun(device=accelerator)


def test_float64_is_refused_on_a_device_without_it() -> None:
    with pytest.raises(ValueError, match="mps does not compute in float64: use float32"):
        check_device_dtypes(["cpu", "mps"], [torch.float32, torch.float64])
    check_device_dtypes(["cpu", "cuda"], [torch.float64])
    check_device_dtypes(["mps"], [torch.float32, torch.int64])


def test_a_comparison_names_the_device_of_ranks_as_a_setting(accelerator: str) -> None:
    assert entry(f"data-parallel,device={accelerator}:1", 2)[1] == dure.Processes(
        2, device=f"{accelerator}:1"
    )
    assert entry("single-worker,device=acc", None)[0] == dure.SingleWorker(device="acc")
    with pytest.raises(ValueError, match="for threads write --devices acc"):
        entry("data-parallel,world=threads,device=acc", 2)
