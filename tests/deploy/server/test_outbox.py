"""What a client that asks is told, and when."""

from __future__ import annotations

import asyncio
import time

from dure.deploy.server.outbox import ClientOutbox
from dure.wire.requests import EvaluationTask, NextAnswer, Train, UpdateOutcome

ASSIGNMENT = Train(ticket=8, round=1, turn=0, tensors="ab", bytes=2)


def told(outbox: ClientOutbox, later: bool) -> NextAnswer:
    """What client 0 hears that waits: an outcome, and later also an assignment."""

    async def ask() -> NextAnswer:
        outbox.lives_in(asyncio.get_running_loop())
        gone = asyncio.get_running_loop().create_future()
        asked = asyncio.create_task(outbox.next(outbox.session(0), 30.0, gone))
        await asyncio.sleep(0)
        outbox.tell(0, UpdateOutcome(7, True))
        if later:
            # After the handler has woken, as when the main thread is a little slower than it.
            await asyncio.sleep(0.005)
            outbox.assign(0, ASSIGNMENT, None, {})
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
        outbox = ClientOutbox(lambda: 0.0)
        gone = asyncio.get_running_loop().create_future()
        asked = asyncio.create_task(outbox.next(outbox.session(0), 3600.0, gone))
        await asyncio.sleep(0)
        gone.set_result(None)
        return await asyncio.wait_for(asked, 30.0)

    assert asyncio.run(ask()) == NextAnswer()


def test_a_call_that_has_waited_in_vain_leaves_nothing_behind() -> None:
    async def ask() -> tuple[NextAnswer, int, int]:
        outbox = ClientOutbox(lambda: 0.0)
        loop = asyncio.get_running_loop()
        gone = loop.create_future()
        session = outbox.session(0)
        word = await outbox.next(session, 0.01, gone)
        # Who asks again and again on one connection must not leave a callback each time.
        return word, len(session.bells), len(gone._callbacks or ())  # type: ignore[attr-defined]

    assert asyncio.run(ask()) == (NextAnswer(), 0, 0)


def test_the_newest_tickets_that_a_client_has_answered_are_known() -> None:
    session = ClientOutbox(lambda: 0.0).session(0)
    for ticket in range(20):
        session.sent.append(ticket)
    assert list(session.sent) == list(range(12, 20))


def test_who_has_heard_the_end_has_a_moment_to_begin_to_fetch_the_last_model() -> None:
    outbox = ClientOutbox(lambda: 0.0)
    session = outbox.session(0)
    session.available = True
    outbox.final = EvaluationTask(3, "ab", 2)
    outbox.end("the run is over")
    outbox.called(session)
    outbox.word(session)
    outbox.hung_up(session)
    until = time.monotonic() + 60
    assert outbox.has_to_tell(until)
    session.seen = time.monotonic() - 10
    assert not outbox.has_to_tell(until)
