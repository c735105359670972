"""Compressed pushes between real processes: the bits and bytes of the simulation."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

import dure
from dure.collectives.compression import OneBit, TopK
from small import same_bits, small_task

STOP = dure.Stop(rounds=3)
ADAM = partial(torch.optim.Adam, lr=0.01)


def interrupted(task: dure.Task, strategy: dure.Strategy, folder: Path) -> dure.Run:
    """A run in processes that ended after a round, and was resumed."""
    dure.train(task, strategy, stop=dure.Stop(rounds=1), out=folder)
    return dure.resume(folder, task=task, stop=STOP)


def test_a_run_that_is_resumed_has_the_bits_and_the_bytes_of_the_simulation(
    tmp_path: Path,
) -> None:
    task = small_task(optimizer=ADAM)
    strategy = dure.ParameterServer(2, 2, batch_size=8, compression=TopK(0.1))
    run = interrupted(task, strategy, tmp_path / "run")
    simulation = dure.train(task, strategy, dure.Simulated(), STOP)
    assert same_bits(run, simulation)
    facts = run.summary["facts"][0]["parameter_server"]
    assert facts["push_bytes"] == [11 * 12, 11 * 12]
    # The leader is there in processes alone.
    for real, virtual in zip(
        run.summary["per_worker"][1:], simulation.summary["per_worker"], strict=True
    ):
        assert real["name"] == virtual["name"]
        if real["name"].startswith("worker"):
            assert real["bytes_sent"] == virtual["bytes_sent"] == 3 * 6 * 2 * 11 * 12
            assert real["bytes_received"] == virtual["bytes_received"]


def test_a_replica_that_is_resumed_has_the_bits_of_the_simulation(tmp_path: Path) -> None:
    task = small_task(optimizer=ADAM)
    strategy = dure.Downpour(
        1, servers=2, batch_size=8, push_every=2, overlap=False, compression=OneBit()
    )
    run = interrupted(task, strategy, tmp_path / "run")
    assert same_bits(run, dure.train(task, strategy, dure.Simulated(), STOP))


def test_a_replica_in_parts_that_is_resumed_has_the_bits_of_one_that_was_not(
    tmp_path: Path,
) -> None:
    task = small_task(optimizer=ADAM)
    strategy = dure.Downpour(1, partitions=2, batch_size=8, overlap=False, compression=TopK(0.1))
    run = interrupted(task, strategy, tmp_path / "run")
    assert same_bits(run, dure.train(task, strategy, stop=STOP))
    assert run.summary["facts"][0]["parameter_server"]["pushes"] == 3 * 6
