"""What is written to the journal: of two requests of one client at the same time, since it has
given up the first one, and of what a client says in words."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fuzzed import DIGEST, STREAM, TICKET, Request, Target

from dure.deploy.journal import Event


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    with Target(tmp_path) as served:
        yield served


def reservation(digest: str = DIGEST) -> dict[str, Any]:
    about = {"ticket": TICKET, "bytes": len(STREAM), "digest": digest}
    return {**about, "examples": 5, "samples": 5, "loss": 1.0}


def whole(target: Target) -> int:
    """Sends all bytes of the update; the status of the answer."""
    path = f"/v1/uploads/{TICKET}"
    headers = target.signed("client", "PATCH", path, STREAM)
    headers.append((b"upload-offset", b"0"))
    return target.send(Request("PATCH", path.encode(), headers, STREAM, "client"))[0]


def test_an_update_whose_bytes_come_twice_is_written_down_once(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert target.said("client", "/v1/uploads", reservation())[0] == 200
    append = target.journal.append

    def slow(*row: Any, **named: Any) -> Future[Event]:
        """The disk takes its time."""
        written: Future[Event] = Future()
        pool.submit(lambda: (time.sleep(0.3), written.set_result(append(*row, **named).result())))
        return written

    with ThreadPoolExecutor(8) as pool:
        monkeypatch.setattr(target.journal, "append", slow)
        first = pool.submit(whole, target)
        time.sleep(0.1)
        again = pool.submit(target.said, "client", "/v1/uploads", reservation())
        other = pool.submit(target.said, "client", "/v1/uploads", reservation("0" * 64))
        assert first.result() == 200
        status, body = again.result()
        assert (status, b'"complete":true' in body) == (200, True)
        # Of other bytes, but nothing is waited for any more.
        assert other.result()[0] == 200
    assert len(written(target, "update")) == 1
    assert target.updates.digest(TICKET) == DIGEST


def written(target: Target, kind: str) -> list[str]:
    """What the rows of this kind say."""
    rows = []
    target.journal.read_from(0)
    while event := target.journal.next(0.1):
        if event.kind == kind:
            rows.append(event.body.decode())
    return rows


WORDS = "\x1b[2J\nall is well " * 1000


def test_what_a_client_says_of_its_failure_is_a_line(target: Target) -> None:
    failed = {"ticket": TICKET, "kind": "ValueError", "message": WORDS}
    assert target.said("client", "/v1/failures", failed)[0] == 204
    [reason] = written(target, "failed")
    assert reason.isprintable()
    assert 400 < len(reason) <= 500


def test_and_so_is_why_there_is_no_update(target: Target) -> None:
    reserve = {**reservation(), "failure": WORDS}
    assert target.said("client", "/v1/uploads", reserve)[0] == 200
    [update] = written(target, "update")
    assert "\\u001b" not in update
    assert "\\n" not in update
    assert len(update) < 1000
