"""Servers and workers as real processes: the bits of the simulation, and what becomes of the dead.

A worker that dies is killed in the midst of its work, by a loss that the test has given to it.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import dure
from dure.errors import LossNotFiniteError, PeerLostError, WorkerFailedError
from dure.report.read import read_run
from small import largest_difference, same_bits, small_task

STOP = dure.Stop(rounds=3)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def train(task: dure.Task, strategy: dure.ParameterServer, **options: Any) -> dure.Run:
    return dure.train(task, strategy, stop=options.pop("stop", STOP), **options)


@pytest.mark.parametrize("replicas", [0, 1])
def test_it_has_the_bits_of_the_simulation(replicas: int) -> None:
    task = small_task(optimizer=MOMENTUM)
    strategy = dure.ParameterServer(servers=2, workers=2, batch_size=8, replicas=replicas)
    run = train(task, strategy)
    simulation = train(task, strategy, world=dure.Simulated())
    assert same_bits(run, simulation)
    # The leader is there in processes alone.
    for real, simulated in zip(
        run.summary["per_worker"][1:], simulation.summary["per_worker"], strict=True
    ):
        assert real["name"] == simulated["name"]
        for key in ("bytes_sent", "bytes_received"):
            # On a busy machine a server may tell its copy the same again.
            assert real[key] == simulated[key] or (replicas and real[key] > simulated[key])
    workers = [line for line in run.summary["per_worker"] if line["name"].startswith("worker")]
    # 41 examples are 6 steps; the weights go each way once a step.
    assert [line["bytes_sent"] for line in workers] == [3 * 6 * 8 * 215] * 2


@pytest.mark.parametrize("staleness", [2, None])
def test_one_worker_has_the_bits_of_a_single_worker(staleness: int | None) -> None:
    task = small_task(optimizer=MOMENTUM)
    run = train(task, dure.ParameterServer(3, 1, batch_size=8, staleness=staleness))
    assert same_bits(run, dure.train(task, dure.SingleWorker(8), stop=dure.Stop(epochs=3)))


def test_asynchronous_workers_use_each_example_once_an_epoch() -> None:
    task = small_task()
    run = train(task, dure.ParameterServer(2, 3, batch_size=9, staleness=None))
    assert run.summary["samples"] == 3 * 41
    assert run.summary["numbers"]["pushes"] == 3 * 5 * 3


def test_a_run_that_is_resumed_has_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    task = small_task(optimizer=partial(torch.optim.Adam, lr=0.01))
    strategy = dure.ParameterServer(2, 2, batch_size=8)
    train(task, strategy, stop=dure.Stop(rounds=1), out=tmp_path / "run")
    again = dure.resume(tmp_path / "run", task=task, stop=STOP)
    assert same_bits(again, train(task, strategy, world=dure.Simulated()))
    # Also what was sent before the interruption, by processes that have ended since.
    workers = [line for line in again.summary["per_worker"] if line["name"].startswith("worker")]
    assert [line["bytes_sent"] for line in workers] == [3 * 6 * 8 * 215] * 2


def test_the_timeline_has_servers_and_workers_and_each_step_of_them(tmp_path: Path) -> None:
    run = train(small_task(), dure.ParameterServer(1, 2, batch_size=8), out=tmp_path / "run")
    trace = read_run(tmp_path / "run").trace
    assert trace is not None
    for number in range(2):
        lane = next(lane for lane, name in trace.lanes.items() if name == f"worker {number}")
        steps = [one.step for one in trace.spans if one.lane == lane and one.category == "compute"]
        assert steps == list(range(1, 1 + 3 * 6))
    pushes = [one for one in trace.spans if one.name.startswith("push")]
    assert {trace.lanes[one.lane] for one in pushes} == {"server 0"}
    assert len(pushes) == 2 * 3 * 6
    waiting = [line.numbers["waiting"] for line in run.history.steps if line.numbers]
    assert all(0 < share < 1 for share in waiting)


def _first(file: Path) -> bool:
    """Whether this process is the first that asks."""
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False


def kills_worker(
    file: Path, how: signal.Signals, at: int, outputs: Tensor, targets: Tensor
) -> Tensor:
    """Cross entropy, in whose `at`-th call the first process to get so far is killed."""
    calls = kills_worker.__dict__
    calls["count"] = calls.get("count", 0) + 1
    if calls["count"] == at and torch.is_grad_enabled() and _first(file):
        os.kill(os.getpid(), how)
    return F.cross_entropy(outputs, targets)


def test_workers_go_on_when_one_is_killed_and_no_example_is_left_out(tmp_path: Path) -> None:
    loss = partial(kills_worker, tmp_path / "killed", signal.SIGKILL, 7)
    task = small_task(loss=loss)
    strategy = dure.ParameterServer(2, 3, batch_size=9)
    run = train(task, strategy)
    assert (tmp_path / "killed").exists()
    assert run.summary["ended"] == "rounds"
    lost = run.summary["facts"][0]["parameter_server"]["lost"]
    assert len(lost) == 1
    assert lost[0][0].startswith("worker")
    # The joint batches stay what they are, whoever computes their parts.
    assert (
        largest_difference(
            run, dure.train(small_task(), dure.SingleWorker(9), stop=dure.Stop(epochs=3))
        )
        < 1e-12
    )


def kills_server(file: Path, number: int, at: int, outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy, in whose `at`-th call the first process to get so far kills a server."""
    calls = kills_server.__dict__
    calls["count"] = calls.get("count", 0) + 1
    if calls["count"] == at and torch.is_grad_enabled() and _first(file):
        os.kill(_siblings()[1 + number], signal.SIGKILL)
    return F.cross_entropy(outputs, targets)


