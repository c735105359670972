"""A server that adds up, killed at each point of a round, and begun again: each sum is used once,
and is the one that was used before; a sum of which nobody knows is made anew."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deployed import Deployment, Plan
from toy_sums import Played, install, note, noted, playing

import dure
from dure.deploy.journal import Journal
from dure.deploy.server.durable_once import DurableOnce
from dure.deploy.server.protocol_steps import ProtocolSteps
from dure.protocol.messages import ProtocolAnswer, ProtocolStep
from small import small_task

PLAN = Plan(
    dure.FedAvg(clients=3, batch_size=4),
    rounds=3,
    # Checkpoints are rare: the second life goes through all of the journal.
    checkpoint_every=3,
    options={"record": True, "exchange_seconds": 30.0},
)


def kill(notes: Path) -> None:
    """The first time, and never again."""
    if not noted(notes, "killed"):
        note(notes, "killed here")
        os.kill(os.getpid(), signal.SIGKILL)


def before_the_event(notes: Path) -> None:
    """In round 2: the file is there, and its event is not."""
    write = Journal.write

    def writes(self: Journal, kind: str, *about: Any, **named: Any) -> Any:
        if kind == "once" and len(noted(notes, "made")) == 2:
            kill(notes)
        return write(self, kind, *about, **named)

    Journal.write = writes  # type: ignore[method-assign]


def after_the_event(notes: Path) -> None:
    named = DurableOnce._named

    def names(self: DurableOnce, *about: Any) -> Any:
        if len(noted(notes, "made")) == 2:
            kill(notes)
        return named(self, *about)

    DurableOnce._named = names  # type: ignore[method-assign]


def within_a_step(notes: Path) -> None:
    """Two of three have answered step 1."""
    answers = ProtocolSteps._answer
    counted: list[int] = []

    def answer(self: ProtocolSteps, say: ProtocolStep, answered: Any) -> ProtocolAnswer | None:
        counted.append(say.stage)
        if counted.count(1) == 3 + 2:
            kill(notes)
        return answers(self, say, answered)

    ProtocolSteps._answer = answer  # type: ignore[method-assign]


def begins(notes: Path, kills: Callable[[Path], None]) -> None:
    install(notes)
    kills(notes)


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Deployment]:
    with Deployment(tmp_path, PLAN, tls=False) as deployment:
        yield deployment


@pytest.mark.parametrize("kills", [before_the_event, after_the_event, within_a_step])
def test_a_server_that_is_killed_uses_each_sum_once(
    kills: Callable[[Path], None], federation: Deployment, tmp_path: Path, monkeypatch: Any
) -> None:
    notes = tmp_path / "notes"
    before = partial(begins, notes, kills)
    federation.serve(before)
    players = [Played(federation.url, number) for number in range(3)]
    with playing(*players):
        federation.server.process.join(60)
        assert noted(notes, "killed")
        federation.serve(before)
        ended = federation.ended()
        assert ended.summary["steps"] == 3
    made, used = noted(notes, "made"), noted(notes, "used")
    if kills is before_the_event:
        # Of the one that no event names nobody has heard.
        assert len(made) == 4
        del made[1]
    assert len(made) == 3
    # The second life goes through what the first has used.
    assert used == [*used[: len(used) - 3], *made]
    assert used[: len(used) - 3] == made[: len(used) - 3]
    # What a client was sending when the server was killed.
    assert list((federation.run / "updates").iterdir()) == []
    # Each round had all three: also in the second life, whose clients are the same.
    assert ended.facts["outcomes"]["accepted"] == 9
    install(notes, monkeypatch.setattr)
    replayed = dure.replay(federation.run, task=small_task())
    assert (replayed.rounds, replayed.same) == (3, True)


def test_an_interrupt_in_the_middle_of_a_step_ends_the_server_soon_and_the_round_goes_on(
    federation: Deployment, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    before = partial(install, notes)

    def once_late(say: ProtocolStep, honest: Any) -> ProtocolAnswer | None:
        # In round 2: before the first model there is no checkpoint.
        if say.stage == 1 and noted(notes, "used") and not noted(notes, "killed"):
            note(notes, "killed by hand")
            federation.server.signal(signal.SIGINT)
            federation.server.wait_for("ended")
        return honest(say)

    federation.serve(before)
    players = [Played(federation.url, number) for number in range(2)]
    players.append(Played(federation.url, 2, answers=once_late))
    with playing(*players):
        first = federation.ended()
        assert (first.summary["ended"], first.summary["steps"]) == ("interrupt", 1)
        federation.serve(before)
        ended = federation.ended()
    assert ended.summary["steps"] == 3
    assert noted(notes, "made") == noted(notes, "used")
    # Also those of the round that was interrupted.
    assert ended.facts["outcomes"]["accepted"] == 9
