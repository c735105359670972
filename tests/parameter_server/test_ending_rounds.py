"""Runs in real processes that end within a round, by Ctrl-C or by a limit, and are resumed.

While they are to end, a step of a worker is slow; what is resumed is not.
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.errors import PeerLostError
from small import largest_difference, same_bits, small_task

BATCHES = 200
"""Of a period: slow ones last longer than any test lets them."""
ROUND = dure.Stop(rounds=1)
EXAMPLES = 33 * 41 + 2 * 8
"""Of so many batches of eight: 41 examples are six of them."""
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def slow(presses: int | None, outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy that takes its time; presses: the process in which Ctrl-C is pressed."""
    calls = slow.__dict__
    calls["count"] = calls.get("count", 0) + torch.is_grad_enabled()
    if torch.is_grad_enabled():
        time.sleep(0.05)
        if calls["count"] == 3 and presses is not None:
            os.kill(presses, signal.SIGINT)
    return F.cross_entropy(outputs, targets)


def ended(
    folder: Path, strategy: dure.Strategy, presses: bool = False, **limits: Any
) -> dict[str, Any]:
    """What a run that ends in the middle of its first round says of itself."""
    loss = partial(slow, os.getpid() if presses else None)
    task = small_task(loss=loss, optimizer=MOMENTUM)
    run = dure.train(task, strategy, stop=dure.Stop(rounds=1, **limits), out=folder)
    assert run.summary["steps"] == 0
    assert 0 < run.summary["samples"] < EXAMPLES / 2
    # What is done of the round is measured.
    assert run.history.evaluations[-1].samples == run.summary["samples"]
    return run.summary


def resumed(folder: Path) -> dure.Run:
    run = dure.resume(folder, task=small_task(optimizer=MOMENTUM), stop=ROUND)
    assert (run.summary["ended"], run.summary["samples"]) == ("rounds", EXAMPLES)
    return run


def test_ctrl_c_ends_a_round_and_what_is_resumed_has_the_bits_of_a_run_without(
    tmp_path: Path,
) -> None:
    strategy = dure.ParameterServer(1, 2, batch_size=8, period=BATCHES)
    assert ended(tmp_path, strategy, presses=True)["ended"] == "interrupt"
    again = resumed(tmp_path)
    whole = dure.train(small_task(optimizer=MOMENTUM), strategy, dure.Simulated(), ROUND)
    assert same_bits(again, whole)
    # The loss of the round is that of all its batches.
    assert again.summary["train_loss"] == pytest.approx(whole.summary["train_loss"])


def test_a_limit_of_seconds_ends_a_round_and_parts_that_were_dealt_are_done_once(
    tmp_path: Path,
) -> None:
    strategy = dure.ParameterServer(1, 2, batch_size=8, period=BATCHES, staleness=None)
    assert ended(tmp_path, strategy, seconds=0.1)["ended"] == "seconds"
    assert resumed(tmp_path).summary["numbers"]["pushes"] == 2 * BATCHES


def test_a_limit_of_bytes_ends_a_round_of_a_replica_that_goes_on_to_the_same_bits(
    tmp_path: Path,
) -> None:
    strategy = dure.Downpour(replicas=1, batch_size=8, overlap=False, period=BATCHES)
    assert ended(tmp_path, strategy, bytes=2 * 8 * 215)["ended"] == "bytes"
    again = resumed(tmp_path)
    task = small_task(optimizer=MOMENTUM)
    whole = dure.train(task, dure.SingleWorker(8), stop=dure.Stop(steps=BATCHES))
    assert same_bits(again, whole)


def test_the_stages_of_a_replica_end_after_the_same_step(tmp_path: Path) -> None:
    strategy = dure.Downpour(replicas=2, partitions=2, batch_size=4, period=BATCHES, warm_start=5)
    assert ended(tmp_path, strategy, seconds=0.1)["ended"] == "seconds"
    run = dure.resume(tmp_path, task=small_task(optimizer=MOMENTUM), stop=ROUND)
    assert run.summary["numbers"]["pushes"] == 2 * BATCHES + 5


def dies(file: Path, outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy; the first process that comes to its fourth step is killed."""
    calls = dies.__dict__
    calls["count"] = calls.get("count", 0) + torch.is_grad_enabled()
    if calls["count"] == 4:
        try:
            os.close(os.open(file, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return F.cross_entropy(outputs, targets)
        os.kill(os.getpid(), signal.SIGKILL)
    return F.cross_entropy(outputs, targets)


def test_a_worker_that_was_killed_takes_part_again_when_the_run_is_resumed(
    tmp_path: Path,
) -> None:
    task = small_task(loss=partial(dies, tmp_path / "killed"))
    strategy = dure.ParameterServer(1, 2, batch_size=8)
    run = dure.train(task, strategy, stop=ROUND, out=tmp_path / "run")
    assert len(run.summary["facts"][0]["parameter_server"]["lost"]) == 1
    again = dure.resume(tmp_path / "run", task=small_task(), stop=dure.Stop(rounds=2))
    assert not again.summary["facts"][0]["parameter_server"]["lost"]
    whole = dure.train(small_task(), dure.SingleWorker(8), stop=dure.Stop(epochs=2))
    assert largest_difference(again, whole) < 1e-12


def with_statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()


@pytest.mark.parametrize(
    "strategy",
    [
        dure.ParameterServer(1, 1, batch_size=8),
        dure.Downpour(replicas=1, batch_size=8, overlap=False),
    ],
    ids=["parameter server", "Downpour"],
)
def test_the_statistics_of_batch_norm_go_on_where_they_were(
    strategy: dure.Strategy, tmp_path: Path
) -> None:
    task = small_task(model=with_statistics, n=40)
    dure.train(task, strategy, stop=ROUND, out=tmp_path)
    again = dure.resume(tmp_path, task=task, stop=dure.Stop(rounds=2))
    assert same_bits(again, dure.train(task, dure.SingleWorker(8), stop=dure.Stop(epochs=2)))


def test_a_worker_that_does_not_end_its_step_is_named_within_the_deadline() -> None:
    def hangs(outputs: Tensor, targets: Tensor) -> Tensor:
        # The last batch of an epoch has one example.
        if torch.is_grad_enabled() and len(targets) == 1:
            time.sleep(60)
        return F.cross_entropy(outputs, targets)

    # With the others it waits for nobody, so that only the end of the run waits for it.
    with pytest.raises(PeerLostError, match="rank 2 has not finished its step for 3 s"):
        dure.train(
            small_task(loss=hangs),
            dure.ParameterServer(1, 1, batch_size=8),
            dure.Processes(3, deadline=3),
            dure.Stop(seconds=0.1),
        )
