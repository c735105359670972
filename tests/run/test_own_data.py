"""Training data of each rank: what is refused, what is called where, and runs that go on."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import dure
from dure.contracts.world import World
from dure.data.rank_examples import RankDataFactory, RankExamples
from dure.errors import DataError, RunFolderError, WorkerFailedError
from dure.run.rank_data import task_for_checks
from small import CLASSES, FEATURES, examples, same_bits, small_task

TWO = dure.Processes(2)


def own(rank: int, world: int, sizes: tuple[int, ...] = (14, 27)) -> Any:
    data = examples(sum(sizes))
    start = sum(sizes[:rank])
    part = slice(start, start + sizes[rank])
    return data.inputs[part], data.targets[part]


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (dure.TensorParallel(), "tensor-parallel share"),
        (dure.Pipeline(), "pipeline share"),
        (dure.FedAvg(clients=2), "fed-avg divides the data among clients"),
        (dure.ParallelSGD(combine="best"), "combine=best"),
        (dure.ParallelSGD(partition=dure.LabelShards(1)), "nothing to divide"),
        (dure.ADMM(partition=dure.LabelShards(1)), "nothing to divide"),
        (dure.DataParallel(privacy="dp-sgd:1:1"), "dp-sgd"),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_what_cannot_have_it_is_refused_by_name(strategy, words):
    world = None if strategy.traits.kind == "clients" else TWO
    with pytest.raises(ValueError, match=words):
        dure.train(small_task(train=own), strategy, world, dure.Stop(epochs=1))


def test_an_elastic_job_is_refused():
    class Elastic(World):
        name = "elastic"
        kind = "ranks"
        workers = 2
        starts_again = True

    with pytest.raises(ValueError, match="elastic"):
        task_for_checks(small_task(train=own), dure.DataParallel(), Elastic())


def fails_on_1(rank: int, world: int) -> Any:
    if rank:
        raise OSError("no disk here")
    return own(rank, world)


def test_a_rank_whose_data_fail_is_named():
    with pytest.raises(DataError, match=r"rank=1, world=2.*no disk here"):
        dure.train(small_task(train=fails_on_1), dure.DataParallel(), TWO, dure.Stop(epochs=1))
    task = small_task(train=lambda rank, world: rank)
    with pytest.raises(ValueError, match=r"rank=0, world=2.*are not supported"):
        dure.train(task, dure.DataParallel(), TWO, dure.Stop(epochs=1))


def test_only_its_own_ranks_examples_are_there():
    data = RankDataFactory(own)
    with pytest.raises(DataError, match="only after every rank has its own"):
        len(data)
    mine = data.of(1, 2)
    assert data.of(1, 2) is mine
    arrangements = [data.of(rank, 2).arrangement() for rank in range(2)]
    here = RankExamples(mine, arrangements, 1)
    assert torch.equal(here.batch(torch.tensor([14, 40]))[0], mine.inputs[[0, 26]])
    with pytest.raises(DataError, match="examples 14 to 40"):
        here.batch(torch.tensor([14, 13]))


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)).double()


def test_batch_norm_is_not_left_with_one_example():
    # 2 of 9: one in each batch of 4 or 5.
    task = small_task(train=partial(own, sizes=(2, 7)), model=norm)
    with pytest.raises(WorkerFailedError, match="a step has a single example"):
        dure.train(task, dure.DataParallel(4), TWO, dure.Stop(epochs=1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for rank in range(2):
        inputs, targets = own(rank, 2)
        for number, (some, labels) in enumerate(
            zip(inputs.split(6), targets.split(6), strict=True)
        ):
            numpy.save(folder / f"{rank}-{number}.inputs.npy", some)
            numpy.save(folder / f"{rank}-{number}.targets.npy", labels)
    return folder


@pytest.mark.parametrize(
    ("strategy", "world", "first", "whole"),
    [
        (dure.SingleWorker(5, loaders=2), None, dure.Stop(steps=13), dure.Stop(steps=30)),
        (dure.DataParallel(5), TWO, dure.Stop(steps=13), dure.Stop(steps=30)),
        (dure.ParallelSGD(6), TWO, dure.Stop(rounds=1), dure.Stop(rounds=3)),
    ],
    ids=["single", "data-parallel", "parallel-sgd"],
)
def test_a_run_goes_on_to_the_bit(strategy, world, first, whole, folder, tmp_path):
    def shards(rank: int, world: int) -> dure.Shards:
        pattern = f"{rank}-*" if world > 1 else "*"
        return dure.Shards(sorted(folder.glob(f"{pattern}.npy")), window=6)

    task = small_task(train=shards)
    unbroken = dure.train(task, strategy, world, whole, seed=3)
    dure.train(task, strategy, world, first, seed=3, out=tmp_path / "run")
    resumed = dure.resume(tmp_path / "run", task=task, stop=whole)
    assert same_bits(unbroken, resumed)
    if world is not None:
        other = small_task(train=partial(own, sizes=(15, 26)))
        with pytest.raises(RunFolderError, match="14, 27, and now have 15, 26"):
            dure.resume(tmp_path / "run", task=other, stop=whole)
