"""What a client that asks is told, and when."""

from __future__ import annotations

import asyncio
import time

from dure.wire.requests import EvaluationTask, NextAnswer, Train, UpdateOutcome
from dure.worlds.network.server.outbox import ClientOutbox

ASSIGNMENT = Train(ticket=8, round=1, turn=0, tensors="ab", bytes=2)


def told(desk: ClientOutbox, later: bool) -> NextAnswer:
    """What client 0 hears that waits: an outcome, and later also an assignment."""

    async def ask() -> NextAnswer:
        desk.lives_in(asyncio.get_running_loop())
        gone = asyncio.get_running_loop().create_future()
        asked = asyncio.create_task(desk.next(desk.seat(0), 30.0, gone))
        await asyncio.sleep(0)
        desk.tell(0, UpdateOutcome(7, True))
        if later:
            # After the handler has woken, as when the main thread is a little slower than it.
            await asyncio.sleep(0.005)
            desk.assign(0, ASSIGNMENT, None, {})
        return await asked

    return asyncio.run(ask())


def test_an_outcome_and_the_next_assignment_are_one_answer() -> None:
    assert told(ClientOutbox(lambda: 0.0), later=True) == NextAnswer(
        [UpdateOutcome(7, True)], train=ASSIGNMENT
    )


def test_an_outcome_alone_is_told_without_anything_to_do() -> None:
    assert told(ClientOutbox(lambda: 0.0), later=False) == NextAnswer([UpdateOutcome(7, True)])


def test_a_call_whose_client_has_hung_up_ends() -> None:
    async def ask() -> NextAnswer:
        desk = ClientOutbox(lambda: 0.0)
        gone = asyncio.get_running_loop().create_future()
        asked = asyncio.create_task(desk.next(desk.seat(0), 3600.0, gone))
        await asyncio.sleep(0)
        gone.set_result(None)
        return await asyncio.wait_for(asked, 30.0)

    assert asyncio.run(ask()) == NextAnswer()


def test_a_call_that_has_waited_in_vain_leaves_nothing_behind() -> None:
    async def ask() -> tuple[NextAnswer, int, int]:
        desk = ClientOutbox(lambda: 0.0)
        loop = asyncio.get_running_loop()
        gone = loop.create_future()
        seat = desk.seat(0)
        word = await desk.next(seat, 0.01, gone)
        # Who asks again and again on one connection must not leave a callback each time.
        return word, len(seat.bells), len(gone._callbacks or ())  # type: ignore[attr-defined]

    assert asyncio.run(ask()) == (NextAnswer(), 0, 0)


def test_the_newest_tickets_that_a_client_has_answered_are_known() -> None:
    seat = ClientOutbox(lambda: 0.0).seat(0)
    for ticket in range(20):
        seat.sent.append(ticket)
    assert list(seat.sent) == list(range(12, 20))


def test_who_has_heard_the_end_has_a_moment_to_begin_to_fetch_the_last_model() -> None:
    desk = ClientOutbox(lambda: 0.0)
    seat = desk.seat(0)
    seat.here = True
    desk.final = EvaluationTask(3, "ab", 2)
    desk.end("the run is over")
    desk.called(seat)
    desk.word(seat)
    desk.hung_up(seat)
    until = time.monotonic() + 60
    assert desk.has_to_tell(until)
    seat.seen = time.monotonic() - 10
    assert not desk.has_to_tell(until)
