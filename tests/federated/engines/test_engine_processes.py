"""Clients in forked processes: the same bits, and nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from clients_at_work import jobs_of, results, same, weights_of
from msgspec.structs import replace
from torch import nn

from dure.errors import WorkerFailedError
from dure.federated.engines import processes as module
from dure.federated.engines.batched import BatchedEngine, batched_engine
from dure.federated.engines.loop import LoopEngine
from dure.federated.engines.processes import ProcessesEngine
from process_tree import descendants
from small import network, small_task

SIZES, STEPS = [9, 4, 1, 12, 7, 8], [3, 1, 2, 9, 4, 2]


def loop(**changes) -> LoopEngine:
    task = small_task(**changes)
    return LoopEngine(task, task.model(), task.train, 4, 3)


@pytest.fixture
def processes():
    """Makes engines that are closed after the test, and checks that none of their children is
    left."""
    before, made = descendants(os.getpid()), []

    def make(inner, workers=2, chunk=1, model=network, **settings):
        made.append(ProcessesEngine(inner, model(), workers, chunk, **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
    assert descendants(os.getpid()) <= before


def noisy() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.Dropout(0.5), nn.Linear(8, 3)
    ).double()


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_the_bits_are_those_of_one_process(processes, workers, chunk):
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
        *(jobs_of(SIZES, STEPS, weights_of(seed=k))[k] for k in range(4)),
    ]
    divided = processes(loop(), workers, chunk)
    expected = results(loop(), jobs)
    assert same(results(divided, jobs), expected)
    assert same(results(divided, jobs[::-1]), expected[::-1])


def test_buffers_and_draws_are_those_of_one_process(processes):
    jobs = jobs_of(
        [8, 8, 12], [3, 2, 4], weights_of(noisy), buffers=list(noisy().buffers()), turn=7
    )
    alone, divided = (
        results(loop(model=noisy), jobs),
        results(processes(loop(model=noisy), model=noisy), jobs),
    )
    assert same(divided, alone)
    assert all(
        map(
            torch.equal,
            [b for t in divided for b in t.buffers],
            [b for t in alone for b in t.buffers],
        )
    )


def test_batched_cohorts_are_the_same_on_any_number_of_processes(processes):
    task = small_task()
    inner = batched_engine(task, network(), task.train, 4, 3)
    assert isinstance(inner, BatchedEngine)
    jobs = jobs_of(SIZES, STEPS, weights_of())
    first, *others = [results(processes(inner, workers, chunk=3), jobs) for workers in (1, 2, 3)]
    assert all(same(first, other) for other in others)
    assert torch.allclose(
        first[3].delta[0], results(inner, jobs)[3].delta[0], rtol=1e-12, atol=1e-14
    )


def test_weights_changed_in_place_between_rounds_are_sent_again(processes):
    weights, divided, alone = weights_of(), processes(loop()), loop()
    for _ in range(3):
        jobs = jobs_of([9, 4], [3, 1], weights)
        assert same(results(divided, jobs), results(alone, jobs))
        weights[0].mul_(0.9)


def test_a_round_that_is_left_early_does_not_disturb_the_next(processes):
    divided = processes(loop())
    jobs = jobs_of(SIZES, STEPS, weights_of())
    next(iter(divided.train(jobs)))
    other = jobs_of(SIZES, STEPS, weights_of(seed=1))
    assert same(results(divided, other), results(loop(), other))


def test_no_more_jobs_are_taken_than_the_window_has(processes):
    divided = processes(loop())
    divided.window = 3
    taken: list[int] = []
    jobs = jobs_of([4] * 9, [1] * 9, weights_of())
    for done, _ in enumerate(divided.train(taken.append(job.client) or job for job in jobs)):
        assert len(taken) <= done + 3
    assert taken == list(range(9))


def bad_for_two(how):
    """A loss that does `how` where an example of client 2's comes by; client 2 has the examples of
    class 2."""

    def loss(outputs, targets):
        return (
            how(outputs) if (targets == 2).any() else nn.functional.cross_entropy(outputs, targets)
        )

    generator = torch.Generator().manual_seed(0)
    data = (torch.randn(30, 6, generator=generator).double(), (torch.arange(30) // 10).clamp(max=2))
    return small_task(loss=loss, train=data, test=None), jobs_of(
        [10, 10, 10], [2, 2, 2], weights_of()
    )


def raises(outputs):
    raise KeyError("no such class")


def not_finite(outputs):
    return outputs.sum() * float("nan")


@pytest.mark.parametrize("chunk", [1, 3])
def test_an_error_comes_after_the_results_before_it_and_names_the_client(processes, chunk):
    task, jobs = bad_for_two(raises)
    jobs[2] = replace(jobs[2], name='client 2 ("porto")')
    divided = processes(LoopEngine(task, network(), task.train, 4, 3), chunk=chunk)
    found = divided.train(jobs)
    assert [next(found).samples, next(found).samples] == [8, 8]
    text = r"client 2 \(.porto.\) failed in round 3: KeyError: 'no such class'"
    with pytest.raises(WorkerFailedError, match=text) as caught:
        next(found)
    assert "in raises" in caught.value.traceback


@pytest.mark.parametrize("chunk", [1, 3])
def test_a_client_whose_loss_is_not_finite_fails_and_the_others_have_their_bits(processes, chunk):
    task, jobs = bad_for_two(not_finite)
    divided = processes(LoopEngine(task, network(), task.train, 4, 3), chunk=chunk)
    found = results(divided, [*jobs[:2], jobs[2], jobs[0]])
    assert [each.failure for each in found] == [None, None, "its first loss is not finite", None]
    alone = LoopEngine(task, network(), task.train, 4, 3)
    kept = [found[0], found[1], found[3]]
    assert same(kept, results(alone, [*jobs[:2], jobs[0]]))


def test_a_child_that_dies_is_an_error_that_names_its_client(processes):
    task, jobs = bad_for_two(lambda outputs: os.kill(os.getpid(), signal.SIGKILL))
    divided = processes(LoopEngine(task, network(), task.train, 4, 3))
    with pytest.raises(
        WorkerFailedError, match=r"client 2 failed in round 3: .* was killed by SIGKILL"
    ):
        results(divided, jobs)
    alone = LoopEngine(task, network(), task.train, 4, 3)
    assert same(results(divided, jobs[:2]), results(alone, jobs[:2]))  # by new children


def stops(outputs):
    os.kill(os.getpid(), signal.SIGSTOP)
    return outputs.sum()


def hangs(outputs):
    time.sleep(600)
    return outputs.sum()


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize(
    ("fault", "what"), [(stops, "has been stopped"), (hangs, "has made no step")]
)
def test_a_child_without_progress_is_an_error_that_names_its_client(processes, fault, what, chunk):
    before = descendants(os.getpid())
    task, jobs = bad_for_two(fault)
    inner = LoopEngine(task, network(), task.train, 4, 3)
    divided = processes(inner, chunk=chunk, deadline=0.2)
    text = f"^client 2 failed in round 3: the process that trained for it {what} for 0.2 s"
    with pytest.raises(WorkerFailedError, match=text):
        results(divided, jobs)
    assert descendants(os.getpid()) <= before


def test_of_clients_computed_at_once_all_are_named_for_a_child_without_progress(processes):
    def waits(outputs, targets):
        time.sleep(600)
        return nn.functional.cross_entropy(outputs, targets)

    task = small_task()
    inner = batched_engine(task, network(), task.train, 4, 3)
    assert isinstance(inner, BatchedEngine)
    inner._step = waits
    divided = processes(inner, workers=1, chunk=2, deadline=0.2)
    with pytest.raises(WorkerFailedError, match=r"^one of client 0, client 1 failed in round 3"):
        results(divided, jobs_of([9, 9], [2, 2], weights_of()))


def unhurried(outputs, targets):
    """A loss of steps that take long together, and hangs for class 2."""
    time.sleep(600 if (targets == 2).any() else 0.01)
    return nn.functional.cross_entropy(outputs, targets)


def test_a_hanging_child_is_found_while_another_answers_all_the_time(processes):
    task, jobs = bad_for_two(raises)
    inner = LoopEngine(small_task(loss=unhurried, train=task.train), network(), task.train, 4, 3)
    divided = processes(inner, deadline=0.2)
    divided.window = 201
    divided._receive = Counted(divided._receive)
    with pytest.raises(WorkerFailedError, match=r"^client 2 failed"):
        results(divided, [jobs[2], *[jobs[0]] * 200])
    assert divided._receive.calls < 150


class Counted:
    def __init__(self, call):
        self.call, self.calls = call, 0

    def __call__(self):
        self.calls += 1
        self.call()


def test_a_client_with_progress_may_take_longer_than_the_deadline(processes):
    task, jobs = bad_for_two(raises)
    inner = LoopEngine(small_task(loss=unhurried, train=task.train), network(), task.train, 4, 3)
    divided = processes(inner, deadline=0.4)
    assert results(divided, [replace(jobs[0], steps=60)])[0].failure is None


def forks_and_is_killed(outputs):
    if os.fork() == 0:
        # It has the socket open, and ends soon after its parent.
        time.sleep(3)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_child_is_found_though_a_process_that_it_forked_lives(processes):
    task, jobs = bad_for_two(forks_and_is_killed)
    divided = processes(LoopEngine(task, network(), task.train, 4, 3), deadline=2)
    with pytest.raises(WorkerFailedError, match=r"^client 2 failed .* was killed by SIGKILL"):
        results(divided, jobs)


@pytest.mark.parametrize("error", [KeyboardInterrupt("by hand"), GeneratorExit("early")])
def test_whatever_the_users_code_raises_names_client_and_error(processes, error):
    def raises_it(outputs):
        raise error

    task, jobs = bad_for_two(raises_it)
    divided = processes(LoopEngine(task, network(), task.train, 4, 3))
    text = f"^client 2 failed in round 3: {type(error).__name__}: {error}$"
    with pytest.raises(WorkerFailedError, match=text):
        results(divided, jobs)


def test_a_child_that_closes_its_connection_and_lives_is_an_error_that_names_its_client(
    processes, monkeypatch
):
    def closes(outputs):
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        time.sleep(600)

    monkeypatch.setattr(module, "_LAST_SECONDS", 0.1)
    task, jobs = bad_for_two(closes)
    divided = processes(LoopEngine(task, network(), task.train, 4, 3))
    with pytest.raises(WorkerFailedError, match=r"client 2 failed in round 3: .* closed its conn"):
        results(divided, jobs)


def test_an_engine_that_is_dropped_takes_its_children_along():
    before = descendants(os.getpid())
    engine = ProcessesEngine(loop(), network(), 2)
    results(engine, jobs_of([9, 4], [3, 1], weights_of()))
    assert len(descendants(os.getpid()) - before) == 2
    del engine
    assert descendants(os.getpid()) <= before


ORPHANS = """
import os, sys, time
import torch
sys.path[:0] = {path!r}
from clients_at_work import jobs_of, weights_of
from dure.federated.engines.processes import ProcessesEngine
from test_engine_processes import loop, network
torch.set_num_threads(2)
big = torch.randn(600, 600)
(big @ big).sum()  # OpenMP has threads, which children have not
(big.requires_grad_() @ big).sum().backward()
engine = ProcessesEngine(loop(), network(), 2)
list(engine.train(jobs_of([9, 4], [3, 1], weights_of())))
found = engine.train(jobs_of([9, 9], [10**7, 10**7], weights_of()))
import threading
threading.Thread(target=next, args=(found,), daemon=True).start()
time.sleep(0.2)
print(*(child.pid for child in engine._children), flush=True)
time.sleep(600)
"""


def test_children_at_work_end_with_a_parent_that_is_killed():
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHANS.format(path=sys.path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    children = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(children) == 2
    parent.kill()
    parent.wait()
    until = time.monotonic() + 20
    while any(map(alive, children)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(alive, children))


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
