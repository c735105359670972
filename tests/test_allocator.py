"""What a step has freed is there for the next one: without faults, and given back behind the run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from typing import Any

import pytest

import dure.allocator
from dure.allocator import memory_kept

SCRIPT = """
import json, resource, threading, torch
from dure.allocator import memory_kept
torch.set_num_threads(1)

def faults(mb):
    def step():
        blocks = [torch.ones(2**18) for _ in range(mb)]  # a megabyte each
        large = torch.ones(2**24)  # 64 MB
    step(), step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 3

found = {"before": faults(100)}
with memory_kept():
    with memory_kept():
        found["inside"] = faults(100)
    found["still inside"] = faults(100)
found["behind"] = faults(100)
print(json.dumps(found))
"""


def faults(**environment: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is asked")
def test_memory_is_kept_inside_and_given_back_behind() -> None:
    found = faults()
    pages = 64 * 256
    assert found["before"] > pages * 0.9, "a block of 64 MB is the system's own"
    assert found["inside"] < pages * 0.05
    assert found["still inside"] < pages * 0.05, "the outer block goes on"
    assert found["behind"] > pages * 0.9


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is asked")
def test_thresholds_of_the_user_stay() -> None:
    found = faults(MALLOC_MMAP_THRESHOLD_="1048576")
    assert found["inside"] > 64 * 256 * 0.9


def test_a_system_without_mallopt_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: Any) -> Any:
        raise OSError("no such library")

    monkeypatch.setattr(dure.allocator.ctypes, "CDLL", nothing)
    with memory_kept():
        pass


def test_an_error_inside_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(dure.allocator, "_set", lambda *values: asked.append(values))
    for name in dure.allocator._OWN:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(KeyError), memory_kept(), memory_kept():
        raise KeyError
    assert asked == [dure.allocator._KEPT, dure.allocator._USUAL]
