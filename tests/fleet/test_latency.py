"""A prediction on the device against one on a server."""

from __future__ import annotations

import pytest
import torch

from dure.run.latency import PredictionCall, latency, measure_latency
from small import small_task


def test_a_remote_answer_takes_the_way_and_the_server() -> None:
    link = {"up_mbit": 2.0, "down_mbit": 8.0, "delay": 0.1}
    found = latency(
        PredictionCall(250_000, 1_000_000), device_seconds=3.0, server_seconds=0.5, **link
    )
    assert found.local == 3.0
    assert found.remote == pytest.approx(0.1 + 1.0 + 0.5 + 0.1 + 1.0)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"up_mbit": 0.0}, "have to be greater than 0"),
        ({"device_seconds": -1.0}, "0 or more"),
        ({"delay": float("nan")}, "0 or more"),
    ],
)
def test_links_that_cannot_be_are_refused(changed: dict[str, float], complaint: str) -> None:
    usual = {"device_seconds": 1.0, "server_seconds": 1.0, "up_mbit": 1.0, "down_mbit": 1.0}
    with pytest.raises(ValueError, match=complaint):
        latency(PredictionCall(1, 1), **{**usual, **changed})


def test_a_call_is_measured_of_the_task_s_own_example() -> None:
    task = small_task()
    model = torch.nn.Sequential(torch.nn.Linear(task.train.inputs.shape[1], 3), torch.nn.Dropout())
    model.double()
    found = measure_latency(task, model, times=3)
    assert found.call == PredictionCall(task.train.inputs[:1].nbytes, 3 * 8)
    assert found.seconds > 0
    assert model.training
    with pytest.raises(ValueError, match="times is 0"):
        measure_latency(task, model, times=0)
