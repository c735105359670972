"""What a step has freed is there for the next one, without faults: in a run, and on its ranks."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import dure
import dure.machine.memory
from dure.collectives.group import Group
from dure.contracts.world import RankContext
from dure.machine.memory import available_memory, keep_freed_memory, return_freed_memory
from dure.protocol.server_context import ServerContext
from dure.run import drive

glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only the malloc of the GNU C library is asked"
)

SCRIPT = """
import json, resource, threading, torch
from dure.machine.memory import available_memory, keep_freed_memory
from dure.run import drive
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
with keep_freed_memory():
    with keep_freed_memory():
        found["inside"] = faults()
    found["still inside"] = faults()
print(json.dumps(found))
"""

RANKS = """
import json, resource, torch, dure
from dure.contracts.world import RankContext

def faults(place: RankContext) -> int:
    for turn in range(30):
        if turn == 20:  # the heap has its final size
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [torch.ones(2**20) for _ in range(5)]  # 4 MiB each
        del blocks
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10

def on_ranks():
    return dure.Processes(2).run(faults, lambda event: None)

"""
"""`on_ranks` gives the page faults of a turn on rank 0."""

PAGES_OF_A_TURN = 5 * 1024


def run(script: str, **environment: str) -> Any:
    """What the script prints."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@glibc
def test_what_a_step_has_freed_is_there_for_the_next() -> None:
    found = run(SCRIPT)
    pages = 100 * 256
    assert found["inside"] < pages * 0.1
    assert found["still inside"] < pages * 0.1, "the outer block goes on"


@glibc
def test_thresholds_of_the_user_stay() -> None:
    found = run(SCRIPT, MALLOC_MMAP_THRESHOLD_="262144")
    assert found["inside"] > 100 * 256 * 0.5


@glibc
def test_memory_that_is_used_again_stays_with_the_rank() -> None:
    assert run(RANKS + "print(on_ranks())") < PAGES_OF_A_TURN * 0.1


@glibc
def test_thresholds_of_the_user_stay_in_ranks() -> None:
    own = {"MALLOC_MMAP_THRESHOLD_": "262144", "THP_MEM_ALLOC_ENABLE": "0"}
    assert run(RANKS + "print(on_ranks())", **own) > PAGES_OF_A_TURN * 0.5


ADVISED = """
import re, sys, torch, dure
from pathlib import Path

def flags(place):
    \"\"\"Those of the mapping in which a large tensor lies.\"\"\"
    large = torch.ones(1 << 24)
    middle = large.data_ptr() + (1 << 25)
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        mapping = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if mapping:
            inside = int(mapping[1], 16) <= middle < int(mapping[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]

"""


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages here"
)
def test_large_tensors_of_ranks_ask_for_huge_pages_unless_the_user_does_not() -> None:
    found = ADVISED + "print(int('hg' in dure.Processes(2).run(flags, lambda event: None)))"
    assert run(found) == 1
    assert run(found, THP_MEM_ALLOC_ENABLE="0") == 0


def test_ranks_heed_what_their_parent_has_set_since_the_fork_server_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def blocks(context: RankContext) -> int:
        return len(dure.machine.memory._wanted)

    for name in dure.machine.memory._OWN:
        monkeypatch.delenv(name, raising=False)
    assert dure.Processes(2).run(blocks, lambda event: None) == 1
    monkeypatch.setenv("MALLOC_TOP_PAD_", "0")
    assert dure.Processes(2).run(blocks, lambda event: None) == 0


def test_a_system_without_mallopt_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: Any) -> Any:
        raise OSError("no such library")

    monkeypatch.setattr(dure.machine.memory.ctypes, "CDLL", nothing)
    with keep_freed_memory():
        pass


def test_an_error_inside_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(dure.machine.memory, "_set", lambda *values, **more: asked.append(values))
    for name in dure.machine.memory._OWN:
        monkeypatch.delenv(name, raising=False)
    kept, returned = dure.machine.memory._KEPT, dure.machine.memory._RETURNED
    with pytest.raises(KeyError), keep_freed_memory(), return_freed_memory():
        raise KeyError
    # The block inside has its own way, and the one around goes on as before.
    assert asked == [kept, returned, kept, dure.machine.memory._USUAL]


@pytest.mark.skipif(platform.system() != "Linux", reason="elsewhere nobody tells")
def test_memory_that_is_available_is_a_part_of_what_there_is() -> None:
    available = available_memory()
    assert available is not None
    assert 0 < available < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


SERVES = """
import json, torch
from dure.machine.memory import keep_freed_memory, return_freed_memory

def resident():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024

def left(way):
    with way():
        before = resident()
        blocks = [torch.ones(2**19) for _ in range(50)]  # two megabytes each
        small = [bytearray(200) for _ in range(50)]  # what comes later, and stays
        del blocks
        return resident() - before

print(json.dumps({"returned": left(return_freed_memory), "kept": left(keep_freed_memory)}))
"""


@glibc
def test_a_server_has_no_memory_that_it_has_freed() -> None:
    left = run(SERVES)
    assert left["returned"] < 5 << 20
    # Which the thresholds bring about, and not the sizes.
    assert left["kept"] > 90 << 20


@pytest.mark.parametrize(
    ("elsewhere", "strategy", "way"),
    [
        (False, dure.FedAvg, "keep_freed_memory"),
        (True, dure.FedAvg, "return_freed_memory"),
        # Its server trains the tail.
        (True, dure.SplitLearning, "keep_freed_memory"),
        (True, dure.SplitFed, "keep_freed_memory"),
    ],
)
def test_whether_memory_is_kept_follows_from_where_the_model_is_trained(
    monkeypatch: pytest.MonkeyPatch, elsewhere: bool, strategy: type[dure.Strategy], way: str
) -> None:
    seen: list[str] = []

    class EndedError(Exception):
        pass

    @contextlib.contextmanager
    def noted(name):
        seen.append(name)
        yield

    def ends(job, place):
        raise EndedError

    for name in ("keep_freed_memory", "return_freed_memory"):
        monkeypatch.setattr(drive, name, lambda name=name: noted(name))
    monkeypatch.setattr(drive, "_drive", ends)
    place = ServerContext(Group(), network=(lambda federation: None) if elsewhere else None)
    with pytest.raises(EndedError):
        drive.drive(types.SimpleNamespace(strategy=strategy()), place)
    assert seen == [way]
