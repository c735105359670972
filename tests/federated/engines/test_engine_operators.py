"""Threads of operators: several for long steps of many clients in rounds, and the same ones when a
run is resumed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from clients_at_work import jobs_of, weights_of

import dure
from dure.federated.engines import batched, products
from dure.federated.engines.batched import BatchedEngine, batched_engine
from dure.federated.engines.engine_choice import EngineInputs, engine_for
from dure.federated.engines.losses import MANY
from dure.federated.engines.products import DeferredUpdate
from dure.machine.threads import threads
from small import CLASSES, same_bits, small_task

Counts = list[int]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """How many threads operators have wherever an engine or a sum says so."""
    seen: list[int] = []

    def watched(count: int | None) -> AbstractContextManager[None]:
        before = torch.get_num_threads()
        seen.append(before if count is None else count)
        return threads(count)

    monkeypatch.setattr(batched, "threads", watched)
    monkeypatch.setattr(products, "threads", watched)
    return seen


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    def say(flops: float) -> None:
        monkeypatch.setattr(batched, "SMALL_STEP", flops)

    return say


def engine(task: dure.Task, jobs: list, wanted: str = "batched", together: bool = True):
    return engine_for(
        EngineInputs(
            *(task, task.model(), task.train, 4, 3, jobs, 2, wanted, together, together), threads=2
        )
    )


def test_long_steps_of_many_clients_and_their_sum_have_several_threads_and_short_ones_one(
    counts, long, monkeypatch
):
    task = small_task(n=60)
    jobs = jobs_of([8] * 6, [1] * 6, weights_of(task.model))
    sums = []
    steps = []
    step = BatchedEngine._step

    def noted(*given):
        steps.append(torch.get_num_threads())
        return step(*given)

    monkeypatch.setattr(BatchedEngine, "_step", noted)
    with threads(1):
        made = engine(task, jobs)
        for some in (jobs[:1], jobs):
            long(made.flops * 10)  # a client's step has four examples
            last = list(made.train(some))[-1].delta
            assert isinstance(last, DeferredUpdate)
            sums.append(last.products.sum([1.0] * len(some)))
            assert torch.get_num_threads() == 1
        # Of the sum of short steps, which leave the threads alone; of long ones and their sum.
        assert counts == [1, 2, 2]
        assert steps[0] == 1
        assert steps[-1] == 2
        long(torch.inf)
        again = list(made.train(jobs))[-1].delta
        torch.testing.assert_close(again.products.sum([1.0] * 6), sums[1], rtol=1e-12, atol=1e-12)


def test_operators_have_the_threads_that_the_engine_was_given_whatever_there_are(counts, long):
    task = small_task(n=60)
    jobs = jobs_of([8] * 6, [1] * 6, weights_of(task.model))
    made = engine(task, jobs)
    long(1.0)
    made.threads = 2
    with threads(3):
        list(made.train(jobs))
    assert counts == [2]


def test_the_workers_of_an_engine_have_one_thread_each():
    task = small_task(n=60)
    made = engine(task, jobs_of([8] * 6, [1] * 6, weights_of(task.model)), "batched-processes")
    assert made.inner.threads is None
    made.close()


@pytest.mark.parametrize("size", [30, MANY // CLASSES // 2, MANY // CLASSES + 7])
def test_without_rounds_no_bit_of_clients_of_one_size_depends_on_who_is_computed_with_whom(
    long, size
):
    long(1.0)
    task = small_task(n=2 * MANY)
    jobs = jobs_of([size] * 5, [2] * 5, weights_of(task.model))
    assert engine(task, jobs, together=False).threads is None
    made = batched_engine(task, task.model(), task.train, None, 3)
    assert isinstance(made, BatchedEngine)
    together = [trained.delta[0] for trained in made.train(jobs)]
    for job, delta in zip(jobs, together, strict=True):
        assert torch.equal(next(iter(made.train([job]))).delta[0], delta)


@pytest.mark.parametrize(("processes", "expected"), [(None, 2), (1, 2), (8, 2)])
def test_a_run_gives_its_rounds_the_threads_that_it_found_and_a_resumed_one_too(
    counts, long, tmp_path: Path, processes, expected
):
    long(2.0)
    task, strategy = small_task(n=60), dure.FedAvg(clients=6, batch_size=4)
    world = dure.Simulated(engine="batched", processes=processes)

    def run(folder: str, rounds: int) -> dure.Run:
        return dure.train(task, strategy, world, dure.Stop(rounds=rounds), out=tmp_path / folder)

    with threads(2):
        whole = run("whole", 4)
        run("part", 2)
    assert set(counts) == {expected}
    counts.clear()
    with threads(1):
        resumed = dure.resume(tmp_path / "part", task=task, stop=dure.Stop(rounds=4))
    assert set(counts) == {expected}
    assert same_bits(whole, resumed)
