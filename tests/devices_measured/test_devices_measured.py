"""Runs the tests of on_device.py in a process of their own.

The stand-in device stays registered in a process, where other tests would compute on it too.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("c++")), reason="the device needs a C++ compiler"
)
def test_what_is_measured_on_a_device() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-q",
        "-n0",
        "on_device.py",
    ]
    done = subprocess.run(
        command, cwd=HERE, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
