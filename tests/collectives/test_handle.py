"""Operations beside the program: their order, their end, and their errors."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref

import pytest
import torch
from on_ranks import on_ranks

from dure.collectives import Handle, all_gather, all_reduce, broadcast, handle
from dure.collectives.handle import OperationQueue
from dure.contracts.world import RankContext
from dure.errors import PeerLostError


def test_operations_run_in_the_order_of_issue_on_one_thread() -> None:
    line, order, go = OperationQueue(), [], threading.Event()

    def work(number: int) -> int:
        go.wait()
        order.append((number, threading.get_ident()))
        return number

    handles = [line.put(lambda n=number: work(n)) for number in range(20)]  # type: ignore[misc]
    assert not any(one.is_completed() for one in handles)
    go.set()
    assert [one.wait() for one in reversed(handles)] == list(range(19, -1, -1))
    assert [number for number, _ in order] == list(range(20))
    assert len({thread for _, thread in order}) == 1
    assert all(one.is_completed() for one in handles)


def test_an_error_is_raised_by_wait_once_and_with_its_type() -> None:
    line = OperationQueue()

    def fails() -> None:
        raise KeyError("lost")

    failed = line.put(fails)
    line.settle()
    assert failed.is_completed()
    with pytest.raises(KeyError, match="lost"):
        failed.wait()
    with pytest.raises(RuntimeError, match="failed, and the first waiter"):
        failed.wait()
    assert line.put(lambda: 3).wait() == 3


def test_what_was_issued_behind_a_failure_is_not_tried() -> None:
    line, go, tried = OperationQueue(), threading.Event(), []

    def fails() -> None:
        go.wait()
        raise PeerLostError((1,), "ring all-reduce", "step 3", "died")

    first, second = line.put(fails), line.put(lambda: tried.append(2))
    go.set()
    for one in (first, second):
        with pytest.raises(PeerLostError, match="rank 1 died, during ring all-reduce of step 3"):
            one.wait()
    assert not tried


def test_the_thread_ends_when_there_is_nothing_to_do_and_starts_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handle, "IDLE", 0.01)
    line = OperationQueue()
    for _ in range(3):
        line.put(lambda: None).wait()
        while any(
            thread.name == "dure communication" and thread.is_alive()
            for thread in threading.enumerate()
        ):
            time.sleep(0.005)
    gone = weakref.ref(line)
    del line
    gc.collect()
    assert gone() is None


def test_a_handle_keeps_nothing_of_what_it_did() -> None:
    tensor = torch.ones(3)
    kept = weakref.ref(tensor)
    done: Handle[None] = OperationQueue().put(lambda t=tensor: t.add_(1).sum().item() and None)  # type: ignore[misc]
    done.wait()
    del tensor
    gc.collect()
    assert kept() is None


def test_many_reductions_beside_the_program_and_one_in_it_keep_their_order() -> None:
    def program(context: RankContext) -> list[float]:
        group, rank = context.group, context.group.rank
        running = [
            all_reduce(torch.full((k * 100,), float(k + rank)), group, async_op=True)
            for k in range(1, 9)
        ]
        behind = all_reduce(
            torch.full((50,), float(rank)), group, "tree"
        )  # after all of these, on every rank
        assert all(one.is_completed() for one in running)
        last = broadcast(torch.full((4,), float(rank)), group, root=2, async_op=True)
        shared = all_gather(torch.tensor([rank]), group, async_op=True)
        context.group.all_gather_values([0.0])
        found = [one.wait()[0].item() for one in running]
        return [*found, behind[0].item(), last.wait()[3].item(), *shared.wait().flatten().tolist()]

    expected = [float(3 * k + 3) for k in range(1, 9)] + [3.0, 2.0, 0, 1, 2]
    assert on_ranks(3, program) == [expected] * 3


def test_a_lost_peer_is_named_by_wait_with_the_step_of_issue() -> None:
    def program(context: RankContext) -> str:
        group = context.group
        group.step = "step 7"
        all_reduce(torch.ones(10), group, async_op=True).wait()
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        running = [all_reduce(torch.ones(1_000), group, "tree", async_op=True) for _ in range(3)]
        group.step = "step 8"
        for one in running:
            one.wait()
        return "never"

    with pytest.raises(PeerLostError) as caught:
        on_ranks(3, program)
    assert str(caught.value) == "rank 1 was killed by SIGKILL, during tree all-reduce of step 7"


def test_parameters_made_in_inference_mode_are_reduced_beside_the_program() -> None:
    def program(context: RankContext) -> float:
        with torch.inference_mode():
            return all_reduce(torch.ones(4), context.group, async_op=True).wait().sum().item()

    assert on_ranks(2, program) == [8.0, 8.0]
