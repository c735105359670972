"""Open MPI as a contender: a job of mpirun that sleeps while others have their turn.

Each of its ranks (open_mpi_rank.py) gets its orders over a Unix socket. Between orders the ranks
block in a read; waiting inside MPI would spin. mpirun gets --oversubscribe, which permits more
ranks than cores, and makes Open MPI yield the core when it waits.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

START_SECONDS = 60.0
"""Timeout in seconds until all ranks of mpirun have connected."""


def absent() -> str | None:
    """Return why Open MPI cannot take part; None if it is installed."""
    if shutil.which("mpirun") is None:
        return "not installed: there is no mpirun"
    if importlib.util.find_spec("mpi4py") is None:
        return "not installed: pip install mpi4py"
    return None


def command(ranks: int, path: Path) -> list[str]:
    """Return the command line that starts the job."""
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    script = Path(__file__).with_name("open_mpi_rank.py")
    mpirun = ["mpirun", *as_root, "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]
    return [*mpirun, sys.executable, str(script), str(path)]


class OpenMpi:
    """A running job, and a context manager.

    Raises RuntimeError if the job does not start or ends unexpectedly.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.version = ""
        # A short path: the path of a socket has at most 107 characters.
        self._folder = tempfile.TemporaryDirectory(prefix="dure-mpi-")
        self._log = Path(self._folder.name) / "log"
        self._streams: list[Any] = []
        self._process: subprocess.Popen[bytes] | None = None
        path = Path(self._folder.name) / "socket"
        try:
            with socket.socket(socket.AF_UNIX) as listener, self._log.open("wb") as log:
                listener.bind(str(path))
                listener.listen(ranks)
                # Short, so that the end of mpirun is noticed (`_accept`).
                listener.settimeout(0.2)
                # The ranks compute with a single thread each, as ours do. The variables of our own
                # job must not reach them.
                environment = {
                    k: v
                    for k, v in os.environ.items()
                    if k not in ("RANK", "WORLD_SIZE", "PYTHONPATH")
                }
                self._process = subprocess.Popen(
                    command(ranks, path),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**environment, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                    # Ctrl-C at the terminal must not reach them, and `close` can kill the group.
                    start_new_session=True,
                )
                self._accept(listener, self._process)
        except BaseException:
            self.close()
            raise

    def _accept(self, listener: socket.socket, process: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + START_SECONDS
        while len(self._streams) < self.ranks:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"mpirun does not start: {self._complaint()}") from None
                continue
            connection.settimeout(None)
            # The stream keeps the connection open.
            with connection:
                self._streams.append(connection.makefile("rw"))
        hello = [json.loads(stream.readline()) for stream in self._streams]
        found = re.search(r"Open MPI v([\w.]+)", hello[0]["version"])
        self.version = found[1] if found else hello[0]["version"].split(",")[0]

    def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """Send an order to all ranks, and return their answers."""
        try:
            for stream in self._streams:
                stream.write(json.dumps({"do": do, **arguments}) + "\n")
                stream.flush()
            return [json.loads(stream.readline()) for stream in self._streams]
        except (OSError, json.JSONDecodeError):
            raise RuntimeError(f"the job of Open MPI has ended: {self._complaint()}") from None

    def _complaint(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines()]
        return " ".join(line for line in lines if line.strip("-"))[:300] or "it printed no message"

    def close(self) -> None:
        """End the job: its ranks exit when their sockets close."""
        for stream in self._streams:
            with contextlib.suppress(OSError):
                stream.close()
        if self._process is not None:
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._folder.cleanup()

    def __enter__(self) -> OpenMpi:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
