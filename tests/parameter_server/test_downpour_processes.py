"""Downpour SGD in real processes: the path of one worker, whole or divided, and what a death costs.

A process that dies is killed in the midst of its work, by a loss that the test has given to it.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import dure
from dure.errors import LossNotFiniteError
from small import largest_difference, same_bits, small_task

STOP = dure.Stop(rounds=3)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def train(task: dure.Task, stop: dure.Stop = STOP, **fields: Any) -> dure.Run:
    return dure.train(task, dure.Downpour(**{"batch_size": 8, **fields}), stop=stop)


def alone(task: dure.Task) -> dure.Run:
    return dure.train(task, dure.SingleWorker(8), stop=dure.Stop(epochs=3))


def test_one_replica_has_the_bits_of_a_single_worker() -> None:
    task = small_task(optimizer=MOMENTUM)
    run = train(task, replicas=1, servers=2, copies=1, overlap=False)
    assert same_bits(run, alone(task))


@pytest.mark.parametrize("servers", [1, 3])
def test_a_replica_in_parts_walks_the_path_of_a_whole_one(servers: int) -> None:
    task = small_task(optimizer=MOMENTUM, lr_schedule=lambda step: 1 / (1 + step))
    run = train(task, replicas=1, partitions=2, servers=servers, overlap=False)
    assert largest_difference(run, alone(task)) < 1e-12
    workers = [line for line in run.summary["per_worker"] if line["name"].startswith("worker")]
    # 41 examples are 6 steps; together the stages push every weight once a step, and send what
    # crosses from one to the other.
    assert sum(line["bytes_sent"] for line in workers) > 3 * 6 * 8 * 215


def test_parts_push_and_fetch_as_often_as_a_whole_replica() -> None:
    fields = {"replicas": 1, "fetch_every": 3, "push_every": 2, "gamma": 0.05, "overlap": False}
    run = train(small_task(), partitions=2, servers=2, **fields)
    whole = dure.train(small_task(), dure.Downpour(batch_size=8, **fields), dure.Simulated(), STOP)
    assert largest_difference(run, whole) < 1e-12
    assert run.summary["numbers"]["pushes"] == whole.summary["numbers"]["pushes"]


def test_replicas_in_parts_use_each_example_once_an_epoch() -> None:
    # The first one makes two steps alone, before that.
    run = train(small_task(n=40), replicas=2, partitions=2, batch_size=4, warm_start=2)
    assert run.summary["samples"] == 3 * 40 + 2 * 4
    assert run.summary["numbers"]["pushes"] == 2 * 3 * 5 + 2


def test_a_run_that_is_resumed_has_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    task = small_task(optimizer=partial(torch.optim.Adam, lr=0.01))
    strategy = dure.Downpour(replicas=1, partitions=2, batch_size=8, push_every=4, overlap=False)
    dure.train(task, strategy, stop=dure.Stop(rounds=1), out=tmp_path / "run")
    again = dure.resume(tmp_path / "run", task=task, stop=STOP)
    assert same_bits(again, dure.train(task, strategy, stop=STOP))


def kills_one(file: Path, at: int, outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy, in whose `at`-th call the first process to get so far is killed."""
    calls = kills_one.__dict__
    calls["count"] = calls.get("count", 0) + 1
    if calls["count"] == at and torch.is_grad_enabled():
        try:
            os.close(os.open(file, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return F.cross_entropy(outputs, targets)
        os.kill(os.getpid(), signal.SIGKILL)
    return F.cross_entropy(outputs, targets)


@pytest.mark.parametrize("partitions", [1, 2])
def test_the_others_go_on_when_a_replica_dies(partitions: int, tmp_path: Path) -> None:
    task = small_task(loss=partial(kills_one, tmp_path / "killed", 30))
    run = train(task, dure.Stop(rounds=4), replicas=2, partitions=partitions, batch_size=2)
    assert (tmp_path / "killed").exists()
    assert run.summary["ended"] == "rounds"
    lost = run.summary["facts"][0]["parameter_server"]["lost"]
    assert len(lost) == partitions
    # One has all its steps: 11 a round, of the 21 or 20 examples that are its own.
    assert run.summary["samples"] >= 4 * 20


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_step() -> None:
    def infinite(outputs: Tensor, targets: Tensor) -> Tensor:
        last = torch.is_grad_enabled() and len(targets) == 1
        return F.cross_entropy(outputs, targets) * (float("nan") if last else 1.0)

    with pytest.raises(LossNotFiniteError) as raised:
        train(small_task(loss=infinite), replicas=1, batch_size=40, overlap=False)
    assert raised.value.when == "step 2"
