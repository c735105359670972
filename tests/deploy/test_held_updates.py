"""Updates that stay with their clients, and a protocol on them: who is waited for, what is refused,
and that nothing of what is said is found anywhere."""

from __future__ import annotations

import base64
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_sums import SEED, Played, Toy, install, noted

import dure
from dure.deploy.client.audit_log import verify
from dure.deploy.server import outbox
from dure.deploy.tree_files import TreeFiles
from dure.errors import PolicyError
from dure.protocol.messages import ProtocolAnswer, ProtocolStep
from small import diverging_task, small_task

STRATEGY = dure.FedAvg(clients=3, batch_size=4)


def serve(
    folder: Path, *players: Callable[[str], Played], rounds: int = 2, **options: Any
) -> tuple[dure.Run, list[Played]]:
    """A run with these clients."""
    playing: list[Played] = []

    def hears(event: dict[str, Any]) -> None:
        if "serving" in event:
            playing.extend(player(event["serving"]) for player in players)

    run = dure.serve(
        small_task(),
        options.pop("strategy", STRATEGY),
        dure.Stop(rounds=rounds),
        out=folder / "run",
        on_progress=hears,
        **{"port": 0, "access": "open", "record": True, **options},
    )
    for client in playing:
        client.leave()
        client.join()
    return run, playing


def player(number: int, folder: Path | None = None, answers: Any = None) -> Any:
    state = None if folder is None else folder / f"site-{number}"
    return lambda url: Played(url, number, state, answers=answers)


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(tmp_path / "notes", monkeypatch.setattr)
    return tmp_path / "notes"


def totals(folder: Path) -> list[dict[str, Any]]:
    """The trees of what was made once."""
    with closing(sqlite3.connect(folder / "run" / "journal.db")) as journal:
        rows = journal.execute("SELECT body FROM events WHERE kind = 'once' ORDER BY seq")
        made = [json.loads(body) for (body,) in rows]
    trees = TreeFiles(folder / "run" / "once")
    return [trees.read(one["number"], one["digest"]) for one in made]


def test_sums_of_all_clients_make_the_model_and_a_replay_has_the_same_bits(
    notes: Path, tmp_path: Path
) -> None:
    run, clients = serve(tmp_path, *(player(number) for number in range(3)))
    assert run.summary["steps"] == 2
    assert [int(one["total"][0]) for one in totals(tmp_path)] == [3 * SEED] * 2
    assert [int(one["total"][3]) for one in totals(tmp_path)] == [0 + 1 + 2] * 2
    assert all(client.ended == "the run is over" for client in clients)
    # Each hears what became of its tickets, as of updates that are sent.
    assert [len(client.words("settled")) for client in clients] == [2, 2, 2]
    assert all(one["kept"] for client in clients for one in client.words("settled"))
    assert not any(client.words("sent") for client in clients)
    assert run.summary["facts"][0]["outcomes"]["accepted"] == 6
    made = noted(notes, "made")
    dure.backup(tmp_path / "run", tmp_path / "copy")
    replayed = dure.replay(tmp_path / "copy", task=small_task())
    assert (replayed.rounds, replayed.same) == (2, True)
    assert noted(notes, "made") == made


def test_nothing_of_an_answer_or_of_a_clients_examples_is_found_anywhere(
    notes: Path, tmp_path: Path
) -> None:
    logging.getLogger("dure").setLevel(logging.DEBUG)
    log = tmp_path / "log.jsonl"
    clients = [player(number, tmp_path) for number in range(3)]
    _, played = serve(tmp_path, *clients, log=str(log))
    folders = [tmp_path / "run", *(tmp_path / f"site-{number}" for number in range(3))]
    files = [log, *(one for folder in folders for one in folder.rglob("*") if one.is_file())]
    content = {file: file.read_bytes() for file in files}
    said = [body for client in played for body in client.site.said]
    assert len(said) == 3 * 2 * 3
    for body in said:
        for form in (body, body.hex().encode(), base64.b64encode(body), repr(body).encode()):
            assert [file for file, there in content.items() if form in there] == []
    assert list((tmp_path / "run" / "updates").iterdir()) == []
    with closing(sqlite3.connect(tmp_path / "run" / "journal.db")) as journal:
        rows = journal.execute("SELECT kind, body FROM events").fetchall()
    here = [json.loads(body) for kind, body in rows if kind == "check_in"]
    assert {(one["examples"], one["held_out"]) for one in here} == {(1, 0)}
    ready = [json.loads(body) for kind, body in rows if kind == "update"]
    assert {(one["bytes"], one["examples"], one["samples"], one["loss"]) for one in ready} == {
        (0, 0, 0, 0.0)
    }
    assert not any("seconds" in one or "metrics" in one for one in ready)
    # The site has a line of each thing that left it.
    audit = tmp_path / "site-0" / "audit.jsonl"
    assert verify(audit).lines > 0
    kinds = [json.loads(line)["kind"] for line in audit.read_text().splitlines()]
    assert (kinds.count("ready"), kinds.count("answer"), kinds.count("update")) == (2, 6, 0)


def refuses(say: ProtocolStep, honest: Any) -> ProtocolAnswer | None:
    raise ArithmeticError("the server asks for both shares: 12345")


