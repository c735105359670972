"""Nothing is left of a group: no memory, no descriptor, no process, however its ranks end."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import cloudpickle
import pytest
import thread_ranks
import torch
import torch.distributed as dist
from thread_ranks import Core, groups, on_both_cores, on_every

import dure
from dure.collectives.shared_memory import Options, empty_shared
from dure.contracts.world import RankContext
from dure.errors import DureError

for module in (sys.modules[__name__], thread_ranks):
    cloudpickle.register_pickle_by_value(module)  # a rank need not import pytest

Deed = Callable[[int], object]


def memory_files(process: str = "self") -> set[int]:
    """The inodes of the anonymous files of dure that a process holds open or has mapped."""
    found: set[int] = set()
    with suppress(OSError):
        for line in Path(f"/proc/{process}/maps").read_text().splitlines():
            if "/memfd:dure-" in line:
                found.add(int(line.split()[4]))
    with suppress(OSError):
        for path in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(path).startswith("/memfd:dure-"):
                    found.add(path.stat().st_ino)
    return found


def held_by_anybody(inodes: set[int]) -> dict[str, set[int]]:
    """Which processes of this machine hold any of the files."""
    processes = [path.name for path in Path("/proc").iterdir() if path.name.isdigit()]
    return {process: held for process in processes if (held := memory_files(process) & inodes)}


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)


DEEDS: dict[str, Deed] = {
    "all are killed": lambda rank: kill(os.getpid()),
    "all but the first are killed": lambda rank: rank == 0 or kill(os.getpid()),
    "the first is killed": lambda rank: rank != 0 or kill(os.getpid()),
    "all exit without a word": lambda rank: os._exit(0),
    "all end as they should": lambda rank: None,
}


@on_both_cores
@pytest.mark.parametrize("deed", DEEDS)
def test_no_memory_outlives_the_ranks(core: Core, deed: str, tmp_path: Path) -> None:
    before = {name for name in os.listdir("/dev/shm") if "dure" in name}
    meet = DEEDS[deed]

    def program(context: RankContext) -> None:
        rank = dist.get_rank()
        group = dist.new_group(
            backend="dure", timeout=timedelta(seconds=20), pg_options=Options(core=core)
        )
        tensor = empty_shared(100_000).fill_(1)
        dist.all_reduce(tensor, group=group)
        (tmp_path / str(rank)).write_text(" ".join(map(str, memory_files())))
        dist.barrier()  # all have written
        meet(rank)
        dist.all_reduce(tensor, group=group)
        dist.destroy_process_group(group)

    with suppress(DureError):
        dure.Processes(3, 20, "gloo").run(program, lambda event: None)
    inodes = {int(word) for path in tmp_path.iterdir() for word in path.read_text().split()}
    assert len(list(tmp_path.iterdir())) == 3
    assert len(inodes) >= 4, "a segment and three pools"
    assert held_by_anybody(inodes) == {}
    assert {name for name in os.listdir("/dev/shm") if "dure" in name} == before


@on_both_cores
def test_a_process_that_lives_on_keeps_nothing_of_a_group_but_its_pool(core: Core) -> None:
    def descriptors() -> Iterator[str]:
        for path in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                yield os.readlink(path)

    def cycle() -> tuple[int, set[int], list[str]]:
        with groups(3, core) as ranks:
            on_every(ranks, lambda group: group.all_reduce(torch.ones(10)))
            on_every(
                ranks, lambda group: group.send([torch.ones(1)], (group.rank() + 1) % 3).wait()
            )
        del ranks
        gc.collect()
        links = sorted(descriptors())
        return len(links), memory_files(), links

    first = cycle()
    for _ in range(3):
        again = cycle()
        assert again[0] == first[0], sorted(set(again[2]) - set(first[2]))
        assert again[1] == first[1]
    assert not [link for link in again[2] if "dure-group" in link]
