"""What a step has freed is there for the next one, without faults."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from typing import Any

import pytest

import dure.machine.memory
from dure.machine.memory import memory_kept

SCRIPT = """
import json, resource, threading, torch
from dure.machine.memory import memory_kept
torch.set_num_threads(1)

def faults():
    def step():
        blocks = [torch.ones(2**18) for _ in range(100)]  # a megabyte each

    for _ in range(4):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 3

found = {}
with memory_kept():
    with memory_kept():
        found["inside"] = faults()
    found["still inside"] = faults()
print(json.dumps(found))
"""


def faults(**environment: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is asked")
def test_what_a_step_has_freed_is_there_for_the_next() -> None:
    found = faults()
    pages = 100 * 256
    assert found["inside"] < pages * 0.1
    assert found["still inside"] < pages * 0.1, "the outer block goes on"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is asked")
def test_thresholds_of_the_user_stay() -> None:
    found = faults(MALLOC_MMAP_THRESHOLD_="262144")
    assert found["inside"] > 100 * 256 * 0.5


def test_a_system_without_mallopt_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: Any) -> Any:
        raise OSError("no such library")

    monkeypatch.setattr(dure.machine.memory.ctypes, "CDLL", nothing)
    with memory_kept():
        pass


def test_an_error_inside_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(dure.machine.memory, "_set", lambda *values, **more: asked.append(values))
    for name in dure.machine.memory._OWN:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(KeyError), memory_kept(), memory_kept():
        raise KeyError
    assert asked == [dure.machine.memory._KEPT, dure.machine.memory._USUAL]
