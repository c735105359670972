"""What a loss holds goes to where the model is; what is written to a disk comes back."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dure
from dure.machine import devices
from dure.machine.devices import DeviceGenerator, device_of_model, on_device, to_cpu, to_device
from dure.randomness.seeds import derive, generators_state, restore_generators, seed_generators
from small import examples, network, small_task

CPU = torch.device("cpu")
AWAY = torch.device("meta")
"""A device that every machine has, and that is not the CPU."""

WEIGHT = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)


def test_a_model_is_where_its_first_parameter_is() -> None:
    assert device_of_model(network()) == CPU
    assert device_of_model(nn.Sequential(nn.Flatten(), nn.Linear(2, 2, device=AWAY))) == AWAY
    assert device_of_model(nn.Flatten()) == CPU


@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        nn.MSELoss(),
        partial(F.cross_entropy, ignore_index=1),
        lambda outputs, targets: F.mse_loss(outputs, targets),
    ],
)
def test_a_function_without_tensors_stays_what_it_is(loss: object) -> None:
    assert on_device(loss, AWAY) is loss


def test_a_modules_tensors_go_along_and_the_users_own_stays() -> None:
    loss = nn.CrossEntropyLoss(weight=WEIGHT)
    moved = on_device(loss, AWAY)
    assert isinstance(moved, nn.CrossEntropyLoss)
    assert moved.weight is not None
    assert moved.weight.device == AWAY
    assert loss.weight is WEIGHT
    assert on_device(loss, CPU) is loss


def test_the_arguments_of_a_partial_go_along() -> None:
    inner = nn.CrossEntropyLoss(weight=WEIGHT)
    moved = on_device(partial(partial(inner, WEIGHT), target={"at": WEIGHT}), AWAY)
    assert moved.func.weight.device == AWAY
    assert moved.args[0].device == AWAY
    assert moved.keywords["target"]["at"].device == AWAY
    assert inner.weight is WEIGHT


def test_a_task_is_itself_where_nothing_has_to_move() -> None:
    task = small_task(loss=partial(F.cross_entropy, weight=WEIGHT))
    assert task.on(CPU) is task
    there = task.on(AWAY)
    assert there.loss.keywords["weight"].device == AWAY  # type: ignore[attr-defined]
    assert there.train is task.train
    assert small_task().on(AWAY).loss is F.cross_entropy


def test_trees_go_to_a_device_and_back() -> None:
    tree = {"a": [torch.ones(2), 3], "b": "text"}
    assert to_device(tree, AWAY)["a"][0].device == AWAY
    assert to_device(tree, CPU)["a"][0] is tree["a"][0]
    assert to_cpu(tree)["a"][1:] == [3]


def test_examples_lie_in_the_cpus_memory() -> None:
    data = examples()
    with pytest.raises(ValueError, match="these are on meta: call cpu"):
        dure.Examples(data.inputs.to(AWAY), data.targets)


class SingleDevice:
    """As much of a module as `torch.mps` has: no `is_initialized`, and nothing of all devices."""

    def __init__(self) -> None:
        self.state = torch.tensor([0])

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        self.state = torch.tensor([seed])

    def get_rng_state(self) -> torch.Tensor:
        return self.state

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.state = state


def test_an_accelerator_with_a_single_device_is_left_alone_until_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = SingleDevice()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch, "mps", module)
    monkeypatch.setattr(devices, "_named", set())
    before = generators_state()
    seed_generators(1, "step")
    assert int(module.state) == 0
    assert "mps" not in before
    assert devices.device_of("mps") == torch.device("mps", 0)
    seed_generators(1, "step")
    assert int(module.state) == derive(1, "step")
    seeded = generators_state()
    DeviceGenerator(torch.device("mps", 0)).set_state(torch.tensor([5]))
    restore_generators(before)
    assert int(DeviceGenerator(torch.device("mps", 0)).get_state()) == 5
    restore_generators(seeded)
    assert int(module.state) == derive(1, "step")


def test_an_older_torch_computes_on_the_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_IS_NEW", False)
    monkeypatch.setattr(devices, "accelerator", lambda: "cuda")
    monkeypatch.setattr(devices, "device_count", lambda kind: 2)
    with pytest.raises(ValueError, match="computing on cuda needs torch"):
        devices.device_of("cuda")
    assert devices.devices_of_ranks("auto", 2) == (CPU, CPU)
    assert devices.default_devices(2, 4) == ("cpu", "cpu")
    assert devices.device_of("cpu") == CPU