def _siblings() -> list[int]:
    """The processes of all ranks, in order: children of one, in the order of their birth."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getppid():
            found.append((int(fields[19]), int(folder.name)))
    return [process for _, process in sorted(found)]


def test_a_server_that_dies_without_a_copy_is_named_with_its_keys(tmp_path: Path) -> None:
    task = small_task(loss=partial(kills_server, tmp_path / "killed", 1, 4))
    with pytest.raises(PeerLostError) as raised:
        train(task, dure.ParameterServer(2, 2, batch_size=8))
    assert raised.value.ranks == (2,)
    said = str(raised.value)
    assert said.startswith("rank 2 was killed by SIGKILL")
    assert "server 1 held the float64 keys 108 to 214, of which there is no copy" in said
    assert "replicas=1" in said


def bag() -> torch.nn.Module:
    """The mean of words from a sparse table, and a layer."""
    table = torch.nn.EmbeddingBag(23, 4, sparse=True)
    return torch.nn.Sequential(table, torch.nn.Linear(4, 3)).double()


def test_a_server_of_a_table_dies_and_no_bit_changes(tmp_path: Path) -> None:
    ids = torch.randint(23, (41, 5), generator=torch.Generator().manual_seed(0))
    words = dure.Examples(ids, ids.sum(dim=1) % 3)
    adagrad = partial(torch.optim.Adagrad, lr=0.1)
    task = small_task(model=bag, train=words, test=words, optimizer=adagrad)
    strategy = dure.ParameterServer(3, 2, batch_size=8, replicas=1)
    loss = partial(kills_server, tmp_path / "killed", 1, 4)
    run = train(dataclasses.replace(task, loss=loss), strategy)
    assert run.summary["facts"][0]["parameter_server"]["lost"][0][0] == "server 1"
    assert same_bits(run, train(task, strategy, world=dure.Simulated()))


def test_without_a_bound_what_a_dead_worker_had_is_dealt_out_again(tmp_path: Path) -> None:
    loss = partial(kills_worker, tmp_path / "killed", signal.SIGKILL, 5)
    strategy = dure.ParameterServer(1, 2, batch_size=8, staleness=None)
    run = train(small_task(loss=loss), strategy)
    assert run.summary["samples"] == 3 * 41


def test_a_worker_that_hangs_is_named_within_the_deadline() -> None:
    def hanging(outputs: Tensor, targets: Tensor) -> Tensor:
        # The last batch has one example, which is the first worker's.
        if torch.is_grad_enabled() and len(targets) == 1:
            time.sleep(60)
        return F.cross_entropy(outputs, targets)

    started = time.monotonic()
    with pytest.raises(PeerLostError, match="rank 2 has made no step for 2 s") as raised:
        train(
            small_task(loss=hanging),
            dure.ParameterServer(1, 2, batch_size=40),
            world=dure.Processes(4, deadline=2),
        )
    assert raised.value.ranks == (2,)
    assert time.monotonic() - started < 50


@pytest.mark.parametrize(
    ("hangs", "said"),
    [
        (True, "^rank 0 has made no step for 2 s, .*, during measuring of round 1$"),
        (False, r"^rank 0 fell silent \(nothing for 2 s\), during (training|serving) of step \d"),
    ],
)
def test_a_leader_that_hangs_in_a_measurement_or_is_stopped_is_named(
    hangs: bool, said: str
) -> None:
    measured = []

    def metric(outputs: Tensor, targets: Tensor) -> Tensor:
        measured.append(0)
        # The first evaluation is before the first round.
        if len(measured) == 2 and hangs:
            time.sleep(60)
        elif len(measured) == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        return (outputs.argmax(1) == targets).double().mean()

    with pytest.raises(PeerLostError, match=said) as raised:
        train(
            small_task(metrics={"accuracy": metric}),
            dure.ParameterServer(1, 1, batch_size=40, period=1),
            world=dure.Processes(3, deadline=2),
            evaluate_every=1,
        )
    assert raised.value.ranks == (0,)


def test_an_error_of_the_task_ends_the_run_and_names_worker_and_step() -> None:
    def failing(outputs: Tensor, targets: Tensor) -> Tensor:
        if torch.is_grad_enabled() and len(targets) == 1:
            raise RuntimeError("a batch of one")
        return F.cross_entropy(outputs, targets)

    task = small_task(loss=failing)
    text = "^worker 0 failed in step 2: RuntimeError: a batch of one$"
    with pytest.raises(WorkerFailedError, match=text):
        train(task, dure.ParameterServer(1, 2, batch_size=40))


def test_a_loss_that_is_not_finite_ends_the_run_and_names_worker_and_step() -> None:
    def infinite(outputs: Tensor, targets: Tensor) -> Tensor:
        last = torch.is_grad_enabled() and len(targets) == 1
        return F.cross_entropy(outputs, targets) * (float("nan") if last else 1.0)

    with pytest.raises(LossNotFiniteError) as raised:
        train(small_task(loss=infinite), dure.ParameterServer(1, 2, batch_size=40))
    assert raised.value.where == "worker 0"
    assert raised.value.when == "step 2"


def late(parameters: Any) -> torch.optim.Optimizer:
    """SGD, for which rank 0 takes longer than the others wait for an answer when they call it."""
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == 0:
        time.sleep(1.5)
    return torch.optim.SGD(parameters, lr=0.1)


def test_workers_wait_for_a_leader_that_is_late() -> None:
    task = small_task(optimizer=late)
    run = train(task, dure.ParameterServer(1, 2, batch_size=20), stop=dure.Stop(rounds=1))
    assert run.summary["ended"] == "rounds"
