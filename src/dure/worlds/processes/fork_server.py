"""A process that has torch loaded and forks ranks: a rank starts in milliseconds instead of
seconds.

A fresh interpreter needs 2 s to import torch; forking the user's own process is fast but unsafe,
for its OpenMP and autograd threads do not survive a fork. So one clean process imports torch,
computes nothing, and forks on demand. It lives as long as its parent: when the parent is gone, by
whatever death, the server sees its socket closed, kills the ranks it has forked, and ends; the
kernel kills the ranks should the server itself die (PR_SET_PDEATHSIG).

Messages over a Unix socket: `fork` with four descriptors (the rank's control socket, its parcel,
stdout, stderr) answers the pid; `ready` answers 0 once torch is loaded; `load <modules>` imports
them, for all ranks to come; `wait <pid>` waits for that child and answers its exit status, negative
for a signal; `remove <folder>` has it removed at the end, if it is there still.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

_START = """import sys
sys.path[:] = [place for place in sys.path if place]  # `-c` looks into the current folder, where `dure` does not
from dure.worlds.processes.fork_server import serve
serve(int(sys.argv[1]))"""
_ENDS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
_LONGEST_MESSAGE = 8_192
_NAMES = 40
"""Modules in a message."""

LONG_TO_IMPORT = (
    "torch.export._trace",
    "torch._export.non_strict_utils",
    "torch._dynamo.functional_export",
    "torch.distributed.tensor",
    "transformers.modeling_utils",
)
"""Modules that take seconds to import: once the parent has needed one, its ranks will, and find it
loaded. So are the models of transformers, and dure's own modules but those that no rank needs."""

NOT_FOR_RANKS = ("dure.cli", "dure.run.compare", "dure.report", "dure.bench")


def open_streams() -> None:
    """Descriptors 0, 1 and 2 that are closed become /dev/null, lest a file or a socket of ours be
    taken for one."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)


def for_ranks(name: str) -> bool:
    """Whether a module that the parent has imported is imported once for all ranks."""
    if name.startswith("dure."):
        return not name.startswith(NOT_FOR_RANKS)
    return name in LONG_TO_IMPORT or (
        name.startswith("transformers.models.") and ".modeling_" in name
    )


class ForkServer:
    """The parent's side: starts the server process on first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = -1
        self._loaded: set[str] = set()
        self._preloaded: set[str] = set()

    @property
    def pid(self) -> int | None:
        """The server's process, if it runs."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Starts the server if it does not run yet; it gets ready while the caller goes on."""
        with self._lock:
            self._connected()

    def _connected(self) -> socket.socket:
        alive = (
            self._process is not None
            and self._owner == os.getpid()
            and self._process.poll() is None
        )
        if self._socket is not None and alive:
            return self._socket
        open_streams()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # sys.path as it is here; a rank must import what the user's process can
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(place or os.getcwd() for place in sys.path),
            "OPENBLAS_NUM_THREADS": "1",
        }
        before = signal.pthread_sigmask(
            signal.SIG_BLOCK, _ENDS
        )  # it begins with these blocked, until it ignores them
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._socket, self._owner, self._loaded = ours, os.getpid(), set()
        return ours

    def ready(self) -> None:
        """Starts the server if need be and waits until it has torch loaded."""
        self._ask(b"ready")

    def preload(self, *modules: str) -> None:
        """Ranks to come find these modules imported, once this process has imported them.

        The server imports them: they must not start threads.
        """
        self._preloaded.update(modules)

    def _load(self) -> None:
        """Has the server import what this process has imported by now and ranks will need."""
        here = list(sys.modules)  # another thread may be importing
        names = [name for name in here if name in self._preloaded or for_ranks(name)]
        new = [name for name in names if name not in self._loaded]
        for start in range(0, len(new), _NAMES):
            self._ask(f"load {' '.join(new[start : start + _NAMES])}".encode())
        self._loaded.update(new)

    def fork(self, control: int, parcel: int) -> int:
        """A new rank, which talks through the socket `control` and works on what `parcel` holds;
        its pid."""
        self._load()
        open_streams()
        pid = self._ask(b"fork", [control, parcel, 1, 2])
        if pid <= 0:
            raise RuntimeError(f"the fork server answered {pid} for a process")
        return pid

    def removes(self, folder: str) -> None:
        """Has the server remove a folder that this process may not live to remove."""
        self._ask(b"remove " + os.fsencode(folder))

    def wait(self, pid: int) -> int:
        """Waits for the child to end; its exit status, negative for the signal that killed it."""
        return self._ask(f"wait {pid}".encode())

    def _ask(self, message: bytes, descriptors: Sequence[int] = ()) -> int:
        """Sends a message, answers the answer. A server that was killed is replaced by a new one.

        A rank of the killed one died with it: of that the new server knows nothing, and answers
        SIGKILL.
        """
        with self._lock:
            for _ in range(2):
                connection = self._connected()
                try:
                    socket.send_fds(connection, [message], descriptors)
                    answer = connection.recv(64)
                    if answer:
                        return int(answer)
                except OSError:
                    pass
                except (
                    BaseException
                ):  # Ctrl-C: an answer that comes late must not be taken for that of the next
                    self._abandon()
                    raise
                self._abandon()
        raise RuntimeError("the fork server does not start: see its error above")

    def _abandon(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
        self._socket = self._process = None

    def stop(self) -> None:
        """Ends the server and waits for it."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()
            if self._process is not None and self._owner == os.getpid():
                self._process.wait()
            self._socket = self._process = None


def serve(descriptor: int) -> None:
    """The server's loop: ends when the parent's end of the socket is closed."""
    open_streams()
    for (
        end
    ) in _ENDS:  # Ctrl-C is the parent's to handle, and what ends a group: this clears up behind it
        signal.signal(end, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS)
    from dure.worlds.processes.rank import (  # brings torch in, once for all ranks
        load_everything,
        rank_main,
    )

    load_everything()
    connection = socket.socket(fileno=descriptor)
    children: set[int] = set()
    folders: set[str] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, _LONGEST_MESSAGE, 4)
        if not message:
            break
        if message == b"fork":
            pid = os.fork()
            if pid == 0:
                connection.close()
                _become_rank(descriptors, rank_main)
            children.add(pid)
            for each in descriptors:
                os.close(each)
            answer = pid
        elif message == b"ready":
            answer = 0
        elif message.startswith(b"load "):
            for name in message.decode().split()[1:]:
                with contextlib.suppress(
                    Exception
                ):  # a rank that needs it says better what is wrong
                    importlib.import_module(name)
            answer = 0
        elif message.startswith(b"remove "):
            folders.add(os.fsdecode(message.removeprefix(b"remove ")))
            answer = 0
        else:
            answer = _wait(int(message.split()[1]), children)
        with contextlib.suppress(OSError):
            connection.send(str(answer).encode())
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(pid: int, children: set[int]) -> int:
    children.discard(pid)
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:
        return -signal.SIGKILL
    return os.waitstatus_to_exitcode(status)


def _become_rank(descriptors: list[int], rank_main: Callable[[int, int], None]) -> NoReturn:
    """In the child: runs the rank and leaves without the interpreter's teardown, in which gloo may
    abort."""
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        control, parcel, stdout, stderr = descriptors
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.close(stdout)
        os.close(stderr)
        rank_main(control, parcel)
        status = 0
    finally:
        try:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
        finally:
            os._exit(status)


server = ForkServer()
"""One server for all worlds of this process."""
