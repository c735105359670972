"""What cannot compute on a GPU says so in one line, before any work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from on_gpu import GPU, there
from torch import nn

import dure
from dure.run.registry import parse_strategy
from small import examples, network, small_task

pytestmark = pytest.mark.needs_cuda

OF_RANKS = [
    "data-parallel",
    "zero",
    "pipeline",
    "tensor-parallel",
    "parallel,data=2",
    "parallel-sgd",
    "local-sgd",
    "diloco",
    "admm",
    "parameter-server",
    "downpour",
    "hogwild",
]


@pytest.mark.parametrize("name", OF_RANKS)
def test_ranks_refuse_a_model_on_a_gpu(name: str) -> None:
    strategy = parse_strategy(name)
    world = dure.Processes(strategy.run_traits.ranks or 2)
    with pytest.raises(ValueError, match=f"a model on {GPU}"):
        dure.train(small_task(model=there(network)), strategy, world, dure.Stop(epochs=1))


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        (dure.SingleWorker(8), dure.Processes(1)),
        (dure.DataParallel(8), dure.Threads(2, ("cpu",))),
    ],
)
def test_a_worker_on_the_cpu_refuses_it_too(strategy: Any, world: Any) -> None:
    with pytest.raises(ValueError, match=f"a model on {GPU}, but this system computes on the CPU"):
        dure.train(small_task(model=there(network)), strategy, world, dure.Stop(epochs=1))


@pytest.mark.parametrize("name", ["parameter-server", "downpour"])
def test_simulated_servers_refuse_it(name: str) -> None:
    with pytest.raises(ValueError, match=f"a model on {GPU}, but this system computes on the CPU"):
        dure.train(
            small_task(model=there(network)),
            parse_strategy(name),
            dure.Simulated(),
            dure.Stop(epochs=1),
        )


def test_a_model_on_two_devices_is_refused_by_simulated_clients() -> None:
    def halves() -> nn.Module:
        model = network()
        model[0].to(GPU)
        return model

    with pytest.raises(ValueError, match="move the whole model to one device"):
        dure.train(small_task(model=halves), dure.FedAvg(3), stop=dure.Stop(rounds=1))


@pytest.mark.parametrize("engine", ["loop-processes", "batched-processes"])
def test_clients_are_not_forked_by_a_process_that_uses_the_gpu(engine: Any) -> None:
    torch.zeros(1, device=GPU)
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES"):
        dure.train(small_task(), dure.FedAvg(3), dure.Simulated(engine=engine), dure.Stop(rounds=1))


def test_examples_stay_in_the_cpus_memory() -> None:
    data = examples()
    with pytest.raises(ValueError, match=f"these are on {GPU}: call cpu"):
        dure.Examples(data.inputs.to(GPU), data.targets)


def test_a_device_that_is_not_there_is_refused() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"this machine has no cuda:{count}"):
        dure.train(small_task(), dure.SingleWorker(8, device=f"cuda:{count}"))
