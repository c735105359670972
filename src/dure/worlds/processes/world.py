"""World of processes on this machine, one per rank, joined by torch.distributed.

The ranks communicate through gloo over loopback, or through shared memory. A fork server with torch
loaded starts them (`dure.worlds.processes.fork_server`). The parent supervises the ranks: it
forwards Ctrl-C, reports the death of a rank to the others, and ends ranks that do not end by
themselves. A single rank runs in the calling process.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from dure.arguments import at_least, check_ranges
from dure.collectives.roll_call import RollCall
from dure.contracts.world import Kind, RankContext, World
from dure.errors import DureError, PeerLostError, StopRun, described
from dure.machine.cores import available_cores, threads_per_rank
from dure.machine.devices import AUTO, as_current, devices_of_ranks
from dure.machine.exit_status import exit_description
from dure.machine.global_settings import settings_here
from dure.worlds.backend import Backend, check_backend, check_deadline
from dure.worlds.in_process import run_in_process
from dure.worlds.interrupts import on_interrupt
from dure.worlds.launcher_environment import refuse_under_torchrun
from dure.worlds.processes import parcel
from dure.worlds.processes.fork_server import server
from dure.worlds.processes.rank import ProcessSettings, RankSettings
from dure.worlds.processes.store import store_at, temporary_store

Value = TypeVar("Value")

_LAST_SECONDS = 2.0
"""Seconds for the other ranks to end, after rank 0 has ended and may have lost some of them."""


@dataclass(frozen=True)
class Processes(World):
    """Ranks as processes of this machine.

    Args:
        ranks: Number of ranks; None for a rank per core, at least two.
        deadline: Seconds that a rank waits for a silent peer before it raises PeerLostError.
        backend: Transport: "gloo" through sockets, "dure" through shared memory.
        device: Devices of the ranks (`dure.machine.devices`): "cpu"; a type such as "cuda", for a
            device a rank; a device such as "cuda:0", which all ranks share; or "auto", for
            accelerators if there is one for each rank, and otherwise the CPU.
    """

    ranks: int | None = field(default=None, metadata=at_least(1))
    deadline: float = 60.0
    backend: Backend = "dure"
    device: str = "cpu"

    name: ClassVar[str] = "processes"
    kind: ClassVar[Kind] = "ranks"

    def __post_init__(self) -> None:
        refuse_under_torchrun("Processes")
        if self.ranks is None:
            object.__setattr__(self, "ranks", max(2, available_cores()))
        check_ranges(self)
        check_deadline(self.deadline)
        check_backend(self.backend)
        # Stored as resolved, so that the run folder has the choice on this machine.
        if self.device == AUTO:
            object.__setattr__(self, "device", self._devices()[0].type)
        self._devices()

    def _devices(self) -> tuple[torch.device, ...]:
        """Return the device of each rank. Raises ValueError if they are not here."""
        return devices_of_ranks(self.device, self.workers)

    @property
    def computes_on(self) -> tuple[str, ...]:
        return tuple(map(str, self._devices()))

    @property
    def workers(self) -> int:
        assert self.ranks is not None
        return self.ranks

    @property
    def elsewhere(self) -> bool:
        return self.workers > 1

    def begin(self, imports: Sequence[str] = ()) -> None:
        if self.elsewhere:
            server.start(imports)  # in the background

    def ready(self) -> None:
        if self.elsewhere:
            server.ready()

    def describe(self) -> str:
        count = "1 process" if self.workers == 1 else f"{self.workers} processes"
        return count if self.device == "cpu" else f"{count} on {self.device}"

    def run(
        self, program: Callable[[RankContext], Value], report: Callable[[dict[str, Any]], None]
    ) -> Value:
        if self.workers == 1:
            devices = self._devices()
            with as_current(devices[0]):
                return run_in_process(program, report, "rank 0", devices=devices)
        with temporary_store(server.removes) as path:
            return self._run(path, program, report)

    def _run(
        self,
        path: str,
        program: Callable[[RankContext], Value],
        report: Callable[[dict[str, Any]], None],
    ) -> Value:
        threads = threads_per_rank(self.workers)
        devices = self._devices()
        seats = [
            RankSettings(
                rank=rank,
                size=self.workers,
                store=path,
                deadline=self.deadline,
                threads=threads,
                backend=self.backend,
                device=str(devices[rank]),
                shares_device=len(set(devices)) < len(devices),
            )
            for rank in range(self.workers)
        ]
        store = PrefixStore("roll call", store_at(path, self.deadline))
        with started(seats, program) as members:
            roll_call = RollCall(store, -1, self.workers, self.deadline)
            supervisor = Supervisor(members, roll_call, report, self.deadline)
            with on_interrupt(members[0].interrupt):
                supervisor.watch()
            value: Value = supervisor.value()
            return value


@dataclass
class RankProcess:
    """Rank in the view of its parent."""

    rank: int
    pid: int
    control: socket.socket
    done: bool = False
    error: DureError | None = None
    death: str | None = None
    result: list[Any] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.done or self.error is not None or self.death is not None

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):
            self.control.send(b"interrupt")

    def end(self) -> str:
        """Kill the process if necessary, and describe how it ended."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
        return exit_description(server.wait(self.pid))


