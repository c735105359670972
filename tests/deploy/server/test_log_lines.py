"""The server's log: a JSON object for each thing that happens."""

from __future__ import annotations

import json
import logging
import signal
import sys
from pathlib import Path

import pytest

from dure.deploy.server.log_lines import SERVER, logged_to
from dure.deploy.server.log_rate_limit import MOST_LINES
from dure.deploy.server.outbox import ClientSession
from dure.deploy.server.server_metrics import ServerMetrics, log_event
from dure.errors import RunFolderWriteError

sys.path.insert(0, str(Path(__file__).parents[1]))
from federation import Federation


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Of a run of two clients and three rounds."""
    folder = tmp_path_factory.mktemp("logged")
    Federation(2).run(folder / "run", rounds=3, log=str(folder / "log.jsonl"))
    return lines(folder / "log.jsonl")


def test_every_thing_that_happens_has_a_line(log) -> None:
    events = [line["event"] for line in log]
    assert events[0] == "start"
    assert events[-1] == "end"
    for event, number in {
        "client in": 2,
        "assignment": 6,
        "update": 6,
        "outcome": 6,
        "round": 3,
        "evaluation": 4,
    }.items():
        assert events.count(event) == number, event
    assert "checkpoint" in events
    assert [line["round"] for line in log if line["event"] == "round"] == [1, 2, 3]
    assert all(line["loss"] > 0 < line["seconds"] for line in log if line["event"] == "round")
    assert {line["outcome"] for line in log if line["event"] == "outcome"} == {"accepted"}


def test_an_update_is_told_before_what_became_of_it(log) -> None:
    def place(event: str, ticket: int) -> int:
        lines = [(line["event"], line.get("ticket")) for line in log]
        return lines.index((event, ticket))

    for ticket in range(6):
        assert place("assignment", ticket) < place("update", ticket) < place("outcome", ticket)


def test_no_line_has_a_secret(log) -> None:
    text = json.dumps(log).lower()
    for word in ("nonce", "signature", "token", "private"):
        assert word not in text


def test_a_mistake_has_its_traceback(tmp_path) -> None:
    with logged_to(tmp_path / "log"):
        try:
            raise KeyError("nothing")
        except KeyError:
            SERVER.exception("%s %s", "POST", "/v1/next")
    [line] = lines(tmp_path / "log")
    assert (line["event"], line["level"]) == ("mistake", "error")
    assert line["request"] == "POST /v1/next"
    assert "KeyError: 'nothing'" in line["traceback"]
    assert not SERVER.handlers


def test_a_log_that_is_moved_away_goes_on_in_a_new_file(tmp_path) -> None:
    path = tmp_path / "log"
    # Under nohup it is ignored, also by what the tests start.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with logged_to(path):
            log_event("first")
            path.rename(tmp_path / "log.1")
            # It would end the process, if it were not heard.
            signal.raise_signal(signal.SIGHUP)
            log_event("second")
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
    assert [line["event"] for line in lines(tmp_path / "log.1")] == ["first"]
    assert [line["event"] for line in lines(path)] == ["second"]


def test_a_log_that_cannot_be_written_is_named(tmp_path) -> None:
    with pytest.raises(RunFolderWriteError, match="nowhere"), logged_to(tmp_path / "nowhere/log"):
        pass


def test_refusals_without_end_do_not_fill_the_disk(tmp_path, monkeypatch) -> None:
    at = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: at[0])
    server_metrics = ServerMetrics()
    with logged_to(tmp_path / "log"):
        for _ in range(1000):
            server_metrics.refused(
                None, "10.0.0.1", "POST /v1/next", "not signed", "it is not signed"
            )
        server_metrics.refused(3, "10.0.0.1", "POST /v1/next", "forged", "it was changed")
        at[0] = 61.0
        server_metrics.refused(None, "10.0.0.1", "POST /v1/next", "not signed", "it is not signed")
    found = lines(tmp_path / "log")
    assert [line["kind"] for line in found].count("not signed") == MOST_LINES + 1
    assert found[-1]["left_out"] == 1000 - MOST_LINES
    assert found[0]["address"] == "10.0.0.1"
    # Of a client that is known, its number is enough.
    assert "address" not in next(line for line in found if line["kind"] == "forged")


def test_a_server_without_a_log_says_nothing_of_refusals(capfd) -> None:
    server_metrics = ServerMetrics()
    server_metrics.refused(None, "10.0.0.1", "POST /v1/next", "not signed", "it is not signed")
    server_metrics.left(ClientSession(0, "c0"))
    assert capfd.readouterr() == ("", "")
    assert not logging.getLogger("dure.server").handlers
