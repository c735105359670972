"""The ranks that torchrun has started, on one machine or many: `torchrun --nnodes … -m dure train …`.

Every rank runs the same command; rank 0 writes the run folder and shows progress. There is no supervisor of ours:
when a rank is lost the others find out by themselves (`dure.worlds.roll_call`) and torchrun ends the job.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from dure.collectives.group import Group
from dure.record.meter import Meter
from dure.record.trace import Trace
from dure.strategy import Kind, Place
from dure.worlds.backend import Backend, check_backend, register_backend
from dure.worlds.cores import threads_per_rank
from dure.worlds.here import under_torchrun
from dure.worlds.interrupts import on_interrupt
from dure.worlds.roll_call import Answer, RollCall, transfer_seconds

Value = TypeVar("Value")


@dataclass(frozen=True)
class Torchrun:
    """The ranks of a torchrun job.

    deadline: seconds that a rank waits for a silent peer.
    backend: what carries the bytes: "gloo" through sockets, "dure" through the memory that ranks of one machine share.
    """

    deadline: float = 60.0
    backend: Backend = "dure"

    name: ClassVar[str] = "torchrun"
    kind: ClassVar[Kind] = "ranks"

    def __post_init__(self) -> None:
        if not under_torchrun():
            raise ValueError(
                "this process was not started by torchrun: use `torchrun --nproc-per-node 2 -m dure train …`"
            )
        check_backend(self.backend)

    @property
    def leads(self) -> bool:
        return int(os.environ["RANK"]) == 0

    @property
    def workers(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def describe(self) -> str:
        return f"torchrun, {self.workers} ranks"

    def run(self, program: Callable[[Place], Value], report: Callable[[dict[str, Any]], None]) -> Value:
        torch.set_num_threads(threads_per_rank(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        limit = timedelta(seconds=self.deadline)
        store, rank, size = next(iter(rendezvous("env://", timeout=limit)))
        store.set_timeout(limit)
        store = PrefixStore(f"run {store.add(f'runs of {rank}', 1)}", store)  # keys of an earlier run in this job stand
        register_backend(self.backend)
        dist.init_process_group(
            self.backend,
            store=PrefixStore("dure", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=transfer_seconds(self.deadline)),
        )
        roll_call = RollCall(PrefixStore("roll call", store), rank, size, self.deadline)
        trace = Trace()
        asked: list[bool] = []
        group = Group(dist.group.WORLD, Meter(f"rank {rank}", trace), roll_call.diagnose)
        place = Place(group, trace, report, lambda: bool(asked), clock_offset=clock_offset(group))
        try:
            with on_interrupt(lambda: asked.append(True), (signal.SIGINT, signal.SIGTERM)):
                value = program(place)
        except BaseException as error:
            roll_call.answer(Answer(failed=str(error)))
            raise
        dist.barrier()
        dist.destroy_process_group()
        return value


def clock_offset(group: Group, pings: int = 5) -> float:
    """Seconds to add to this machine's `time.perf_counter` to get rank 0's.

    Zero where both run on one machine, which shares the clock. Otherwise half the round trip of the fastest of a
    few pings is taken for the way (Cristian 1989).
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    mine = float(int(boot.read_text().replace("-", "")[:12], 16)) if boot.exists() else float(group.rank)
    machines = [value for (value,) in group.all_gather_values([mine])]
    offset = 0.0
    for rank in range(1, group.size):
        if machines[rank] == machines[0]:
            continue
        if group.rank == 0:
            for _ in range(pings):
                message = torch.zeros(1, dtype=torch.float64)
                dist.recv(message, rank)
                dist.send(torch.tensor([time.perf_counter()], dtype=torch.float64), rank)
        elif group.rank == rank:
            offset = min(_ping() for _ in range(pings))[1]
    return offset


def _ping() -> tuple[float, float]:
    """(round trip, offset) of one exchange with rank 0."""
    answer = torch.zeros(1, dtype=torch.float64)
    started = time.perf_counter()
    dist.send(answer, 0)
    dist.recv(answer, 0)
    ended = time.perf_counter()
    return ended - started, float(answer) - (started + ended) / 2
