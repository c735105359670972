"""World of ranks started by torchrun: `torchrun --nnodes … -m dure train …`.

Every rank, on one machine or many, runs the same command; rank 0 writes the run folder and shows
progress. dure has no supervisor here: the ranks detect a lost rank by themselves
(`dure.collectives.roll_call`), and torchrun ends the job or restarts it with the remaining ranks. A
job that may be restarted is elastic: its run resumes from the newest checkpoint in the folder
(`dure.train`), whichever process is rank 0.

torchrun sends SIGTERM to a rank when another machine joins or this machine leaves. Whichever rank
gets the signal, all ranks end after the same step and rank 0 writes a checkpoint, so no work is
lost.
"""

from __future__ import annotations

import contextlib
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
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from dure.collectives.group import Group
from dure.collectives.roll_call import RollCall, RollCallAnswer, transfer_seconds
from dure.contracts.world import Kind, RankContext, World
from dure.errors import DureError, first_line, text_of
from dure.machine.cores import threads_per_rank
from dure.machine.devices import AUTO, devices_of_ranks, is_cpu
from dure.machine.threads import threads
from dure.record.meter import Meter
from dure.record.trace import Trace
from dure.worlds.backend import Backend, check_backend, check_deadline, join_device_group
from dure.worlds.interrupts import on_interrupt
from dure.worlds.launcher_environment import UNSET, LauncherJob, launcher_job
from dure.worlds.torchrun.session import session

Value = TypeVar("Value")

ASK_SECONDS = 0.2
"""Seconds between two checks by rank 0 whether another rank was asked to end."""

TERM_SECONDS = 5.0
"""Seconds that a rank waits for its own signal, after the run has ended for another rank's.

torchrun's agents check for joining machines once per second; a rank that ends before its agent's
check would count as failed.
"""


@dataclass(frozen=True)
class Torchrun(World):
    """Ranks of a torchrun job.

    Args:
        deadline: Seconds that a rank waits for a silent peer.
        backend: Transport: "gloo" through sockets, "dure" through memory shared by the ranks of a
            machine.
        elastic: Whether a run whose folder exists resumes from its newest checkpoint, if it is the
            same run. None for True if torchrun may restart the ranks: `torchrun --max-restarts`
            above 0.
        device: Devices of the ranks, as in `dure.Processes`: of a type such as "cuda" each rank has
            the device of its LOCAL_RANK.
    """

    deadline: float = 60.0
    backend: Backend = "dure"
    elastic: bool | None = None
    device: str = "cpu"

    name: ClassVar[str] = "torchrun"
    kind: ClassVar[Kind] = "ranks"

    def __post_init__(self) -> None:
        job = launcher_job()
        check_backend(self.backend)
        check_deadline(self.deadline)
        if self.elastic is None:
            object.__setattr__(self, "elastic", job.restarts > 0)
        if self.device == AUTO:
            object.__setattr__(self, "device", self._devices()[0].type)
        self._devices()

    def _devices(self) -> tuple[torch.device, ...]:
        """Return the devices of this machine's ranks. Raises ValueError if they are not here."""
        job = launcher_job()
        return devices_of_ranks(self.device, max(job.here, job.local_rank + 1))

    @property
    def device_here(self) -> torch.device:
        """Device on which this rank computes."""
        return self._devices()[launcher_job().local_rank]

    @property
    def computes_on(self) -> tuple[str, ...]:
        return tuple(map(str, self._devices()))

    @property
    def is_leader(self) -> bool:
        return launcher_job().rank == 0

    @property
    def rank_here(self) -> int:
        return launcher_job().rank

    @property
    def workers(self) -> int:
        return launcher_job().size

    @property
    def starts_again(self) -> bool:
        return bool(self.elastic)

    def describe(self) -> str:
        count = f"torchrun, {self.workers} rank{'s' if self.workers > 1 else ''}"
        return count if self.device == "cpu" else f"{count} on {self.device}"

    def run(
        self, program: Callable[[RankContext], Value], report: Callable[[dict[str, Any]], None]
    ) -> Value:
        with threads(threads_per_rank(launcher_job().here)):
            return self._run(program, report)

    def _run(
        self, program: Callable[[RankContext], Value], report: Callable[[dict[str, Any]], None]
    ) -> Value:
        limit = timedelta(seconds=self.deadline)
        store, rank, size = _met(launcher_job(), limit)
        store = session(PrefixStore("dure", store), rank, size, self.deadline)
        dist.init_process_group(
            self.backend,
            store=PrefixStore(self.backend, store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=transfer_seconds(self.deadline)),
        )
        roll_call = RollCall(PrefixStore("roll call", store), rank, size, self.deadline)
        trace = Trace()
        end = StopRequest(store)
        group = Group(dist.group.WORLD, Meter(f"rank {rank}", trace), roll_call.diagnose)
        device = self.device_here
        shared = self._is_shared(group)
        joined = join_device_group(device, shared, transfer_seconds(self.deadline))
        if joined is not None:
            group = Group(dist.group.WORLD, group.meter, roll_call.diagnose, joined)
        context = RankContext(
            group,
            trace,
            report,
            end.heard,
            clock_offset=clock_offset(group),
            devices=(device,),
        )
        context.deadline = self.deadline
        with on_interrupt(end.ask, (signal.SIGINT, signal.SIGTERM)):
            try:
                value = program(context)
            except BaseException as error:
                roll_call.answer(RollCallAnswer(failed=text_of(error)))
                if isinstance(error, DureError):  # the job may continue with another run
                    dist.destroy_process_group()
                raise
            dist.barrier()
            if self.elastic:
                end.let_torchrun_see()
        dist.destroy_process_group()
        return value

    def _is_shared(self, group: Group) -> bool:
        """Return whether ranks of any machine share a device; all ranks call it together.

        Raises DureError, on all ranks, if some compute on the CPU and some do not.
        """
        devices = self._devices()
        mine = [float(is_cpu(self.device_here)), float(len(set(devices)) < len(devices))]
        rows = group.all_gather_values(mine, "comparison of the devices")
        on_cpu = [str(rank) for rank, (is_on_cpu, _) in enumerate(rows) if is_on_cpu]
        if 0 < len(on_cpu) < len(rows):
            raise DureError(
                f"rank {', '.join(on_cpu)} computes on the CPU, but the other ranks have devices: "
                "give all machines the same --device, and none of them auto"
            )
        return any(is_shared for _, is_shared in rows)


