"""A process that has torch loaded and forks ranks, which start in milliseconds instead of seconds.

A fresh interpreter needs 2 s to import torch; forking the user's own process is fast but unsafe,
for its OpenMP and autograd threads do not survive a fork. So one clean process imports torch,
computes nothing, and forks on demand (`dure.worlds.processes.fork_child`). It lives as long as its
parent: when the parent is gone, by whatever death, the server sees its socket closed, kills the
ranks that it has forked, and ends. The kernel kills the ranks should the server itself die
(PR_SET_PDEATHSIG).

Each message over a Unix socket gets one answer, a number:

    fork              with four descriptors (the rank's control socket, its parcel, stdout, stderr):
                      the rank's pid
    wait <pid>        once that rank has ended: its exit status, negative for a signal
    load <modules>    0, once they are imported, for all ranks to come
    remove <folder>   0; the folder is removed at the end, if it is still there
    ready             0, once the server has torch loaded
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

from dure.machine.memory import in_huge_pages
from dure.machine.streams import open_streams
from dure.worlds.processes.fork_child import ENDS

# `-c` looks into the current folder, where `dure` does not.
_START = """import sys
sys.path[:] = [place for place in sys.path if place]
from dure.worlds.processes.fork_child import serve
serve(int(sys.argv[1]), sys.argv[2:])"""
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
loaded. So are the models of transformers, and dure's own modules but for those that are kept
here (`ForkServer.keeps_here`)."""


class ForkServer:
    """The parent's side: starts the server process on first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = -1
        """The process that has started it: a fork of that one has no right to end it."""
        self._loaded: set[str] = set()
        self._first: dict[str, None] = {}
        self._preloaded: set[str] = set()
        self._kept: set[str] = set()

    def begins_with(self, *modules: str) -> None:
        """A server that starts from now on imports these at once, while this process goes on.

        For what nearly all ranks need. No module may start threads when it is imported.
        """
        self._first.update(dict.fromkeys(modules))

    def preload(self, *modules: str) -> None:
        """Ranks to come find these modules imported, once this process has imported them.

        The server imports them: they must not start threads.
        """
        self._preloaded.update(modules)

    def keeps_here(self, *modules: str) -> None:
        """Ranks need nothing of these modules of dure, nor of what lies in them."""
        self._kept.update(modules)

    def _for_ranks(self, name: str) -> bool:
        """Whether a module that this process has imported is imported once for all ranks."""
        if name.startswith("dure."):
            return not any(name == kept or name.startswith(f"{kept}.") for kept in self._kept)
        return (
            name in self._preloaded
            or name in LONG_TO_IMPORT
            or (name.startswith("transformers.models.") and ".modeling_" in name)
        )

    @property
    def pid(self) -> int | None:
        """The server's process, if it runs."""
        return self._process.pid if self._process is not None else None

    def start(self, imports: Sequence[str] = ()) -> None:
        """Starts the server if it does not run yet; it gets ready while the caller goes on.

        imports: what it then imports as well. One that runs does so when the first rank needs it.
        """
        with self._lock:
            self._connected(imports)

    def _connected(self, imports: Sequence[str] = ()) -> socket.socket:
        """The socket of a server that lives, which is started if need be."""
        alive = (
            self._process is not None
            and self._owner == os.getpid()
            and self._process.poll() is None
        )
        if self._socket is not None and alive:
            return self._socket
        open_streams()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = self._started(theirs.fileno(), imports)
        self._socket = ours
        self._owner = os.getpid()
        self._loaded = set()
        return ours

    def _started(self, descriptor: int, imports: Sequence[str]) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            # sys.path as it is here: a rank must import what the user's process can.
            "PYTHONPATH": os.pathsep.join(place or os.getcwd() for place in sys.path),
            # OpenBLAS starts its threads when it is imported, and no thread survives a fork.
            "OPENBLAS_NUM_THREADS": "1",
        }
        in_huge_pages(environment)
        # The child inherits the mask: it begins with these blocked, until it ignores them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
        try:
            return subprocess.Popen(
                [sys.executable, *_flags(), "-c", _START, str(descriptor), *self._first, *imports],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def ready(self) -> None:
        """Starts the server if need be and waits until it has torch loaded."""
        self._ask(b"ready")

    def _load(self) -> None:
        """Has the server import what this process has imported by now and ranks will need."""
        here = list(sys.modules)  # another thread may be importing
        new = [name for name in here if name not in self._loaded and self._for_ranks(name)]
        for start in range(0, len(new), _NAMES):
            self._ask(f"load {' '.join(new[start : start + _NAMES])}".encode())
        self._loaded.update(new)

    def fork(self, control: int, parcel: int) -> int:
        """A new rank; its pid.

        control: the socket through which it talks. parcel: the file that holds its program.
        """
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
        """Sends a message; its answer. A server that was killed is replaced by a new one.

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
                except BaseException:
                    # Ctrl-C: an answer that comes late must not be taken for that of the next.
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


def _flags() -> list[str]:
    """Those of this interpreter that change what a program does, such as -O, which drops asserts.

    Not those that isolate it from its surroundings, which ranks get from here.
    """
    optimise = ["-" + "O" * sys.flags.optimize] if sys.flags.optimize else []
    modes = [f"-X{name}" for name in ("dev", "utf8") if name in sys._xoptions]
    return [*optimise, *(["-B"] if sys.flags.dont_write_bytecode else []), *modes]


server = ForkServer()
"""One server for all worlds of this process."""
