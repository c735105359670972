"""Clients on threads: the bits of one engine, errors that name the client, threads that end."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from clients_at_work import jobs_of, results, same, weights_of

from dure.errors import LossNotFiniteError, WorkerFailedError
from dure.federated.engines import choose
from dure.federated.engines.batched import batched_engine
from dure.federated.engines.choose import engine_for
from dure.federated.engines.threads import ThreadsEngine
from small import network, small_task

SIZES, STEPS = [9, 4, 1, 12, 7, 8], [3, 1, 2, 9, 4, 2]


def inner(task=None):
    task = task or small_task()
    return batched_engine(task, network(), task.train, 4, 3)


def alive() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("dure clients")]


@pytest.fixture
def threads():
    """Makes engines that are closed after the test, and checks that none of their threads is
    left."""
    made = []

    def make(workers=2, chunk=1, task=None):
        made.append(ThreadsEngine([inner(task) for _ in range(workers)], chunk))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
    assert not alive()


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_the_bits_do_not_depend_on_the_number_of_threads(threads, chunk):
    jobs = [
        *jobs_of(SIZES, STEPS, weights_of(), mu=0.1),
        *jobs_of(
            SIZES,
            STEPS,
            weights_of(seed=1),
            anchor=weights_of(seed=2),
            mu=0.2,
            correction=weights_of(seed=3),
        ),
        *jobs_of(SIZES, STEPS, weights_of(seed=4)),
    ]
    first, *others = [results(threads(workers, chunk), jobs) for workers in (1, 2, 3)]
    assert all(same(first, other) for other in others)
    if chunk == 1:
        assert same(first, [each for job in jobs for each in results(inner(), [job])])
    expected = results(inner(), jobs)
    for one, other in zip(first, expected, strict=True):
        torch.testing.assert_close(one.delta[0], other.delta[0], rtol=1e-12, atol=1e-13)


def test_an_operator_of_theirs_uses_one_thread_and_the_caller_s_number_stays(threads, monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        engine, seen = threads(), []
        for each in engine.inners:
            train = each.train
            monkeypatch.setattr(
                each, "train", lambda jobs, t=train: seen.append(torch.get_num_threads()) or t(jobs)
            )
        results(engine, jobs_of(SIZES, STEPS, weights_of()))
        assert set(seen) == {1}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_round_that_is_left_early_does_not_disturb_the_next(threads):
    engine = threads()
    next(iter(engine.train(jobs_of(SIZES, STEPS, weights_of()))))
    other = jobs_of(SIZES, STEPS, weights_of(seed=1))
    assert same(results(engine, other), results(threads(1), other))


def test_after_it_was_closed_it_begins_anew(threads):
    engine, jobs = threads(), jobs_of(SIZES, STEPS, weights_of())
    first = results(engine, jobs)
    engine.close()
    assert not alive()
    assert same(results(engine, jobs), first)


def test_an_engine_that_is_dropped_takes_its_threads_along():
    engine = ThreadsEngine([inner(), inner()])
    results(engine, jobs_of(SIZES, STEPS, weights_of()))
    assert len(alive()) == 2
    del engine
    gc.collect()
    until = time.monotonic() + 30
    while alive() and time.monotonic() < until:
        time.sleep(0.01)
    assert not alive()


@pytest.mark.parametrize("chunk", [1, 3])
def test_an_error_comes_after_the_results_before_it_and_names_the_client(threads, chunk):
    task = small_task()
    task.train.inputs[13] = torch.nan  # client 2's
    got = []
    with pytest.raises(LossNotFiniteError, match="client 2"):
        got.extend(threads(2, chunk, task).train(jobs_of(SIZES, STEPS, weights_of())))
    assert len(got) == 2


def test_another_error_names_the_client_and_has_its_cause(threads, monkeypatch):
    engine = threads(1)
    monkeypatch.setattr(engine.inners[0].program, "step", lambda *_: 1 / 0)
    with pytest.raises(
        WorkerFailedError, match="client 0 failed in round 3: ZeroDivisionError"
    ) as caught:
        results(engine, jobs_of(SIZES, STEPS, weights_of()))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_signal_that_one_of_them_got_is_handled_while_they_work(threads, monkeypatch):
    seen = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.set())
    engine, waited = threads(1), []
    step = engine.inners[0].program.step

    def told(*arguments):
        if not waited:
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
            waited.append(seen.wait(30))
        return step(*arguments)

    monkeypatch.setattr(engine.inners[0].program, "step", told)
    try:
        results(engine, jobs_of(SIZES, STEPS, weights_of()))
        assert waited == [True]
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("forks", [True, False])
@pytest.mark.parametrize("long_step", [True, False])
def test_they_are_taken_where_steps_are_long(monkeypatch, forks, long_step):
    monkeypatch.setattr(choose, "LONG_ROUND", 0.0)
    monkeypatch.setattr(choose, "LONG_STEP", 0.0 if long_step else 1e99)
    monkeypatch.setattr(choose, "forks_here", lambda: forks)
    monkeypatch.setattr(choose, "_rate", lambda engine, jobs: 100.0)
    task = small_task()
    jobs = jobs_of(SIZES, STEPS, weights_of(task.model))
    engine = engine_for(task, network(), task.train, 4, 3, jobs, 2)
    assert engine.name == (
        "batched-threads" if long_step else "batched-processes" if forks else "batched"
    )
    assert "2 threads are 1.0 times as fast as one" in engine.why or not long_step
    engine.close()


def test_what_is_closed_ends_after_a_step_and_whoever_goes_on_gets_an_error(threads, monkeypatch):
    engine = threads()
    coming = engine.train(jobs_of([9, 9], [1, 10**6], weights_of()))
    next(coming)
    engine.close()
    assert not alive()
    with pytest.raises(WorkerFailedError, match=r"client 1 .* no longer wanted"):
        next(coming)


LEAVES = """
import sys
sys.path[:0] = {path!r}
from clients_at_work import jobs_of, weights_of
from dure.federated.engines.threads import ThreadsEngine
from test_cohort_threads import inner
coming = ThreadsEngine([inner(), inner()]).train(jobs_of([9, 9], [1, 10**6], weights_of()))
next(coming)
"""


def test_an_interpreter_that_ends_while_they_work_ends_well():
    ended = subprocess.run(
        [sys.executable, "-c", LEAVES.format(path=sys.path)], capture_output=True, timeout=120
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_no_error_whatever_leaves_the_caller_waiting(threads, monkeypatch, error):
    engine = threads(1)

    def raises(*_):
        raise error

    monkeypatch.setattr(engine.inners[0].program, "step", raises)
    with pytest.raises(
        WorkerFailedError, match=f"client 0 failed in round 3: {type(error).__name__}"
    ):
        results(engine, jobs_of(SIZES, STEPS, weights_of()))


def test_a_thread_that_cannot_be_started_is_an_error_and_another_try_succeeds(threads, monkeypatch):
    engine, jobs, start, count = (
        threads(),
        jobs_of(SIZES, STEPS, weights_of()),
        threading.Thread.start,
        [],
    )
    mine = torch.get_num_threads()

    def refuses(self):
        count.append(self)
        if len(count) == 2:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuses)
    with pytest.raises(WorkerFailedError, match=r"2 are too many \(can't start new thread\)"):
        results(engine, jobs)
    assert not alive()
    assert torch.get_num_threads() == mine
    assert same(results(engine, jobs), results(threads(1), jobs))
