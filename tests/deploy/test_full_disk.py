"""A disk without room: nothing is lost, and the run goes on when there is some."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from deployed import Deployment, Plan

import dure
from dure.deploy import updates
from dure.deploy.client import state
from dure.deploy.journal import Journal
from dure.deploy.server import app
from dure.errors import RunFolderWriteError

PLAN = Plan(dure.Scaffold(clients=2, batch_size=4), rounds=6, checkpoint_every=2)


def once(real: Any, full: Any, at: int = 2) -> Any:
    """Calls `full` instead, the time `at`."""
    calls = 0

    def called(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return (full if calls == at else real)(*arguments, **named)

    return called


def no_space(*_: object) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def server_is_full_for_a_moment() -> None:
    app.ROOM_SECONDS = 0
    updates._write_at = once(updates._write_at, no_space)  # type: ignore[attr-defined]
    append = Journal.append

    def full(self: Journal, kind: str, *rest: Any) -> Any:
        raise RunFolderWriteError("the disk is full")

    update = once(append, full)

    def appended(self: Journal, kind: str, *rest: Any) -> Any:
        return (update if kind == "update" else append)(self, kind, *rest)

    Journal.append = appended  # type: ignore[method-assign]


def test_a_server_without_room_has_its_clients_wait(tmp_path: Path) -> None:
    with Deployment(tmp_path, PLAN) as deployment:
        deployment.serve(before=server_is_full_for_a_moment)
        deployment.join_all(2)
        deployment.ended().check_same(PLAN.simulated())
        waited = [why for one in deployment.clients.values() for why in one.said("waiting")]
        assert any("the server cannot write" in why["why"] for why in waited)


def client_is_full_for_a_moment() -> None:
    state.os.fsync = once(os.fsync, no_space, at=15)  # type: ignore[attr-defined]


def test_a_client_without_room_says_so_and_goes_on_when_it_has_some(tmp_path: Path) -> None:
    with Deployment(tmp_path, PLAN) as deployment:
        deployment.serve()
        deployment.join(0)
        client = deployment.join(1, before=client_is_full_for_a_moment)
        kind, message, _ = client.wait_for("error")
        assert kind == "RunFolderWriteError"
        assert "No space left on device" in message
        assert str(tmp_path) in message
        deployment.join(1)
        deployment.ended().check_same(PLAN.simulated())