@contextmanager
def started(
    seats: list[RankSettings], program: Callable[[RankContext], Any]
) -> Iterator[list[RankProcess]]:
    """Context manager: start ranks that run `program`; end all of them with the block."""
    try:
        descriptor = parcel.pack((ProcessSettings(), settings_here(), program))
    except Exception as error:
        raise DureError(f"the task cannot be sent to its ranks: {described(error)}") from error
    members: list[RankProcess] = []
    try:
        for seat in seats:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                try:
                    pid = server.fork(theirs.fileno(), descriptor)
                except BaseException:
                    ours.close()
                    raise
            members.append(RankProcess(seat.rank, pid, ours))
            ours.send(pickle.dumps(seat))
            ours.setblocking(False)  # recv_fds of Python 3.11 does not pass on MSG_DONTWAIT
        yield members
    finally:
        os.close(descriptor)
        for member in members:
            with contextlib.suppress(OSError):
                member.control.send(b"end")  # a finished rank exits now by itself
            member.control.close()
        for member in members:
            if member.death is None:
                if not member.done:  # it may hang, and would never read the message
                    with contextlib.suppress(OSError):
                        os.kill(member.pid, signal.SIGKILL)
                server.wait(member.pid)


class Supervisor:
    """Supervisor of the ranks of a job until all of them have ended."""

    def __init__(
        self,
        members: list[RankProcess],
        roll_call: RollCall,
        report: Callable[[dict[str, Any]], None],
        deadline: float,
    ) -> None:
        self.members = members
        self.roll_call = roll_call
        self.report = report
        self.deadline = deadline
        self.failed_at: float | None = None
        self.done_at: float | None = None
        self.outlived = False
        """Whether the program survives the death of other ranks as long as rank 0 lives."""
        self.last_step = "the start"

    def watch(self) -> None:
        """Supervise until every rank is done, has failed, or was ended."""
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as opened:
            for member in self.members:
                selector.register(member.control, selectors.EVENT_READ, (member, "message"))
                if hasattr(os, "pidfd_open"):  # otherwise the end of the socket shows the death
                    death = os.pidfd_open(member.pid)
                    opened.callback(os.close, death)
                    selector.register(death, selectors.EVENT_READ, (member, "death"))
            while not all(member.ended for member in self.members):
                for key, _ in selector.select(timeout=0.2):
                    if not self._heard(*key.data):
                        selector.unregister(key.fileobj)
                if self._only_the_lost_are_left():
                    return

    def _heard(self, member: RankProcess, what: str) -> bool:
        """Process a message or the death of a rank; return False if no more can follow."""
        if what == "message" and self._take(member):
            return True
        # A dead rank may have sent messages before, which say more than its death.
        while what == "death" and self._take(member):
            pass
        self._died(member)
        return False

    def _only_the_lost_are_left(self) -> bool:
        """Return whether further waiting is useless.

        The other ranks have reported all running ranks as lost, or the timeout has passed.
        """
        if self.outlived and self.members[0].done:
            # A stopped rank that the others have dropped never ends by itself.
            self.done_at = self.done_at or time.monotonic()
            return time.monotonic() - self.done_at > _LAST_SECONDS
        if self.failed_at is None:
            return False
        named: set[int] = set()
        for member in self.members:
            if isinstance(member.error, PeerLostError):
                named |= set(member.error.ranks)
        running = {member.rank for member in self.members if not member.ended}
        return running <= named or time.monotonic() - self.failed_at > self.deadline

    def _take(self, member: RankProcess) -> bool:
        """Process a message of a rank; return False at the end of its stream."""
        try:
            message, descriptors, _, _ = socket.recv_fds(member.control, 1 << 18, 1)
        except (ConnectionResetError, BlockingIOError):
            # BlockingIOError: a child of a dead rank still has the socket open.
            return False
        if not message:
            return False
        kind, content = pickle.loads(message)
        if kind == "event":
            self._report(member, content)
        elif kind == "result":
            member.result.append(parcel.unpack(descriptors[0]))
            os.close(descriptors[0])
        elif kind == "outlives":
            self.outlived = True
        elif kind == "error":
            member.error = content
            self._note_failure()
        else:
            member.done = True
        return True

    def _report(self, member: RankProcess, event: dict[str, Any]) -> None:
        """Forward an event; a rank whose event has a record waits for the callbacks' answer."""
        if "unit" in event:
            self.last_step = f"{event['unit']} {event['step'] + 1}"
        answer = b"go on"
        try:
            self.report(event)
        except StopRun:
            # Only an event with a record may end the run this way.
            if "record" not in event:
                raise
            answer = b"stop"
        if "record" in event:
            with contextlib.suppress(OSError):  # it may have died meanwhile, which `watch` notices
                member.control.send(answer)

    def _died(self, member: RankProcess) -> None:
        if member.ended:
            return
        member.death = member.end()
        if self.outlived and member.rank != 0:
            return
        self.roll_call.died(member.rank, member.death)
        self._note_failure()

    def _note_failure(self) -> None:
        self.failed_at = self.failed_at or time.monotonic()

    def value(self) -> Any:
        """Return the result of rank 0, or raise the most informative error."""
        if self.outlived and self.members[0].done:
            return self.members[0].result[0]
        errors = [member.error for member in self.members if member.error is not None]
        own = [error for error in errors if not isinstance(error, PeerLostError)]
        if own:
            raise own[0]
        if self.outlived and isinstance(self.members[0].error, PeerLostError):
            raise self._with_deaths(self.members[0].error)
        dead = [member for member in self.members if member.death is not None]
        lost = [error for error in errors if isinstance(error, PeerLostError)]
        if dead:
            # Survivors know the operation during the death; without survivors, the last event has
            # the step.
            operation = lost[0].operation if lost else "the run"
            step = lost[0].step if lost else self.last_step
            reason = "; ".join(dict.fromkeys(str(member.death) for member in dead))
            raise PeerLostError(tuple(member.rank for member in dead), operation, step, reason)
        if lost:
            raise lost[0]
        return self.members[0].result[0]

    def _with_deaths(self, error: PeerLostError) -> PeerLostError:
        """Return rank 0's error about lost ranks, with the causes of their deaths."""
        deaths = [str(m.death) for m in self.members if m.rank in error.ranks and m.death]
        reason = "; ".join(dict.fromkeys([*deaths, error.reason]))
        return PeerLostError(error.ranks, error.operation, error.step, reason)
