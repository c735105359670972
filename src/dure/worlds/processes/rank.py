"""Process of a forked rank: join the job, run the program, and report to the parent.

The rank sends pickled (kind, content) pairs over the control socket: `event`, `result` (with the
descriptor of a parcel), `outlives`, `error`, `done`. The parent sends the `RankSettings` first,
then perhaps `interrupt`, `go on` or `stop` after an event with a record for callbacks, and finally
`end`. The rank exits when the parent sends `end` or has ended, so that no rank closes connections
that others still read from.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

import dure.collectives.shared_memory.backend  # noqa: F401 - so that the server has it, for all ranks
from dure.collectives.group import Group
from dure.collectives.roll_call import RollCall, RollCallAnswer, transfer_seconds
from dure.contracts.world import RankContext
from dure.errors import (
    DureError,
    StopRun,
    WorkerFailedError,
    can_be_pickled,
    described,
    text_of,
    traceback_of,
)
from dure.machine.compiler import deferred_compiler
from dure.machine.memory import keep_freed_memory
from dure.memory.mapped import WINDOW
from dure.record.meter import Meter
from dure.record.trace import Trace
from dure.worlds.backend import Backend, join_device_group
from dure.worlds.processes import parcel
from dure.worlds.processes.store import store_at

_LONGEST_MESSAGE = 60_000


@dataclass(frozen=True)
class RankSettings:
    """Settings of a rank in its job.

    Args:
        rank: Rank of the process.
        size: Number of ranks.
        store: Path of the store (`dure.worlds.processes.store`).
        deadline: Seconds until a silent peer is an error.
        threads: Number of threads of the rank.
        backend: Backend of torch.distributed.
        device: Device on which the rank computes.
        shares_device: Whether several ranks compute on the same device.
    """

    rank: int
    size: int
    store: str
    deadline: float
    threads: int
    backend: Backend = "dure"
    device: str = "cpu"
    shares_device: bool = False


class Control:
    """Rank's end of the control socket."""

    def __init__(self, descriptor: int) -> None:
        self.socket = socket.socket(fileno=descriptor)
        self._interrupted = False

    def seat(self) -> RankSettings:
        seat = pickle.loads(self.socket.recv(_LONGEST_MESSAGE))
        assert isinstance(seat, RankSettings)
        return seat

    def send(self, kind: str, content: Any = None, descriptors: tuple[int, ...] = ()) -> None:
        # Without a parent, nobody receives the message, and the fork server ends this rank.
        with contextlib.suppress(BrokenPipeError):
            socket.send_fds(self.socket, [pickle.dumps((kind, content))], list(descriptors))

    def event(self, content: dict[str, Any]) -> None:
        """Send an event to the parent. Raises StopRun if a callback in the parent ends the run.

        Waits for the parent's answer if the event has a record for callbacks.
        """
        self.send("event", content)
        if "record" not in content:
            return
        while True:
            answer = self.socket.recv(64)
            # A Ctrl-C may arrive first. A parent that has ended closes the socket.
            if answer == b"interrupt":
                self._interrupted = True
            elif answer == b"stop":
                raise StopRun
            else:
                return

    def interrupted(self) -> bool:
        """Return whether the parent has forwarded a Ctrl-C."""
        if not self._interrupted:
            with contextlib.suppress(BlockingIOError):
                self._interrupted = self.socket.recv(64, socket.MSG_DONTWAIT) == b"interrupt"
        return self._interrupted

    def wait_for_the_end(self) -> None:
        """Wait for "end", or for the end of the parent."""
        while self.socket.recv(64) == b"interrupt":
            pass


def rank_main(control_descriptor: int, parcel_descriptor: int) -> None:
    """Main function of a rank in a freshly forked process."""
    control = Control(control_descriptor)
    seat = control.seat()
    roll_call: RollCall | None = None
    place: RankContext | None = None
    try:
        torch.set_num_threads(seat.threads)
        roll_call = join(seat)
        _, settings, program = parcel.unpack(parcel_descriptor)
        # After the program's own files have run, which may have changed these settings.
        settings.apply()
        place = rank_context_of(seat, control, roll_call)
        # The program's environment is in force by now, including a user's settings of malloc.
        with deferred_compiler(), keep_freed_memory():
            result = program(place)
        if seat.rank == 0:
            control.send("result", None, (parcel.pack(result, memory=WINDOW),))
        control.send("done")
    except BaseException as error:
        step = place.group.step if place is not None else "the start"
        failure = as_dure_error(error, seat.rank, step)
        if roll_call is not None:
            roll_call.answer(RollCallAnswer(failed=text_of(failure)))
        control.send("error", failure)
        return
    control.wait_for_the_end()


class ProcessSettings:
    """Environment of a program: pickled in the parent, applied when unpickled in a rank.

    The environment precedes the program in a parcel, so that the program's imports are found.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return inherit, (os.getcwd(), list(sys.path), list(sys.argv), dict(os.environ), _umask())


def inherit(
    folder: str, path: list[str], arguments: list[str], environment: dict[str, str], umask: int
) -> None:
    """Apply the parent's folder, import path, arguments, environment variables and file mask."""
    os.chdir(folder)
    sys.path[:] = path
    sys.argv[:] = arguments
    # Variables that the parent has deleted are deleted here too.
    for name in os.environ.keys() - environment.keys() - {_INTERFACE}:
        del os.environ[name]
    os.environ.update(environment)
    os.environ[_INTERFACE] = "lo"
    time.tzset()
    os.umask(umask)


_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Variable that limits gloo to an interface.

Ranks of a machine communicate over the loopback interface only, whatever other programs of the user
set.
"""


def _umask() -> int:
    """Return the mask of new files; the system reveals it only by setting another mask."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def join(seat: RankSettings) -> RollCall:
    """Join torch.distributed; the store belongs to the parent and outlives every rank."""
    os.environ[_INTERFACE] = "lo"
    seconds = transfer_seconds(seat.deadline)
    limit = timedelta(seconds=seconds)
    store = store_at(seat.store, seconds)
    dist.init_process_group(
        seat.backend,
        store=PrefixStore(seat.backend, store),
        rank=seat.rank,
        world_size=seat.size,
        timeout=limit,
    )
    return RollCall(PrefixStore("roll call", store), seat.rank, seat.size, seat.deadline)


def rank_context_of(seat: RankSettings, control: Control, roll_call: RollCall) -> RankContext:
    trace = Trace()
    device = torch.device(seat.device)
    group = Group(
        dist.group.WORLD,
        Meter(f"rank {seat.rank}", trace),
        roll_call.diagnose,
        join_device_group(device, seat.shares_device, transfer_seconds(seat.deadline)),
    )
    context = RankContext(group, trace, control.event, control.interrupted, devices=(device,))
    context.survives_peer_loss = lambda: control.send("outlives")
    context.deadline = seat.deadline
    return context


def as_dure_error(error: BaseException, rank: int, step: str) -> DureError:
    """Return an error that fits in a message.

    dure's own errors stay as they are; other errors become their text, truncated if necessary.
    """
    if isinstance(error, WorkerFailedError):
        # The beginning of a reason and the end of a traceback are the most informative.
        most = _LONGEST_MESSAGE // 4
        return WorkerFailedError(
            error.who, error.step, error.reason[:most], error.traceback[-most:]
        )
    if isinstance(error, DureError):
        error.__cause__ = None  # may be of a class unknown to the parent
        if can_be_pickled(error):
            return error
    failure = WorkerFailedError(f"rank {rank}", step, described(error), traceback_of(error))
    return as_dure_error(failure, rank, step)
