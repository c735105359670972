"""One process with several workers, which are threads: they share memory, and nothing is sent.

The program runs once, in the calling process; what it divides over its workers, and when they meet,
is the system's to say. Each worker has a device: a core of the CPU, or a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from dure.contracts.strategy import Kind, Place, World
from dure.machine.cores import available_cores
from dure.machine.devices import device_of, devices_here
from dure.worlds.here import run_here
from dure.worlds.launched import refuse_under_torchrun

Value = TypeVar("Value")


@dataclass(frozen=True)
class Threads(World):
    """Worker threads of this process.

    threads: how many. None is one for each device that is named; where none is named, one for each
        CUDA device; without CUDA, one for each core and at least two.
    devices: where each of them computes, such as ("cuda:0", "cuda:1"); the first also holds the
        master. Fewer names than threads are taken in turn. None takes the CUDA devices in turn
        where there are any, and the CPU otherwise.
    """

    threads: int | None = None
    devices: tuple[str, ...] | None = None

    name: ClassVar[str] = "threads"
    kind: ClassVar[Kind] = "threads"

    def __post_init__(self) -> None:
        refuse_under_torchrun("a world of threads")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"{self.threads} threads are not a world: it takes at least one")
        given = self.devices
        if not given:
            given = devices_here(self.threads, available_cores())
        # Wrong names are told now, before any work.
        for name in given:
            device_of(name)
        count = self.threads if self.threads is not None else len(given)
        if len(given) > count:
            raise ValueError(
                f"{len(given)} devices are too many for {count} threads: each thread has one"
            )
        # Written as they are, so that a run folder says what None came to on this machine.
        object.__setattr__(self, "threads", count)
        # A device for each thread, however few were named.
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
        self, program: Callable[[Place], Value], report: Callable[[dict[str, Any]], None]
    ) -> Value:
        assert self.devices is not None
        devices = tuple(map(device_of, self.devices))
        return run_here(program, report, "master", kind=self.kind, devices=devices, is_worker=False)