def not_in_it(say: ProtocolStep, honest: Any) -> ProtocolAnswer | None:
    return None


def others(say: ProtocolStep, honest: Any) -> ProtocolAnswer | None:
    answer = honest(say)
    return ProtocolAnswer(
        say.ticket, say.client, say.stage, answer.body, [torch.zeros(2)] * len(say.wants)
    )


@pytest.mark.parametrize("how", [refuses, not_in_it, others])
def test_who_does_not_go_on_is_not_waited_for_and_its_update_does_not_count(
    how: Any, notes: Path, tmp_path: Path
) -> None:
    asked: list[int] = []

    def counted(say: ProtocolStep, honest: Any) -> ProtocolAnswer | None:
        asked.append(say.stage)
        return how(say, honest)

    log = tmp_path / "log.jsonl"
    began = time.monotonic()
    players = [player(0), player(1), player(2, answers=counted)]
    run, clients = serve(tmp_path, *players, log=str(log), exchange_seconds=1e3)
    assert time.monotonic() - began < 100
    assert run.summary["steps"] == 2
    assert [int(one["total"][3]) for one in totals(tmp_path)] == [0 + 1] * 2
    assert all(client.ended == "the run is over" for client in clients)
    assert [one["kept"] for one in clients[2].words("settled")] == [False] * 2
    # Not asked again for a ticket on which it has given up.
    assert asked == ([0, 1] * 2 if how is others else [0] * 2)
    assert ("ArithmeticError" in log.read_text()) == (how is refuses)
    assert "12345" not in log.read_text()


def test_who_never_answers_is_waited_for_until_the_time_is_up(notes: Path, tmp_path: Path) -> None:
    held: list[float] = []

    def waits(say: ProtocolStep, honest: Any) -> ProtocolAnswer | None:
        # Its call stays open: it is there.
        held.append(time.monotonic())
        time.sleep(1.5)
        return honest(say)

    players = [player(0), player(1), player(2, answers=waits)]
    run, clients = serve(tmp_path, *players, rounds=1, exchange_seconds=0.5)
    assert run.summary["steps"] == 1
    [one] = totals(tmp_path)
    assert int(one["total"][0]) == 2 * SEED
    # It hears that its answer was too late, and goes on.
    assert len(held) == 1
    assert not clients[2].words("left")


def test_who_hangs_up_is_waited_for_no_longer_than_a_grace(
    notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "GRACE", 0.5)
    gone: list[Played] = []

    def leaves(say: ProtocolStep, honest: Any) -> ProtocolAnswer | None:
        gone[0].leave()
        raise KeyboardInterrupt

    def one(url: str) -> Played:
        gone.append(Played(url, 2, answers=leaves))
        return gone[0]

    began = time.monotonic()
    run, _ = serve(tmp_path, player(0), player(1), one, rounds=1, exchange_seconds=1e3)
    assert time.monotonic() - began < 100
    assert int(totals(tmp_path)[0]["total"][0]) == 2 * SEED
    assert run.summary["steps"] == 1


def test_files_of_what_was_made_go_once_a_checkpoint_covers_them(
    notes: Path, tmp_path: Path
) -> None:
    serve(tmp_path, *(player(number) for number in range(3)), rounds=3, record=False)
    assert len(noted(notes, "made")) == 3
    assert list((tmp_path / "run" / "once").iterdir()) == []


def test_training_that_fails_says_neither_how_nor_why(
    notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diverges = diverging_task()
    # Its optimizer is another one, which the server would not take.
    trains = Toy(small_task(), "", 0).trains()
    monkeypatch.setattr(Toy, "trains", lambda self: trains)
    log = tmp_path / "log.jsonl"
    players = [player(0), player(1), lambda url: Played(url, 2, task=diverges)]
    strategy = dure.FedAvg(clients=3, batch_size=4, selection="uniform:1:3:2")
    _, clients = serve(tmp_path, *players, rounds=1, log=str(log), strategy=strategy)
    assert "finite" in repr(clients[2].words("failed"))
    with closing(sqlite3.connect(tmp_path / "run" / "journal.db")) as journal:
        rows = journal.execute("SELECT body FROM events WHERE kind = 'failed'").fetchall()
    assert {body for (body,) in rows} == {b"its own code raised NoUpdate"}
    assert "finite" not in log.read_text()


def test_a_training_loop_of_its_own_takes_no_part(notes: Path, tmp_path: Path) -> None:
    declined: list[Exception] = []

    def own(url: str) -> None:
        try:
            dure.Client(url, examples=5)
        except PolicyError as error:
            declined.append(error)
        players.append(Played(url, 0))

    def begins(url: str) -> Played:
        # The server is open once this has returned.
        threading.Thread(target=own, args=(url,), daemon=True).start()
        return Played(url, 1)

    players: list[Played] = []
    run, _ = serve(tmp_path, begins, rounds=1, strategy=dure.FedAvg(clients=2, batch_size=4))
    players[0].leave()
    players[0].join()
    assert "would send unprotected updates" in str(declined)
    assert run.summary["steps"] == 1


def test_clients_have_some_time_to_answer() -> None:
    with pytest.raises(ValueError, match="exchange_seconds is 0"):
        dure.Network(exchange_seconds=0)