def _met(job: LauncherJob, limit: timedelta) -> tuple[Store, int, int]:
    """Return the rendezvous store, the rank of this process, and the number of ranks.

    Raises DureError, which names the launcher's variables, if the rendezvous fails.
    """
    try:
        # The iterator yields once per rendezvous: here, once.
        store, rank, size = next(iter(rendezvous("env://", timeout=limit)))
    # Error types differ between versions of torch, and include errors of name resolution.
    except (RuntimeError, OSError, ValueError) as error:
        raise DureError(
            f"the ranks did not meet within {limit.total_seconds():g} s ({first_line(error)}): "
            f"RANK={job.rank}, WORLD_SIZE={job.size}, MASTER_ADDR={job.address} and "
            f"MASTER_PORT={job.port} make this process one of several. If it is not: {UNSET}"
        ) from error
    store.set_timeout(limit)
    return store, rank, size


class StopRequest:
    """Request that the run end after its current step.

    Any rank may be asked; rank 0 reads the request and decides for all.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.asked = False
        self._heard = False
        self._looked = time.monotonic()

    def ask(self) -> None:
        """Record that this rank was asked, by Ctrl-C or by torchrun."""
        self.asked = True
        with contextlib.suppress(RuntimeError):  # the process with the store may have ended
            self.store.set("end", "")

    def heard(self) -> bool:
        """Return on rank 0 whether any rank was asked."""
        if not self.asked and not self._heard and time.monotonic() - self._looked > ASK_SECONDS:
            self._looked = time.monotonic()
            self._heard = self._somebody_was()
        return self.asked or self._heard

    def _somebody_was(self) -> bool:
        try:
            return self.store.check(["end"])
        except RuntimeError:
            return False

    def let_torchrun_see(self) -> None:
        """Wait after the run for this rank's own signal, if another rank was asked to end."""
        if not self._heard and not self._somebody_was():
            return
        until = time.monotonic() + TERM_SECONDS
        while not self.asked and time.monotonic() < until:
            time.sleep(0.02)


def clock_offset(group: Group, pings: int = 5) -> float:
    """Return the seconds to add to this machine's `time.perf_counter` to get rank 0's.

    Zero if both ranks run on the same machine, which has a single clock. Otherwise the one-way
    delay is estimated as half the round trip of the fastest of `pings` pings (Cristian 1989).
    """
    machines = [value for (value,) in group.all_gather_values([_machine(group.rank)])]
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


def _machine(rank: int) -> float:
    """Return a number that is the same on all ranks of a machine.

    The number has the first 48 bits of the kernel's boot id, exact in a float. Without a boot id
    every rank counts as a machine.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    return float(int(boot.read_text().replace("-", "")[:12], 16)) if boot.exists() else float(rank)


def _ping() -> tuple[float, float]:
    """Return (round trip, offset) in seconds of an exchange with rank 0."""
    answer = torch.zeros(1, dtype=torch.float64)
    started = time.perf_counter()
    dist.send(answer, 0)
    dist.recv(answer, 0)
    ended = time.perf_counter()
    return ended - started, float(answer) - (started + ended) / 2
