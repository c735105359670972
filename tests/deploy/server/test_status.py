"""What an operator sees: of a real server, while clients work for it."""

from __future__ import annotations

import json
import math
import socket
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import dure
from dure.deploy.clock import FederationClock
from dure.deploy.journal import Journal
from dure.deploy.server.access import AccessControl, RequestRefused
from dure.deploy.server.outbox import ClientOutbox
from dure.deploy.server.register import Register
from dure.deploy.server.server_metrics import ServerMetrics
from dure.deploy.server.status import TOKEN, Status, load_or_create_token
from dure.deploy.world import Network
from dure.errors import ServeError
from dure.wire.certificates import client_context, issue_server, make_authority
from dure.wire.requests import Train
from dure.wire.signatures import Key, Signer, digest_of
from small import small_task

sys.path.insert(0, str(Path(__file__).parents[1]))
from federation import Federation, got, served


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Federation, dict[str, Any], Path]:
    """A run, and what its listener answered after two rounds."""
    answers: dict[str, Any] = {}
    reads: list[threading.Thread] = []
    begun = threading.Event()

    def read(one: Federation, bearer: str) -> None:
        url = one.where["status"].replace("/status", "/events")
        request = urllib.request.Request(url, headers={"authorization": bearer})
        text = ""
        with urllib.request.urlopen(request, timeout=20) as answer:
            for line in answer:
                text += line.decode()
                begun.set()
        answers["events"] = text.strip().split("\n\n")

    def look(one: Federation, event: dict[str, Any]) -> None:
        if event.get("step") != 2 or event["evaluated"] != 2:
            return
        for path in ("/status", "/metrics", "/health"):
            answers[path] = one.get(path, one.bearer())
        answers["open"] = {path: one.get(path) for path in ("/status", "/metrics", "/health")}
        answers["wrong"] = {
            token: one.get("/status", token)
            for token in ("Bearer ", "Bearer 0", one.bearer() + "0", one.bearer()[:-1], "é")
        }
        answers["page"] = one.get("/", one.bearer())
        answers["form"] = one.get("/")
        reads.append(threading.Thread(target=read, args=(one, one.bearer()), daemon=True))
        reads[0].start()
        begun.wait(20)
        answers["clients' routes"] = one.get("/v1/next", one.bearer())

    folder = tmp_path_factory.mktemp("watched") / "run"
    federation = Federation(3, look)
    federation.run(folder, status_port=0)
    reads[0].join(20)
    return federation, answers, folder


def test_status_says_how_far_the_run_is_and_who_takes_part(seen) -> None:
    code, body = seen[1]["/status"]
    assert code == 200
    status = json.loads(body)
    assert (status["state"], status["rounds"], status["round"]) == ("training", 2, 3)
    assert status["system"]["name"] == "fed-avg"
    assert status["clients"] == {
        "places": 3,
        "enrolled": 3,
        "here": 3,
        "at_work": 0,
        "missing": 0,
        "quarantined": 0,
    }
    assert [one["name"] for one in status["who"]] == sorted(one["name"] for one in status["who"])
    assert {one["name"] for one in status["who"]} == {"c0", "c1", "c2"}
    assert status["updates"] == {"accepted": 6}
    assert status["measured_in_round"] == 2
    assert "test_accuracy" in status["metrics"]
    assert status["bytes"]["received"] > 6 * 1000
    assert len(status["model"]) == 64


def test_metrics_are_read_by_prometheus_own_reader(seen) -> None:
    code, body = seen[1]["/metrics"]
    assert code == 200
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }
    assert values["dure_rounds_total",] == 2
    assert values["dure_updates_total", "accepted"] == 6
    assert values["dure_clients", "here"] == 3
    assert values["dure_fold_seconds_count",] == 6
    assert values["dure_round_seconds_count",] == 2
    assert values["dure_journal_sync_seconds_count",] > 0
    assert values["dure_up",] == 1
    # Of this server alone, and not of all that the process counts.
    assert not [name for name, *_ in values if not name.startswith("dure_")]


def test_health_needs_no_token_and_the_rest_needs_its_own(seen) -> None:
    answers = seen[1]
    assert answers["open"]["/health"] == (200, '{"status": "training"}')
    assert answers["open"]["/status"][0] == answers["open"]["/metrics"][0] == 401
    assert {code for code, _ in answers["wrong"].values()} == {401}
    assert "rounds" not in answers["open"]["/status"][1]


def test_the_page_is_at_the_same_listener_by_the_same_token(seen) -> None:
    code, page = seen[1]["page"]
    assert code == 200
    assert "<h3>Clients</h3>" in page
    assert "c2" in page
    assert "is training" in page
    code, form = seen[1]["form"]
    assert code == 401
    assert "<form" in form
    assert "c2" not in form
    events = seen[1]["events"]
    assert events[0].startswith("event: whole")
    # The server ended while somebody read: who did was told how.
    assert events[-1].startswith("event: bye")
    assert '"over":true' in events[-2]


def test_neither_listener_has_the_others_routes(seen) -> None:
    assert seen[1]["clients' routes"][0] == 404


