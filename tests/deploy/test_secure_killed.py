"""A server that is killed once clients have unmasked a sum finishes that sum, with the same ones:
they contribute to no other sum of the model."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deployed import Deployment, Plan
from toy_sums import note, noted

import dure
from dure.deploy.client.loop import ClientLoop
from dure.deploy.journal import Journal
from dure.deploy.server.protocol_steps import ProtocolSteps
from dure.federated.client.pending_updates import PendingUpdates
from dure.federated.privacy.secure_aggregation.cohort import UNMASK
from dure.protocol.messages import ProtocolAnswer, ProtocolStep

CLIENTS = 3
"""All of whom are needed to unmask a sum."""

PLAN = Plan(
    dure.FedAvg(clients=CLIENTS, batch_size=4, privacy="secure-aggregation"),
    rounds=3,
    checkpoint_every=2,
    options={"exchange_seconds": 30.0},
)


def killed(notes: Path) -> None:
    """The first time, and never again."""
    if not noted(notes, "killed"):
        note(notes, "killed here")
        os.kill(os.getpid(), signal.SIGKILL)


def once_all_have_unmasked(notes: Path) -> None:
    """The sum of round 2 is there, and nothing of it is on the disk."""
    write = Journal.write
    made: list[int] = []

    def writes(self: Journal, kind: str, *about: Any, **named: Any) -> Any:
        if kind == "once":
            made.append(1)
            if len(made) == 2:
                killed(notes)
        return write(self, kind, *about, **named)

    Journal.write = writes  # type: ignore[method-assign]


def once_some_have_unmasked(notes: Path) -> None:
    answers = ProtocolSteps._answer
    unmasked: list[int] = []

    def answer(self: ProtocolSteps, say: ProtocolStep, answered: Any) -> ProtocolAnswer | None:
        if say.stage == UNMASK:
            unmasked.append(say.client)
            if len(unmasked) == CLIENTS + 1:
                killed(notes)
        return answers(self, say, answered)

    ProtocolSteps._answer = answer  # type: ignore[method-assign]


def before_any_has_unmasked(notes: Path) -> None:
    ask = ProtocolSteps._ask
    asked: list[int] = []

    def asks(self: ProtocolSteps, say: ProtocolStep, asking: str) -> None:
        if say.stage == UNMASK:
            asked.append(say.client)
            if len(asked) == CLIENTS + 1:
                killed(notes)
        ask(self, say, asking)

    ProtocolSteps._ask = asks  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "kills", [once_all_have_unmasked, once_some_have_unmasked, before_any_has_unmasked]
)
def test_a_server_that_is_killed_finishes_the_sum(kills: Any, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with Deployment(tmp_path, PLAN, tls=False) as deployment:
        server = deployment.serve(partial(kills, notes))
        deployment.join_all(CLIENTS)
        server.process.join(120)
        assert noted(notes, "killed")
        deployment.serve(partial(kills, notes))
        ended = deployment.ended()
    assert ended.summary["steps"] == PLAN.rounds
    assert ended.facts["outcomes"]["accepted"] == CLIENTS * PLAN.rounds
    assert ended.facts["turns"] == [[client, PLAN.rounds] for client in range(CLIENTS)]
    assert list((deployment.run / "once" / "draft").iterdir()) == []


def killed_with_its_answer(notes: Path) -> None:
    """The client is killed when its help is on its disk, and has not left."""
    answers = PendingUpdates.answer

    def answer(self: PendingUpdates, say: ProtocolStep) -> ProtocolAnswer | None:
        answered = answers(self, say)
        if say.stage == UNMASK:
            killed(notes)
        return answered

    PendingUpdates.answer = answer  # type: ignore[method-assign]


def test_a_client_that_is_killed_with_its_answer_gives_it_when_it_is_started_again(
    tmp_path: Path,
) -> None:
    notes = tmp_path / "notes"
    with Deployment(tmp_path, PLAN, tls=False) as deployment:
        deployment.serve()
        for number in range(CLIENTS - 1):
            deployment.join(number)
        before = partial(killed_with_its_answer, notes)
        client = deployment.join(CLIENTS - 1, before=before)
        client.process.join(120)
        assert noted(notes, "killed")
        deployment.join(CLIENTS - 1, before=before)
        ended = deployment.ended()
    assert ended.summary["steps"] == PLAN.rounds
    assert ended.facts["outcomes"]["accepted"] == CLIENTS * PLAN.rounds


def gives_no_shares() -> None:
    """The client does not go on once the vectors are there."""
    says = ClientLoop._says

    def left(self: ClientLoop, this: Any) -> Any:
        return None if this.stage == UNMASK else says(self, this)

    ClientLoop._says = left  # type: ignore[method-assign]


def test_a_run_whose_clients_have_helped_for_nothing_ends_by_name(tmp_path: Path) -> None:
    with Deployment(tmp_path, PLAN, tls=False) as deployment:
        deployment.serve()
        for number in range(CLIENTS - 1):
            deployment.join(number)
        deployment.join(CLIENTS - 1, before=gives_no_shares)
        kind, why, _ = deployment.server.wait_for("error")
    assert kind == "TooFewClientsError"
    assert "1 of 3 clients are left for a sum of at least 3: 2 have helped to unmask" in why
