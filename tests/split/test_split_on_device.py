"""Split learning on an accelerator: runs the tests of split_on_device.py."""

from __future__ import annotations

from pathlib import Path

from own_process import run_tests


def test_in_a_process_with_the_device() -> None:
    run_tests(Path(__file__).with_name("split_on_device.py"))