def test_the_token_is_its_owners_alone_and_stays(seen, tmp_path) -> None:
    path = seen[2] / TOKEN
    assert path.stat().st_mode & 0o777 == 0o600
    assert seen[0].where["token"] == str(path)
    assert (
        load_or_create_token(tmp_path)
        == load_or_create_token(tmp_path)
        != load_or_create_token(seen[2])
    )
    (tmp_path / TOKEN).chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        load_or_create_token(tmp_path)


def test_other_machines_reach_it_by_tls_with_the_same_certificate(tmp_path) -> None:
    authority = make_authority(tmp_path)
    certificate = issue_server(tmp_path, ["localhost"]).certificate
    answers: dict[str, Any] = {}

    def look(one: Federation, event: dict[str, Any]) -> None:
        if event.get("step") == 1 and not answers:
            context = client_context(authority.certificate)
            url = one.where["status"].replace("0.0.0.0", "localhost")
            headers = {"authorization": one.bearer()}
            # No certificate of its own, which clients need here.
            answers["tls"] = got(url, headers, context)

    federation = Federation(1, look)
    federation.certificates = tmp_path
    federation.run(
        tmp_path / "run",
        certificate=str(certificate),
        client_ca=str(authority.certificate),
        status_port=0,
        status_host="0.0.0.0",
    )
    assert answers["tls"][0] == 200


def test_a_port_that_is_taken_is_named(tmp_path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServeError, match=f"port {port}: Address already in use"):
            Federation(1).run(tmp_path / "run", status_port=port)
    # What had begun has ended: the run can be served again at once.
    assert not [one for one in threading.enumerate() if one.name == "journal"]


def test_a_key_that_others_may_read_is_refused(tmp_path) -> None:
    Federation(1).run(tmp_path / "run", rounds=1)
    (tmp_path / "run" / "signing.key").chmod(0o644)
    with pytest.raises(ServeError, match="others may read"):
        dure.resume(tmp_path / "run", task=small_task(), stop=dure.Stop(rounds=2))


def test_the_token_does_not_go_over_a_network_in_plain() -> None:
    with pytest.raises(ValueError, match="certificate"):
        Network(status_port=0, status_host="0.0.0.0")
    Network(status_port=0, status_host="0.0.0.0", insecure=True)


@pytest.fixture
def starting(tmp_path):
    """The status of a server that has not begun to serve."""
    clock = FederationClock()
    with Register(tmp_path / "clients.db", 2) as register:
        journal = Journal(tmp_path, clock)
        yield Status(
            about={},
            server_metrics=ServerMetrics(),
            outbox=ClientOutbox(clock.now),
            access=AccessControl(register, "open"),
            journal=journal,
            clock=clock,
            differs=lambda session: [],
            token=load_or_create_token(tmp_path),
        )
        journal.close()


def test_a_server_that_starts_or_cannot_write_is_not_healthy(starting, monkeypatch) -> None:
    with served(starting.asgi()) as get:
        assert get("/health") == (503, '{"status": "starting"}')
        starting.outbox.open.set()
        assert get("/health") == (200, '{"status": "waiting"}')
        monkeypatch.setattr(starting.journal, "_broken", "the disk is gone")
        assert get("/health") == (503, '{"status": "broken"}')


def test_what_lets_a_client_in_opens_nothing(starting) -> None:
    signer = Signer(Key.make())
    invitation = starting.access.register.invite()
    with served(starting.asgi()) as get:
        signed = signer.sign("GET", "/status", digest_of())
        assert get("/status", signed)[0] == 401
        assert get("/status", {"authorization": f"Bearer {invitation}"})[0] == 401
        assert get("/status", {"authorization": f"Bearer {starting.token}"})[0] == 200


def test_status_says_who_is_missing_refused_and_in_quarantine(starting) -> None:
    starting.outbox.open.set()
    session = starting.outbox.session(1)
    session.name, session.examples, session.missing = "ward 3", 5, True
    starting.outbox.assign(1, Train(7, 3, 0, "d" * 64, 100), 30.0, {})
    session.missing = True
    for _ in range(20):
        with pytest.raises(RequestRefused):
            starting.access.refuse(1, 400, "malformed", "it is not JSON")
        starting.server_metrics.refused(
            1, "10.0.0.1", "POST /v1/next", "malformed", "it is not JSON"
        )
    starting.server_metrics.came_of(1, 6, "failed", "its own code raised ValueError")
    status = starting.look()
    assert status["clients"]["missing"] == status["clients"]["quarantined"] == 1
    [who] = status["who"]
    assert (who["state"], who["round"], who["ticket"]) == ("missing", 4, 7)
    assert who["seconds_to_deadline"] == 30.0
    assert who["last"] == "failed: its own code raised ValueError"
    assert who["refusals"] == {"malformed": 20}
    assert who["quarantined_seconds"] > 0
    assert status["newest_refusals"][-1]["reason"] == "it is not JSON"
    assert "address" not in status["newest_refusals"][-1]


def test_numbers_that_json_has_no_word_for_are_null(starting) -> None:
    starting.server_metrics.loss = math.nan
    with served(starting.asgi()) as get:
        code, body = get("/status", {"authorization": f"Bearer {starting.token}"})
    assert code == 200
    assert json.loads(body)["loss"] is None
