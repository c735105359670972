"""Runs that go on, as their page follows them: what is read, sent, and to whom."""

from __future__ import annotations

import copy
import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_runs import write_run

from dure.record.live_status import NOW, record_failure
from dure.record.lock import Lock
from dure.report.history_file import HistoryFile
from dure.report.live.json_patch import JsonChange, changes
from dure.report.live.listener import Listener
from dure.report.live.login import TokenLogin
from dure.report.live.page import LivePage
from dure.report.live.run_follower import RunFollower
from dure.report.live.state import PageStates
from dure.report.read import read_run

CODE = "ABCD-EFGH"

scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
values = st.recursive(
    scalars,
    lambda inside: (
        st.lists(inside, max_size=4) | st.dictionaries(st.text(max_size=2), inside, max_size=4)
    ),
    max_leaves=12,
)
objects = st.dictionaries(st.text(max_size=2), values, max_size=4)


def patched(value: Any, made: list[JsonChange]) -> Any:
    """Patches applied to a value in place, as live.js does."""
    for path, what, *given_ in made:
        *way, last = path
        there = value
        for key in way:
            there = there[key]
        if what == "cut":
            del there[last]
        elif what == "add":
            there[last].extend(given_[0])
        else:
            there[last] = given_[0]
    return value


@given(old=objects, new=objects)
def test_what_is_sent_makes_the_old_into_the_new(old, new) -> None:
    made = json.loads(json.dumps(changes(old, new)))
    assert patched(copy.deepcopy(old), made) == new


def test_of_a_curve_that_has_grown_only_the_new_points_are_sent() -> None:
    old = {"series": [{"x": [1, 2, 3], "y": {"loss": [3, 2, 1]}}]}
    new = {"series": [{"x": [1, 2, 3, 4], "y": {"loss": [3, 2, 1, 0]}}]}
    assert changes(old, new) == [
        [["series", 0, "x"], "add", [4]],
        [["series", 0, "y", "loss"], "add", [0]],
    ]


@given(cuts=st.lists(st.integers(0, 4000), max_size=6), back=st.integers(1, 8))
def test_a_history_is_read_as_it_grows_and_when_it_was_taken_back(tmp_path_factory, cuts, back):
    folder = tmp_path_factory.mktemp("history")
    path = write_run(folder / "run", "run", steps=12, evaluations=4) / "history.jsonl"
    whole = path.read_bytes()
    lines = HistoryFile(path)
    for cut in [*sorted(cuts), len(whole)]:
        path.write_bytes(whole[:cut])
        lines.read()
    again = HistoryFile(path)
    again.read()
    assert (lines.steps, lines.evaluations) == (again.steps, again.evaluations)
    assert lines.damaged == 0
    assert not lines.read()
    # A run that goes on cuts to its checkpoint, and does the rest otherwise.
    rows = whole.decode().splitlines(keepends=True)
    other = [row.replace('"loss": ', '"loss": 1') for row in rows[back:]]
    path.write_text("".join([*rows[:back], *other]))
    lines.read()
    fresh = HistoryFile(path)
    fresh.read()
    assert (lines.steps, lines.evaluations) == (fresh.steps, fresh.evaluations)


def test_how_a_run_is_follows_from_its_lock_its_summary_and_what_it_said(tmp_path) -> None:
    run = write_run(tmp_path / "run", "run", killed=True)
    following = RunFollower([tmp_path])
    assert [one.state for one in following.look().followed] == ["stopped"]
    lock = Lock.take(run, "held")
    assert [one.state for one in following.look().followed] == ["running"]
    before = following.look()
    assert following.look().shows_the_same(before)
    lock.release()
    record_failure(run, "rank 1 failed at step 3: ValueError: <b>")
    look = following.look()
    assert [one.state for one in look.followed] == ["failed"]
    assert not look.goes_on
    write_run(tmp_path / "other", "other")
    assert [one.state for one in following.look().followed] == ["over", "failed"]


def test_a_folder_without_runs_is_waited_for(tmp_path) -> None:
    states = PageStates([tmp_path])
    state = states.newest()
    assert not state.over
    assert "No run has started" in state.sections[1]
    write_run(tmp_path / "run", "run <i>one</i>")
    after = states.newest(at_once=True)
    assert after.over
    assert "final report" in after.sections[1]
    assert "<i>one" not in "".join(after.sections)
    # Nothing has changed since: it is the same state.
    assert states.newest(at_once=True) is after
    told = after.since(state)
    data = copy.deepcopy(state.data)
    assert patched(data, json.loads(json.dumps(told["changes"]))) == json.loads(
        json.dumps(after.data)
    )


