"""Clients that go and do not come back, or late: no round waits for them longer than it must."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch
from deployed import Deployment, Plan
from torch import nn

import dure
from small import network, small_task

SOON = 20.0
"""Seconds on a busy machine for what takes three on an idle one; deadlines are far beyond."""


class Slow(nn.Module):
    """Takes its time: a tenth of a second for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(0.1)
        return self.inner(inputs)


def slow_task() -> dure.Task:
    return small_task(model=Slow)


SOME = Plan(dure.FedAvg(clients=3, fraction=0.7, batch_size=4), rounds=4, task=slow_task)


def at_work(deployment: Deployment) -> int:
    """A client that trains; waits until there is one."""
    until = time.monotonic() + SOON
    while time.monotonic() < until:
        for number, client in deployment.clients.items():
            if client.alive and client.heard and client.heard[-1][0] == "training":
                return number
        time.sleep(0.01)
    raise AssertionError("no process trains")


def test_the_place_of_a_client_that_is_killed_is_filled(tmp_path: Path) -> None:
    with Deployment(tmp_path, SOME) as deployment:
        deployment.serve()
        deployment.join_all(3)
        deployment.clients[at_work(deployment)].kill()
        ended = deployment.ended(SOON)
        assert ended.summary["steps"] == 4


def test_also_where_the_server_was_killed_with_it(tmp_path: Path) -> None:
    with Deployment(tmp_path, SOME) as deployment:
        deployment.serve()
        deployment.join_all(3)
        number = at_work(deployment)
        deployment.proxy.lead_to(None)
        deployment.server.kill()
        deployment.clients[number].kill()
        deployment.serve()
        assert deployment.ended(2 * SOON).summary["steps"] == 4


def test_a_client_that_is_stopped_and_goes_on(tmp_path: Path) -> None:
    with Deployment(tmp_path, SOME) as deployment:
        deployment.serve()
        deployment.join_all(3)
        number = at_work(deployment)
        client = deployment.clients[number]
        client.signal(signal.SIGSTOP)
        deployment.server.wait_for("progress", lambda event: event.get("step", 0) >= 2, SOON)
        client.signal(signal.SIGCONT)
        assert deployment.ended(SOON).summary["steps"] == 4
        assert client.wait_for("over") == "the run is over"


@pytest.mark.parametrize("fraction", [1.0])
def test_a_round_ends_at_its_deadline_without_those_who_are_gone(
    fraction: float, tmp_path: Path
) -> None:
    plan = Plan(
        dure.FedAvg(clients=2, batch_size=4, fraction=fraction),
        rounds=3,
        task=slow_task,
        options={"deadline": 4.0},
    )
    with Deployment(tmp_path, plan) as deployment:
        deployment.serve()
        deployment.join_all(2)
        deployment.clients[at_work(deployment)].kill()
        summary = deployment.ended(2 * SOON).summary
        assert summary["steps"] == 3
        (facts,) = summary["facts"]
        assert len(facts["left"]) == 1
        assert facts["took_part"]["clients_share"] == 0.5
