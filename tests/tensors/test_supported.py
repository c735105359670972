"""Tensors that cannot be saved or sent are refused before any work, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dure
from small import network, small_task


def with_buffer(make: Callable[[], Tensor]) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        made = network()
        made.register_buffer("table", make())
        return made

    return model


SYSTEMS = [
    (dure.SingleWorker(), dure.Stop(steps=1)),
    (dure.FedAvg(clients=2), dure.Stop(rounds=1)),
    (dure.LocalSGD(), dure.Stop(rounds=1)),
]


@pytest.mark.parametrize(("strategy", "stop"), SYSTEMS)
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.eye(3).to_sparse(), "the buffer table is sparse_coo"),
        (lambda: torch.ones(3, device="meta"), "the buffer table is on the meta device"),
    ],
)
def test_what_nobody_can_save_is_refused(
    strategy: dure.Strategy, stop: dure.Stop, make: Any, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        dure.train(small_task(model=with_buffer(make)), strategy, stop=stop)


def test_a_state_that_is_no_tensor_is_refused() -> None:
    class Counting(nn.Sequential):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 1}

        def set_extra_state(self, state: Any) -> None:
            pass

    with pytest.raises(ValueError, match="_extra_state of the model's state_dict is a dict"):
        dure.train(small_task(model=lambda: Counting(network())), dure.SingleWorker())


def test_one_worker_has_any_dtype_and_others_refuse_it(tmp_path: Path) -> None:
    task = small_task(model=with_buffer(lambda: torch.ones(3).to(torch.float8_e4m3fn)))
    run = dure.train(task, dure.SingleWorker(), stop=dure.Stop(steps=1), out=tmp_path / "run")
    assert run.model.state_dict()["table"].dtype == torch.float8_e4m3fn
    with pytest.raises(
        ValueError, match=r"the buffer table is torch\.float8_e4m3fn, which only single-worker"
    ):
        dure.train(task, dure.FedAvg(clients=2), stop=dure.Stop(rounds=1))
