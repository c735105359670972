"""Batches that are read ahead change no bit, whoever reads them."""

from __future__ import annotations

import multiprocessing
import random
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import dure
from dure.errors import WorkerFailedError
from small import CLASSES, FEATURES, examples, same_bits, small_task

STOP = dure.Stop(epochs=2)
SEED = 7


class Noisy(Dataset[Any]):
    """Transforms draw from every generator there is."""

    def __init__(self, broken: int | None = None) -> None:
        self.data, self.broken = examples(), broken

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.broken:
            raise ZeroDivisionError(f"example {index} is bad")
        noise = torch.rand(FEATURES) + float(numpy.random.rand()) + random.random()
        return self.data.inputs[index] + noise, self.data.targets[index]


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES).double()

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.linear(F.dropout(inputs, 0.3, self.training))
        return scores


def train(task: dure.Task, loaders: int, stop: dure.Stop = STOP, **options: Any) -> dure.Run:
    return dure.train(task, dure.SingleWorker(8, loaders=loaders), stop=stop, seed=SEED, **options)


def loaders_left() -> list[Any]:
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("dure loader")]
    return threads + multiprocessing.active_children()


@pytest.mark.parametrize("loaders", [1, 3])
def test_loaders_change_no_bit_and_end_with_the_run(loaders: int) -> None:
    task = small_task(model=Dropping)
    assert same_bits(train(task, loaders), train(task, 0))
    assert not loaders_left()


def test_transforms_that_draw_are_read_by_processes_and_change_no_bit() -> None:
    """The model draws on where the transforms of its batch have ended, also in a loader's
    process."""
    task = small_task(model=Dropping, train=Noisy(), test=None)
    assert same_bits(train(task, 2), train(task, 0))
    assert not loaders_left()


@pytest.mark.parametrize("data", [examples(), Noisy()])
def test_a_resumed_run_reads_on_where_it_was(tmp_path: Path, data: Any) -> None:
    task = small_task(model=Dropping, train=data, test=None)
    train(task, 2, dure.Stop(steps=4), out=tmp_path)
    assert same_bits(dure.resume(tmp_path, task=task, stop=STOP), train(task, 0))


def test_an_example_that_cannot_be_read_names_loader_and_step() -> None:
    order = dure.data.batches.Batches(41, 8, SEED)
    broken = int(order.at(2)[0])
    with pytest.raises(WorkerFailedError) as caught:
        train(small_task(train=Noisy(broken), test=None), 1)
    assert (
        str(caught.value)
        == f"loader 0 failed in step 3: ExampleError: the dataset cannot give example {broken}: "
        f"ZeroDivisionError: example {broken} is bad"
    )
    assert "raise ZeroDivisionError" in caught.value.traceback


def test_reading_is_the_loaders_time_and_they_are_no_workers() -> None:
    summary = train(small_task(), 2).summary
    trained, *loaders = summary["per_worker"]
    assert [one["name"] for one in loaders] == ["loader 0", "loader 1"]
    assert sum(one["compute_seconds"] for one in loaders) > 0
    assert trained["compute_seconds"] > 0
    assert summary["workers"] == 1


def test_loaders_are_counted_from_0() -> None:
    with pytest.raises(ValueError, match="loaders is -1, but it has to be 0 or more"):
        train(small_task(), -1)


@pytest.mark.needs_cuda
@pytest.mark.parametrize("data", [examples(), Noisy()])
def test_all_cores_feed_one_gpu(data: Any) -> None:
    task = small_task(train=data, test=None)
    runs = [
        dure.train(task, dure.SingleWorker(8, "cuda", loaders), stop=STOP, seed=SEED)
        for loaders in (0, 2)
    ]
    assert same_bits(*runs)


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a CUDA device here")
def test_a_gpu_that_is_not_there_is_said_before_any_work() -> None:
    with pytest.raises(ValueError, match="this machine has no CUDA device, so cuda cannot be used"):
        dure.train(small_task(), dure.SingleWorker(8, device="cuda"))
