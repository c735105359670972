"""Systems that offload walk the path, to the bit, of systems that do not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dure
from small import same_bits, small_task

ALL = "optimizer,parameters,gradients,activations"


def network() -> nn.Module:
    """Its second layer has a million bytes, as many as are worth a file."""
    layers = [nn.Linear(6, 512), nn.ReLU(), nn.Linear(512, 512), nn.Dropout(0.1), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(512, 3))


def large_task() -> dure.Task:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1100, 6, generator=generator)
    targets = torch.randint(0, 3, (1100,), generator=generator)
    return dure.Task(
        model=network,
        loss=F.cross_entropy,
        train=dure.Examples(inputs, targets),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        name="large",
    )


def trained(strategy: dure.Strategy, workers: int = 1, **more: Any) -> dure.Run:
    stop = more.pop("stop", dure.Stop(steps=2))
    return dure.train(large_task(), strategy, dure.Processes(workers), stop, **more)


def test_a_single_worker_with_everything_in_files_has_the_same_bits(tmp_path: Path) -> None:
    plain = trained(dure.SingleWorker(batch_size=None), stop=dure.Stop(steps=4))
    for offload in (ALL, "optimizer"):
        run = trained(dure.SingleWorker(batch_size=None, offload=offload), stop=dure.Stop(steps=4))
        assert same_bits(plain, run)
    # A run goes on with its state in files, or no longer.
    out = tmp_path / "run"
    trained(dure.SingleWorker(batch_size=None, offload=ALL), out=out)
    resumed = dure.resume(out, task=large_task(), stop=dure.Stop(steps=3))
    assert resumed.summary["steps"] == 3
    strategy = dure.SingleWorker(batch_size=None, offload="optimizer")
    resumed = dure.resume(out, task=large_task(), strategy=strategy, stop=dure.Stop(steps=4))
    assert same_bits(plain, resumed)


@pytest.mark.parametrize(
    ("make", "offload"),
    [
        (dure.DataParallel, "optimizer,parameters,activations"),
        (partial(dure.ZeRO, stage=3), "optimizer,parameters,activations"),
        (partial(dure.Pipeline, microbatches=1), "optimizer,activations"),
    ],
)
def test_ranks_that_offload_have_the_same_bits(make: Any, offload: str) -> None:
    plain = trained(make(batch_size=None), 2)
    assert same_bits(plain, trained(make(batch_size=None, offload=offload), 2))


REFUSED = [
    (dure.DataParallel(offload="gradients"), 2, "data-parallel cannot offload gradients"),
    (dure.Pipeline(offload="parameters"), 2, "cannot offload parameters"),
    (dure.SingleWorker(offload_folder="/tmp"), 1, "nothing is offloaded"),
    (dure.SingleWorker(offload="optimizer", offload_folder="/no/such"), 1, "no folder /no/such"),
    (
        dure.SingleWorker(offload="activations", privacy="dp-sgd:1:1"),
        1,
        "single-worker cannot offload activations, because dp-sgd",
    ),
]


@pytest.mark.parametrize(("strategy", "workers", "reason"), REFUSED)
def test_what_cannot_be_offloaded_is_refused_by_name(
    strategy: dure.Strategy, workers: int, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        strategy.check(small_task(), dure.Processes(workers))


def test_a_folder_in_memory_is_refused() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no folder in memory here")
    strategy = dure.SingleWorker(offload="optimizer", offload_folder="/dev/shm")
    with pytest.raises(ValueError, match="is in memory: give a folder on a disk"):
        strategy.check(small_task(), dure.Processes(1))