def test_until_its_summary_a_run_tells_who_took_part_in_now_json(tmp_path) -> None:
    run = write_run(tmp_path / "run", "run", federated=True, killed=True)
    facts = {"engine": "loop", "flights": [[0, 0, 0.0, 1.5, "accepted"]], "outcomes": {}}
    (run / NOW).write_text(json.dumps({"facts": [facts], "federation": {"here": 2}}))
    federation = read_run(run).federation
    assert federation is not None
    assert [one.client for one in federation.assignments] == [0]
    lock = Lock.take(run, "held")
    assert "clients here" in PageStates([run]).newest().sections[1]
    lock.release()


def test_clients_with_trouble_come_first_and_what_they_say_is_text(tmp_path) -> None:
    run = write_run(tmp_path / "run", "run", federated=True, killed=True)
    who = [
        {"client": 0, "name": "calm", "state": "here", "last": "accepted"},
        {"client": 1, "name": "<script>", "state": "missing", "last": "failed: <img src=x>"},
    ]
    told = {
        "state": "training",
        "who": who,
        "newest_refusals": [{"kind": "forged", "reason": "<svg onload=x>", "address": "10.0.0.1"}],
    }
    now = PageStates([run], lambda: told).newest().sections[1]
    assert now.index("&lt;script&gt;") < now.index("calm")
    assert "<script>" not in now
    assert "<img" not in now
    assert "<svg onload" not in now


# Who may see it.


@pytest.fixture(scope="module")
def listening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listener]:
    folder = tmp_path_factory.mktemp("listening")
    write_run(folder / "run", "run", steps=20, killed=True)
    with closing(Listener(LivePage([folder], CODE, "It is there."))) as listener:
        yield listener


def asked(listener, path="/", method="GET", body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", listener.port, timeout=20)
    with closing(connection):
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()


def test_without_the_token_there_is_a_form_and_nothing_else(listening) -> None:
    status, headers, body = asked(listening)
    assert status == 401
    assert b"<form" in body
    assert b"run" not in body.split(b"<main>")[1]
    assert "'none'" in headers["content-security-policy"]
    for path in ("/events", "/plotly.js", "/here"):
        assert asked(listening, path)[0] == 401
    for wrong in ("Bearer x", "Bearer", f"Basic {CODE}"):
        assert asked(listening, "/here", Authorization=wrong)[0] == 401
    # Not in an address either, which histories and logs would keep.
    assert asked(listening, f"/?token={CODE}")[0] == 401


def test_the_token_is_given_for_a_cookie_that_scripts_and_other_sites_cannot_use(listening):
    assert asked(listening, "/", "POST", "token=wrong")[0] == 403
    status, headers, _ = asked(listening, "/", "POST", f"token={CODE}")
    assert (status, headers["location"]) == (303, "./")
    cookie, *rest = headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Strict"} <= set(rest)
    assert CODE not in cookie
    status, headers, body = asked(listening, Cookie=f"other=1; {cookie}")
    assert status == 200
    assert CODE.encode() not in body
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'nonce-" in policy
    assert "unsafe-inline" not in policy.split("style-src")[0]
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert asked(listening, "/here", Authorization=f"Bearer {CODE}")[0] == 204
    # That of another token opens nothing.
    other = TokenLogin("another", secure=True).enter(b"token=another")
    assert other is not None
    assert "; Secure" in other.headers["set-cookie"]
    assert asked(listening, "/here", Cookie=other.headers["set-cookie"])[0] == 401


def test_a_name_that_leads_here_from_elsewhere_gets_nothing(listening) -> None:
    for host in ("evil.example", "evil.example:80", "", "[::", "127.0.0.1.evil.example"):
        assert asked(listening, Host=host, Authorization=f"Bearer {CODE}")[0] == 421
    assert asked(listening, "/here", Host="localhost:1", Authorization=f"Bearer {CODE}")[0] == 204
    assert asked(listening, "/", "POST", "token=" + "x" * 5000)[0] == 413
    assert asked(listening, "/", "PUT", Authorization=f"Bearer {CODE}")[0] in (405, 501)


def test_a_reader_gets_the_whole_then_changes_then_the_end(tmp_path) -> None:
    run = write_run(tmp_path / "run", "run", steps=20, killed=True)
    page = LivePage([tmp_path], CODE, "It is there.")
    headers = {"authorization": f"Bearer {CODE}"}
    stream = page.answer("GET", "/events", headers, b"").stream
    assert stream is not None
    assert page.readers == 1
    first = stream.due().decode()
    assert first.startswith("event: whole\nid: ")
    version = first.split("\n")[1].removeprefix("id: ")
    assert stream.due() == b""
    lines = (run / "history.jsonl").read_text().splitlines(keepends=True)
    (run / "history.jsonl").write_text("".join(lines[:-1]))
    late = page.answer("GET", f"/events?since={version}", headers, b"").stream
    assert late is not None
    page.close()
    for reader in (stream, late):
        last = reader.due().decode()
        assert last.startswith("event: patch") or reader is late
        assert "event: bye" in last
        assert reader.over
        reader.close()
        reader.close()
    assert page.readers == 0
