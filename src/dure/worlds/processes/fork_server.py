"""Fork server: a process with torch loaded that forks ranks in milliseconds instead of seconds.

A fresh interpreter needs 2 s to import torch; forking the user's own process is fast but unsafe,
because its OpenMP and autograd threads do not survive a fork. A clean process therefore imports
torch, computes nothing, and forks on demand (`dure.worlds.processes.fork_child`). It lives as long
as its parent: after any death of the parent, the server sees its socket closed, kills its ranks,
and ends. If the server itself dies, the kernel kills the ranks (PR_SET_PDEATHSIG).

Each message over a Unix socket gets a number as its answer:

    fork              with four descriptors (the rank's control socket, its parcel, stdout, stderr):
                      the rank's pid
    wait <pid>        once that rank has ended: its exit status, negative for a signal
    load <modules>    0, once they are imported, for all later ranks
    remove <folder>   0; the folder is removed at the end, if it still exists
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

from dure.machine.memory import enable_huge_pages
from dure.machine.streams import open_streams
from dure.worlds.processes.fork_child import ENDS

# `-c` searches the current folder, unlike the script `dure`.
_START = """import sys
sys.path[:] = [place for place in sys.path if place]
from dure.worlds.processes.fork_child import serve
serve(int(sys.argv[1]), sys.argv[2:])"""
_NAMES = 40
"""Maximum modules in a message."""

LONG_TO_IMPORT = (
    "torch.export._trace",
    "torch._export.non_strict_utils",
    "torch._dynamo.functional_export",
    "torch.distributed.tensor",
    "transformers.modeling_utils",
)
"""Modules that take seconds to import, loaded by the server once the parent has imported them.

The server also loads the models of transformers, and dure's own modules except those named to
`ForkServer.keeps_here`.
"""


class ForkServer:
    """Parent's side of the fork server; starts the server process on first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = -1
        """Process that has started the server: a fork of that process must not end the server."""
        self._loaded: set[str] = set()
        self._first: dict[str, None] = {}
        self._preloaded: set[str] = set()
        self._kept: set[str] = set()

    def import_at_start(self, *modules: str) -> None:
        """Have a server that starts later import these modules in the background.

        For modules that nearly all ranks need. No module may start threads at import.
        """
        self._first.update(dict.fromkeys(modules))

    def preload(self, *modules: str) -> None:
        """Have the server import these modules for later ranks, if this process imports them.

        The modules must not start threads at import.
        """
        self._preloaded.update(modules)

    def keeps_here(self, *modules: str) -> None:
        """Exclude these modules of dure, and their submodules, from the imports for ranks."""
        self._kept.update(modules)

    def _for_ranks(self, name: str) -> bool:
        """Return whether the server imports a module for all ranks once this process has it."""
        if name.startswith("dure."):
            return not any(name == kept or name.startswith(f"{kept}.") for kept in self._kept)
        return (
            name in self._preloaded
            or name in LONG_TO_IMPORT
            or (name.startswith("transformers.models.") and ".modeling_" in name)
        )

    @property
    def pid(self) -> int | None:
        """Process id of the server; None if it does not run."""
        return self._process.pid if self._process is not None else None

    def start(self, imports: Sequence[str] = ()) -> None:
        """Start the server if it does not run yet, without waiting for it.

        `imports` are further modules for a new server; a running server imports modules when a rank
        is forked.
        """
        with self._lock:
            self._connected(imports)

    def _connected(self, imports: Sequence[str] = ()) -> socket.socket:
        """Return the socket of a running server; start the server if necessary."""
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
            # The same sys.path as here: a rank must be able to import the modules of the user's
            # process.
            "PYTHONPATH": os.pathsep.join(place or os.getcwd() for place in sys.path),
            # OpenBLAS starts its threads at import, and no thread survives a fork.
            "OPENBLAS_NUM_THREADS": "1",
        }
        enable_huge_pages(environment)
        # The child inherits the mask: the signals stay blocked until it ignores them.
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
        """Start the server if necessary, and wait until it has loaded torch."""
        self._ask(b"ready")

    def _load(self) -> None:
        """Have the server import the modules that this process has imported and ranks need."""
        here = list(sys.modules)  # a copy: another thread may be importing
        new = [name for name in here if name not in self._loaded and self._for_ranks(name)]
        for start in range(0, len(new), _NAMES):
            self._ask(f"load {' '.join(new[start : start + _NAMES])}".encode())
        self._loaded.update(new)

    def fork(self, control: int, parcel: int) -> int:
        """Fork a new rank, and return its process id.

        `control` is the descriptor of the rank's socket. `parcel` is the file with its program.
        """
        self._load()
        open_streams()
        pid = self._ask(b"fork", [control, parcel, 1, 2])
        if pid <= 0:
            raise RuntimeError(f"the fork server answered {pid} for a process")
        return pid

    def removes(self, folder: str) -> None:
        """Have the server remove a folder at the end, even if this process is killed."""
        self._ask(b"remove " + os.fsencode(folder))

    def wait(self, pid: int) -> int:
        """Wait for a rank to end; return its exit status, negative for a fatal signal."""
        return self._ask(f"wait {pid}".encode())

    def _ask(self, message: bytes, descriptors: Sequence[int] = ()) -> int:
        """Send a message and return its answer. A killed server is replaced by a new server.

        The ranks of the killed server have died with it: the new server does not know them, and
        answers SIGKILL.
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
                    # Ctrl-C: a late answer must not be taken for the answer of the next message.
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
        """End the server and wait for it."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()
            if self._process is not None and self._owner == os.getpid():
                self._process.wait()
            self._socket = self._process = None


def _flags() -> list[str]:
    """Return the interpreter's flags that change a program's behaviour, such as -O (no asserts).

    Flags that isolate the interpreter from its environment are left out, because ranks get the
    environment from this process.
    """
    optimise = ["-" + "O" * sys.flags.optimize] if sys.flags.optimize else []
    modes = [f"-X{name}" for name in ("dev", "utf8") if name in sys._xoptions]
    return [*optimise, *(["-B"] if sys.flags.dont_write_bytecode else []), *modes]


server = ForkServer()
"""Fork server of this process, for all worlds."""
