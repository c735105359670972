"""Runs on an accelerator: each file of this folder, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from own_process import run_tests


@pytest.mark.parametrize(
    "name",
    [
        "ranks_on_a_device",
        "crossings",
        "device_choice",
        "measured_on_a_device",
        "torchrun_on_a_device",
        "features_on_a_device",
    ],
)
def test_in_a_process_with_the_device(name: str) -> None:
    run_tests(Path(__file__).with_name(f"{name}.py"))
