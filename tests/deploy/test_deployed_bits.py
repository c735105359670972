"""Deployed is simulated, to the bit: weights, buffers, losses and metrics of a federation of real
processes over TLS are those of the simulation with the same seed."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from deployed import Plan, deployed
from torch import nn
from torch.nn import functional as F

import dure
from small import CLASSES, FEATURES, network, small_task


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)
    ).double()


def with_statistics() -> dure.Task:
    return small_task(model=normed)


def weighed() -> dure.Task:
    weight = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)
    return small_task(loss=nn.CrossEntropyLoss(weight=weight))


def as_asked() -> dure.Task:
    return small_task(clip_norm=0.2, precision="bf16", ema=0.5, unfreeze={"0.*": 2})


def in_float16() -> dure.Task:
    def steep(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # Overflows with the first scale: clients repeat a pass.
        return F.cross_entropy(outputs, targets) * 2e4

    return small_task(
        model=partial(network, torch.float32),
        dtype=torch.float32,
        precision="fp16",
        loss=steep,
        optimizer=partial(torch.optim.SGD, lr=1e-5),
    )


PLANS = {
    "FedAvg with batch norm and clients that measure": Plan(
        dure.FedAvg(clients=3, batch_size=4, held_out=0.3), task=with_statistics, evaluate_every=2
    ),
    "FedAvg with weights of classes": Plan(dure.FedAvg(clients=3, batch_size=4), task=weighed),
    "FedAvg of some, trained as the task asks": Plan(
        dure.FedAvg(clients=4, fraction=0.5, batch_size=4), task=as_asked, rounds=6
    ),
    "SCAFFOLD": Plan(dure.Scaffold(clients=3, batch_size=4)),
    "Ditto": Plan(dure.Ditto(clients=3, batch_size=4, held_out=0.3), evaluate_every=2),
    "FedPer": Plan(dure.FedPer(clients=3, batch_size=4, personal_layers=1)),
    "FedAdam in float16": Plan(dure.FedAdam(clients=3, batch_size=4), task=in_float16),
    "Byzantine GD": Plan(dure.ByzantineGD(clients=4, groups=2)),
    "Krum": Plan(dure.FedAvg(clients=5, batch_size=4, aggregate="krum:1")),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_deployed_federation_has_the_bits_of_the_simulation(name: str, tmp_path: Path) -> None:
    plan = PLANS[name]
    ended = deployed(tmp_path, plan, plan.strategy.clients)
    ended.check_same(plan.simulated(), own="4." if name == "FedPer" else "nobody's")
    assert (ended.facts["bits"], ended.facts["differs"]) == ("same", [])
