"""World of worker threads in a single process, which share memory without messages.

The program runs once, in the calling process; the system divides its work over the workers and
synchronises them. Each worker has a device: a core of the CPU, or a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from dure.arguments import at_least, check_ranges
from dure.contracts.world import Kind, RankContext, World
from dure.machine.cores import available_cores
from dure.machine.devices import default_devices, device_of
from dure.worlds.in_process import run_in_process
from dure.worlds.launcher_environment import refuse_under_torchrun

Value = TypeVar("Value")


@dataclass(frozen=True)
class Threads(World):
    """Worker threads of this process.

    Args:
        threads: Number of threads. None for a thread per named device; without named devices, a
            thread per CUDA device; without CUDA, a thread per core, at least two.
        devices: Device of each thread, such as ("cuda:0", "cuda:1"); the first also has the master.
            Fewer names than threads are used in turn. None for the CUDA devices in turn, or the CPU
            without CUDA devices.
    """

    threads: int | None = field(default=None, metadata=at_least(1))
    devices: tuple[str, ...] | None = None

    name: ClassVar[str] = "threads"
    kind: ClassVar[Kind] = "threads"

    def __post_init__(self) -> None:
        refuse_under_torchrun("a world of threads")
        check_ranges(self)
        given = self.devices
        if not given:
            given = default_devices(self.threads, available_cores())
        # Raises for wrong names now, before any work.
        for name in given:
            device_of(name)
        count = self.threads if self.threads is not None else len(given)
        if len(given) > count:
            raise ValueError(
                f"{len(given)} devices are too many for {count} threads: each thread uses one"
            )
        # Stored as resolved, so that the run folder has the values on this machine.
        object.__setattr__(self, "threads", count)
        # A device per thread, from any number of names.
        in_turn = tuple(given[worker % len(given)] for worker in range(count))
        object.__setattr__(self, "devices", in_turn)

    @property
    def workers(self) -> int:
        assert self.threads is not None
        return self.threads

    @property
    def computes_on(self) -> tuple[str, ...]:
        return self.devices or ()

    def describe(self) -> str:
        assert self.devices is not None
        count = "1 thread" if self.workers == 1 else f"{self.workers} threads"
        used = Counter(self.devices)
        return count if set(used) == {"cpu"} else f"{count} on {', '.join(used)}"

    def run(
        self, program: Callable[[RankContext], Value], report: Callable[[dict[str, Any]], None]
    ) -> Value:
        assert self.devices is not None
        devices = tuple(map(device_of, self.devices))
        return run_in_process(
            program, report, "master", kind=self.kind, devices=devices, is_worker=False
        )
