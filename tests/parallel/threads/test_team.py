"""Worker threads: what they return, how many threads their operators use, how they fail and end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest
import torch

from dure.errors import LossNotFiniteError, WorkerFailedError
from dure.parallel.threads.worker_threads import AbandonedError, WorkerThreads

CPU = torch.device("cpu")


@pytest.fixture
def team() -> Iterator[WorkerThreads]:
    three = WorkerThreads([CPU] * 3, 1)
    yield three
    three.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dure worker")]


def test_all_work_at_the_same_time_and_answer_in_order(team: WorkerThreads) -> None:
    together = threading.Barrier(3)

    def work(worker: int) -> tuple[int, int]:
        together.wait(20)
        return worker, threading.get_ident()

    answers = [done.value for done in team.each(work, "step 1")]
    assert [worker for worker, _ in answers] == [0, 1, 2]
    assert len({thread for _, thread in answers}) == 3
    assert answers == [done.value for done in team.each(work, "step 2")]
    assert [done.value for done in team.each(lambda worker: worker, "step 3", [2, 0])] == [2, 0]


def test_the_threads_of_operators_are_the_workers_own(team: WorkerThreads) -> None:
    before = torch.get_num_threads()
    team.set_threads(before + 1)
    seen: list[int] = []
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert [done.value for done in team.each(lambda worker: torch.get_num_threads(), "now")] == [
        before + 1
    ] * 3
    assert (torch.get_num_threads(), seen) == (before, [before])


def test_the_first_workers_error_is_raised_when_all_have_ended(team: WorkerThreads) -> None:
    ended: list[int] = []

    def work(worker: int) -> None:
        if worker:
            raise KeyError(f"mistake of {worker}")
        ended.append(worker)

    with pytest.raises(
        WorkerFailedError, match="worker 1 failed in step 7: KeyError: 'mistake of 1'"
    ):
        team.each(work, "step 7")
    assert ended == [0]
    assert [done.value for done in team.each(lambda worker: worker, "step 8")] == [0, 1, 2]


def test_who_only_gave_up_is_not_to_blame_and_errors_of_dure_stay_what_they_are(
    team: WorkerThreads,
) -> None:
    def work(worker: int) -> None:
        raise (
            LossNotFiniteError(float("nan"), "worker 2", "step 1")
            if worker == 2
            else AbandonedError
        )

    with pytest.raises(LossNotFiniteError, match="worker 2"):
        team.each(work, "step 1")


def test_a_signal_that_another_thread_got_is_handled_while_the_workers_work(
    team: WorkerThreads,
) -> None:
    seen = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.set())

    def work(worker: int) -> bool:
        if worker == 0:
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        return seen.wait(30)

    try:
        assert [done.value for done in team.each(work, "step 1")] == [True] * len(team)
    finally:
        signal.signal(signal.SIGUSR1, before)
