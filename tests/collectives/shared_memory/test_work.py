"""Handles of calls and the line they wait in: order, errors, futures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from dure.collectives.shared_memory.work import FINISHED, CallHandle, CallQueue, done
from dure.errors import MismatchError

ERROR = MismatchError("call 3", (((0,), "barrier"), ((1,), "all_reduce(sum, 2 float32)")))


def failing() -> None:
    raise ERROR


@pytest.fixture
def line() -> Any:
    made = CallQueue("a line of a test")
    yield made
    assert made.close(5)


def test_a_call_runs_at_once_on_the_callers_thread_where_nobody_is_before_it(
    line: CallQueue,
) -> None:
    ran: list[threading.Thread] = []
    line.now(lambda: ran.append(threading.current_thread()))
    assert ran == [threading.current_thread()]


def test_calls_run_in_the_order_of_their_issue_whoever_waits(line: CallQueue) -> None:
    order: list[int] = []
    gate = threading.Event()
    works = [line.later(gate.wait, ())]
    works += [line.later(lambda number=number: order.append(number), ()) for number in range(20)]
    threading.Timer(0.05, gate.set).start()
    line.now(lambda: order.append(20))
    works += [line.later(lambda: order.append(21), ())]
    for work in reversed(works):
        assert work.wait()
    assert order == list(range(22))


def test_a_call_of_another_thread_waits_for_the_one_that_runs(line: CallQueue) -> None:
    order: list[str] = []
    entered, gate = threading.Event(), threading.Event()

    def first() -> None:
        entered.set()
        gate.wait(10)
        order.append("first")

    thread = threading.Thread(target=line.now, args=(first,))
    thread.start()
    assert entered.wait(10)
    threading.Timer(0.05, gate.set).start()
    line.now(lambda: order.append("second"))
    thread.join()
    assert order == ["first", "second"]


def test_an_error_is_told_to_who_waits_and_the_line_goes_on(line: CallQueue) -> None:
    with pytest.raises(MismatchError):
        line.now(failing)
    bad = line.later(failing, ())
    good = line.later(lambda: None, ())
    for _ in range(2):
        with pytest.raises(MismatchError) as caught:
            bad.wait()
        assert caught.value is ERROR
    assert good.wait()
    assert (bad.is_completed(), bad.is_success(), bad.exception()) == (True, False, ERROR)
    assert (good.is_completed(), good.is_success(), good.exception()) == (True, True, None)
    line.now(lambda: None)


def test_waiting_can_be_limited_and_the_call_goes_on(line: CallQueue) -> None:
    gate = threading.Event()
    work = line.later(lambda: gate.wait(10) and None, ())
    with pytest.raises(TimeoutError, match=r"not done after 0\.05 s, and goes on: .* timed out "):
        work.wait(timedelta(seconds=0.05))
    assert not work.is_completed()
    gate.set()
    assert work.wait(timedelta(seconds=10))


def test_a_line_that_does_not_end_in_time_says_so() -> None:
    gate = threading.Event()
    line = CallQueue("a slow line")
    line.later(lambda: gate.wait(10) and None, ())
    assert not line.close(0.05)
    gate.set()
    assert line.close(10)


def test_a_line_without_calls_has_no_thread() -> None:
    threads = threading.active_count()
    line = CallQueue("an idle line")
    line.now(lambda: None)
    assert threading.active_count() == threads
    assert line.close(1)


def before(work: CallHandle, call: Callable[[], None]) -> None:
    call()
    work.finish()


def after(work: CallHandle, call: Callable[[], None]) -> None:
    work.finish()
    call()


@pytest.mark.parametrize("when", [before, after], ids=["asked for before", "asked for after"])
def test_a_future_holds_the_tensors_and_what_is_chained_to_it_runs(
    when: Callable[..., None],
) -> None:
    tensor = torch.ones(2)
    work = CallHandle([tensor])
    held: list[Any] = []
    when(
        work,
        lambda: held.append(work.get_future().then(lambda future: [t * 3 for t in future.value()])),
    )
    assert torch.equal(held[0].wait()[0], torch.full((2,), 3.0))
    assert work.result()[0] is tensor


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_future_fails_as_its_call_fails_for_callbacks_in_cpp_too(when: str) -> None:
    work = CallHandle([torch.ones(1)])
    if when == "after":
        work.finish(ERROR)
    future = work.get_future()
    seen: list[str] = []

    def look(done: Any) -> None:
        try:
            done.value()
        except RuntimeError as error:
            seen.append(str(error))
            raise

    chained = future.then(look)
    collected = torch.futures.collect_all([future, work.get_future()])
    if when == "before":
        work.finish(ERROR)
    for failed in (future, chained, collected):
        with pytest.raises(RuntimeError, match="ranks disagree at call 3"):
            failed.wait()
    assert "ranks disagree at call 3" in seen[0]
    with pytest.raises(MismatchError):
        work.wait()


def test_a_call_that_is_done_already_is_a_call() -> None:
    for work in (FINISHED, done()):
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.get_future().wait() == []
