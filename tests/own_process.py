"""Tests that run in a process of their own, with the stand-in device present from its start.

Autograd counts the devices at a process's first backward pass: a process that computed without the
device cannot compute on it, and one that has it cannot fork clients. So a file of such tests is not
collected, and a test runs it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DEVICES = "4"


def run_tests(file: Path) -> None:
    """Run the tests of a file in another process; fail with its output."""
    stand_in_device = pytest.importorskip(
        "stand_in_device", reason="no C++ compiler: apt-get install g++", exc_type=ImportError
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-q"]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    # A short path, because Ray's sockets are there.
    short = os.environ.get("PYTEST_DEBUG_TEMPROOT", "/tmp")
    ended = subprocess.run(
        [*command, str(file)],
        env={**own, stand_in_device.VARIABLE: DEVICES, "TMPDIR": short},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
