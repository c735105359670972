"""Simulated parameter servers whose workers compute on an accelerator, a stand-in for tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dure
import stand_in_device  # noqa: F401 - registers the device
from dure.run.registry import parse_strategy
from small import CLASSES, FEATURES, largest_difference, small_task

SEEN: set[str] = set()
"""Types of the devices on which a model's forward pass has run."""


class Records(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        SEEN.add(inputs.device.type)
        return inputs


def with_buffers() -> nn.Module:
    layers = [nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, CLASSES)]
    return nn.Sequential(Records(), *layers).double()


@pytest.mark.parametrize(
    "name",
    [
        "parameter-server,workers=2,servers=2,batch_size=8",
        "parameter-server,workers=2,batch_size=8,staleness=1",
        "parameter-server,workers=2,batch_size=8,staleness=1,compression=top-k:0.5",
        "downpour,replicas=2,batch_size=8,warm_start=2",
    ],
)
def test_workers_on_a_device_get_the_weights_of_the_cpu(name: str) -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64))
    task = small_task(model=with_buffers, n=32, loss=loss, clip_norm=1.0)

    def run(device: str | None) -> dure.Run:
        world = dure.Simulated(device=device, devices="stragglers:0.5:3")
        return dure.train(task, parse_strategy(name), world, dure.Stop(rounds=2))

    on_cpu = run(None)
    SEEN.clear()
    on_device = run("acc:0")
    assert "acc" in SEEN
    assert largest_difference(on_device, on_cpu) < 1e-12


def test_rows_of_tables_are_only_in_the_cpus_memory() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(9, 3, sparse=True), nn.Linear(3, CLASSES))

    data: Any = dure.Examples(torch.arange(24).view(12, 2) % 9, torch.arange(12) % CLASSES)
    task = small_task(model=model, train=data, test=data)
    with pytest.raises(ValueError, match=r"0\.weight is a sparse embedding.*computed on acc"):
        dure.train(
            task,
            dure.ParameterServer(workers=2, batch_size=4),
            dure.Simulated(device="acc"),
            dure.Stop(rounds=1),
        )
