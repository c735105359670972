"""What a client that asks is told, and when."""

from __future__ import annotations

import asyncio

from dure.wire.requests import Outcome, Train, Word
from dure.worlds.network.server.desk import Desk

ASSIGNMENT = Train(ticket=8, round=1, turn=0, tensors="ab", bytes=2)


def told(desk: Desk, later: bool) -> Word:
    """What client 0 hears that waits: an outcome, and later also an assignment."""

    async def ask() -> Word:
        desk.lives_in(asyncio.get_running_loop())
        asked = asyncio.create_task(desk.next(desk.seat(0), 30.0))
        await asyncio.sleep(0)
        desk.tell(0, Outcome(7, True))
        if later:
            # After the handler has woken, as when the main thread is a little slower than it.
            await asyncio.sleep(0.005)
            desk.assign(0, ASSIGNMENT, None, {})
        return await asked

    return asyncio.run(ask())


def test_an_outcome_and_the_next_assignment_are_one_answer() -> None:
    assert told(Desk(lambda: 0.0), later=True) == Word([Outcome(7, True)], train=ASSIGNMENT)


def test_an_outcome_alone_is_told_without_anything_to_do() -> None:
    assert told(Desk(lambda: 0.0), later=False) == Word([Outcome(7, True)])
