"""A server that its user stops goes on later: for clients that is a pause, and not the end."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from deployed import Deployment, Plan

import dure

PLAN = Plan(dure.Scaffold(clients=3, batch_size=4), rounds=40, checkpoint_every=3)


def test_clients_of_a_server_that_was_interrupted_wait_for_it(tmp_path: Path) -> None:
    with Deployment(tmp_path, PLAN) as deployment:
        deployment.serve()
        deployment.join_all(3)
        deployment.server.wait_for("progress", lambda event: event.get("step", 0) >= 5)
        deployment.server.signal(signal.SIGINT)
        before = time.monotonic()
        assert deployment.ended().summary["ended"] == "interrupt"
        deployment.server.process.join(10)
        assert time.monotonic() - before < 10, "nobody is waited for who only waits"
        for client in deployment.clients.values():
            client.wait_for("waiting")
            assert client.alive
            assert client.said("over") == []
        deployment.serve()
        deployment.ended().check_same(PLAN.simulated())
        for client in deployment.clients.values():
            assert client.wait_for("over") == "the run is over"
