"""What the terminals of a server and of a client show while a federation goes on."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from dure.cli import federation_view as module
from dure.cli.client_display import ClientActivity, ClientDisplay
from dure.cli.federation_view import FederationView
from dure.cli.show import Display
from dure.contracts.stop import Stop

THERE: dict[str, Any] = {
    "doing": "training",
    "round": 13,
    "here": 5,
    "at_work": ["ward 3", "ward 4"],
    "missing": ["ward 7"],
    "left": 252.0,
    "outcomes": {"accepted": 36, "late": 2},
    "received": 12_300_000,
    "sent": 45_000_000,
}


def text_of(renderable: Any, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    at = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: at[0])
    return at


def test_a_server_shows_who_is_there_and_what_it_waits_for(clock) -> None:
    view = FederationView()
    assert view.drawn() is None
    assert view.hears({"serving": "https://here:1"}) == "serving at https://here:1"
    view.hears({"status": "http://127.0.0.1:2/status", "token": "run/status.token"})
    view.hears({"federation": THERE})
    text = text_of(view.drawn())
    assert "5 here, 2 at work, 1 missing: ward 7" in text
    assert "ward 3, ward 4 and ward 7 (round 13, at most 4 min 12 s more)" in text
    assert "36 accepted, 2 late" in text
    assert "45.0 MB to clients, 12.3 MB from them" in text
    assert "run/status.token" in text
    # The deadline comes nearer while nothing is told.
    clock[0] += 200
    assert "at most 52.0 s more" in text_of(view.drawn())
    view.ended = True
    assert view.drawn() is None


def test_names_with_brackets_are_no_markup(clock) -> None:
    view = FederationView()
    view.hears({"federation": {**THERE, "at_work": ["[red]ward"], "missing": []}})
    assert "[red]ward" in text_of(view.drawn())


def test_where_there_is_no_terminal_a_line_says_what_has_changed(clock) -> None:
    view = FederationView()
    calm = {**THERE, "missing": []}
    assert view.hears({"federation": calm}) is None
    clock[0] += 10
    assert view.hears({"federation": {**calm, "received": 13}}) is None
    line = view.hears({"federation": THERE})
    assert line is not None
    assert line.startswith("5 here, 2 at work, 1 missing: ward 7; ward 3")
    # Not more often than somebody reads.
    assert view.hears({"federation": calm}) is None
    clock[0] += 10
    assert view.hears({"federation": calm}) == "5 here, 2 at work; " + view._waits()


def test_measuring_is_told_too(clock) -> None:
    view = FederationView()
    view.hears({"federation": {**THERE, "doing": "measuring"}})
    assert "clients that evaluate the model of round 12" in text_of(view.drawn())


def test_the_display_of_a_run_takes_what_is_no_progress(capsys) -> None:
    with Display(Stop(rounds=2)) as display:
        display("training", {"serving": "https://here:1", "run": "a"})
        display("training", {"waiting": "1 of 3 clients are connected"})
        display("training", {"federation": THERE})
    said = capsys.readouterr().err
    assert "serving at https://here:1\n" in said
    assert "1 of 3 clients are connected\n" in said


def test_a_client_shows_its_round_its_transfer_and_what_came_of_the_last() -> None:
    picture = ClientActivity()
    picture.hears("checked in", {"client": 2, "differs": []})
    picture.hears("settled", {"kept": True, "reason": ""})
    picture.hears("settled", {"kept": False, "reason": "too late"})
    picture.hears("sending", {"round": 12, "bytes": 12_300_000})
    picture.hears("moved", {"bytes": 1_200_000})
    text = text_of(picture.drawn())
    assert "round 13 · sending" in text
    assert "1.2 MB of 12.3 MB" in text
    assert "1 update counted, 1 not counted" in text
    assert "last: the update: too late" in text
    picture.hears("sent", {"round": 12})
    text = text_of(picture.drawn())
    assert "waiting for the next assignment" in text
    assert "12.3 MB" not in text


def a_round(display: ClientDisplay, number: int, kept: bool = True, reason: str = "") -> None:
    """All events of a round."""
    display("fetching", {"round": number, "bytes": 812_000})
    display("training", {"round": number})
    display("sending", {"round": number, "bytes": 812_000})
    display("moved", {"bytes": 10})
    display("sent", {"round": number, "bytes": 812_000})
    display("settled", {"kept": kept, "reason": reason})
    display("measuring", {"round": number + 1})


def test_a_client_without_a_terminal_says_one_line_a_round(capsys) -> None:
    with ClientDisplay() as display:
        display("checked in", {"client": 1})
        for number in range(3):
            a_round(display, number)
        a_round(display, 3, kept=False, reason="it is not finite")
        display("fetching", {"round": 4, "bytes": 812_000})
        display("training", {"round": 4})
        display("not wanted", {"round": 4, "why": "the run is over"})
        display("over", {"why": "the run is over"})
    assert capsys.readouterr().err.splitlines() == [
        "dure: checked in as client 1",
        "dure: round 1: sent 812 kB; the update counts",
        "dure: round 2: sent 812 kB; the update counts",
        "dure: round 3: sent 812 kB; the update counts",
        "dure: round 4: sent 812 kB; the update: it is not finite",
        "dure: round 5: stopped, the server does not need the update any more: the run is over",
        "dure: the run is over",
    ]


@pytest.mark.parametrize(
    ("what", "about"),
    [
        ("settled", {"kept": False, "reason": "late\x1b[2J\nthe update counts"}),
        ("over", {"why": "\x1b[31mthe run\r is over"}),
        ("checked in", {"client": 1, "differs": ["torch \x1b]0;title\x07"]}),
    ],
)
def test_what_a_server_says_moves_no_cursor(capsys, what: str, about: dict[str, Any]) -> None:
    with ClientDisplay() as shows:
        shows(what, about)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.removesuffix("\n").isprintable()
    assert all(letter.isprintable() for line in shows.picture.last for letter in line)


def test_a_server_that_is_away_is_told_once_for_each_time(capsys) -> None:
    with ClientDisplay() as display:
        for _ in range(2):
            display("waiting", {"why": "the server is away; trying again in 1 s"})
            display("waiting", {"why": "the server is away; trying again in 2 s"})
            a_round(display, 0)
    said = [line.partition(";")[0] for line in capsys.readouterr().err.splitlines()]
    assert said == ["dure: the server is away", "dure: round 1: sent 812 kB"] * 2


def test_json_lines_have_no_pieces_of_transfers(capsys) -> None:
    with ClientDisplay(as_json=True) as display:
        display("sending", {"round": 0, "bytes": 10})
        display("moved", {"bytes": 5})
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["sending"]
