"""Benchmarks leave no process behind, whatever those have started that they have started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "deployed"))

import families

PARENT = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def test_a_process_that_does_not_listen_is_killed_with_its_children_in_other_sessions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(families, "LEAVE", 1.0)
    with families.ended() as started:
        parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
        started.append(parent)
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        known = families.family([parent.pid])
        assert {one.pid for one in known} == {parent.pid, child}
        assert all(families.resident(one.pid) > 0 for one in known)
    parent.stdout.close()
    assert families.family([parent.pid, child]) == []
