"""The simulated parameter server on an accelerator: runs the tests of simulated_on_device.py."""

from __future__ import annotations

from pathlib import Path

from own_process import run_tests


def test_in_a_process_with_the_device() -> None:
    run_tests(Path(__file__).with_name("simulated_on_device.py"))
