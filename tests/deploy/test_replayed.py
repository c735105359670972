"""A run that was recorded is gone through again, and comes to the same bits: also where nobody knew
beforehand in which order clients would answer."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from deployed import Deployment, Ended, Plan

import dure
from dure.deploy.journal import Event, _sum
from dure.errors import LineageError, RunFolderError
from dure.run.replay import replay

PLANS = {
    "FedAsync": Plan(
        dure.FedAsync(clients=3, fraction=1.0, batch_size=4),
        rounds=30,
        options={"record": True},
    ),
    "FedBuff": Plan(
        # Updates come while others measure: they wait, and checkpoints have them.
        dure.FedBuff(clients=3, fraction=1.0, buffer=2, batch_size=4, held_out=0.3),
        rounds=20,
        options={"record": True},
        evaluate_every=2,
        checkpoint_every=2,
    ),
}


@pytest.fixture(scope="module", params=PLANS)
def recorded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Plan]:
    """The folder of a recorded run, in which the server was started twice."""
    plan = PLANS[request.param]
    with Deployment(tmp_path_factory.mktemp("recorded"), plan) as deployment:
        deployment.serve()
        deployment.join_all(3)
        deployment.server.wait_for("progress", lambda event: event.get("step", 0) >= 7)
        # The second server goes through the journal of the first.
        deployment.restart()
        ended: Ended = deployment.ended()
    assert ended.summary["steps"] == plan.rounds
    return deployment.run, plan


def test_a_recorded_run_has_the_same_bits_when_it_is_replayed(
    recorded: tuple[Path, Plan],
) -> None:
    run, plan = recorded
    replayed = replay(run, task=plan.task())
    assert (replayed.rounds, replayed.same) == (plan.rounds, True)


def of_journal(kind: str, **columns: Any) -> Callable[[Path], None]:
    """The first row of this kind, sealed again as the server would seal it."""

    def changed(run: Path) -> None:
        with closing(sqlite3.connect(run / "journal.db")) as journal, journal:
            rows = "SELECT * FROM events WHERE kind = ? ORDER BY seq"
            found = journal.execute(rows, (kind,)).fetchone()
            event = Event(*found[:-1])._replace(**columns)
            journal.execute(
                "UPDATE events SET at = ?, client = ?, body = ?, sum = ? WHERE seq = ?",
                (event.at, event.client, event.body, _sum(event), event.seq),
            )

    return changed


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no object": (of_journal("check_in", body=b"[]"), r"journal\.db is damaged: row"),
    "no such client": (of_journal("check_in", client=10**15), r"journal\.db is damaged: row"),
    "an update of text": (of_journal("update", body=b'"x"'), r"journal\.db is damaged: row"),
    "no journal": (lambda run: (run / "journal.db").write_text("hello" * 999), "is damaged"),
    "nobody": (lambda run: (run / "cohort.json").write_text("[]"), "it lists no clients"),
    "examples of many digits": (
        lambda run: (run / "cohort.json").write_text(f"[1{'0' * 400}, 1]"),
        "cannot read .*cohort",
    ),
}


@pytest.mark.parametrize("recorded", ["FedAsync"], indirect=True)
@pytest.mark.parametrize("what", DAMAGE)
def test_damage_to_what_was_recorded_is_an_error_of_the_folder(
    what: str, recorded: tuple[Path, Plan], tmp_path: Path
) -> None:
    run, plan = recorded
    change, said = DAMAGE[what]
    shutil.copytree(run, tmp_path / "run")
    change(tmp_path / "run")
    with pytest.raises(RunFolderError, match=said) as caught:
        replay(tmp_path / "run", task=plan.task())
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("recorded", ["FedAsync"], indirect=True)
def test_another_model_than_the_one_that_was_signed_is_told(
    recorded: tuple[Path, Plan], tmp_path: Path
) -> None:
    run, plan = recorded
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").write_text("x" * 99)
    with pytest.raises(LineageError, match="not the signed model"):
        replay(tmp_path / "run", task=plan.task())
    (tmp_path / "run" / "model.lineage.json").unlink()
    with pytest.raises(RunFolderError, match=r"model\.safetensors is damaged"):
        replay(tmp_path / "run", task=plan.task())
