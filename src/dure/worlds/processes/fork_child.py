"""Fork server process: a loop that answers messages one after another.

The messages are those of `dure.worlds.processes.fork_server`, whose process is the parent and
starts this process. A single thread does everything: a process that forks must not have other
threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from dure.machine.streams import open_streams

ENDS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Signals that a terminal, a supervisor or a batch system sends to a whole process group."""

_PR_SET_PDEATHSIG = 1
_LONGEST_MESSAGE = 8_192
_DESCRIPTORS = 4
"""Number of descriptors of the message `fork`: control socket, parcel, stdout, stderr."""


def serve(descriptor: int, first: Sequence[str]) -> None:
    """Import the modules `first`, and answer messages until the parent closes its socket."""
    open_streams()  # streams that the parent opened in place of missing ones end with its exec
    # The parent handles these signals; this process must survive to clean up after the parent.
    # Ranks ignore them too, except SIGTERM, so that they continue as long as the parent does.
    for end in ENDS:
        signal.signal(end, signal.SIG_IGN)
    # The parent blocked them before it started this process, which could not ignore them yet.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
    # Imports torch, which takes seconds: once for all ranks, and with the signals ignored.
    from dure.worlds.processes.rank import rank_main

    _ask_for_huge_pages()
    _load(first)
    serving = _Serving(socket.socket(fileno=descriptor), rank_main)
    serving.loop()
    serving.clear_up()


def _ask_for_huge_pages() -> None:
    """Make torch read its settings for huge pages, for all ranks.

    torch reads the environment variables of this process when it makes the first large tensor; a
    rank later gets the parent's variables, which may differ.
    """
    import torch

    torch.empty(1 << 20)


def _load(modules: Sequence[str]) -> None:
    for name in modules:
        with contextlib.suppress(Exception):  # a rank reports the error better
            importlib.import_module(name)


class _Serving:
    """Forked ranks that have not been waited for, and folders to remove at the end."""

    def __init__(self, connection: socket.socket, rank_main: Callable[[int, int], None]) -> None:
        self.connection = connection
        self.rank_main = rank_main
        self.children: set[int] = set()
        self.folders: set[str] = set()

    def loop(self) -> None:
        while True:
            message, descriptors, _, _ = socket.recv_fds(
                self.connection, _LONGEST_MESSAGE, _DESCRIPTORS
            )
            if not message:
                return
            answer = self.answer(message, descriptors)
            with contextlib.suppress(OSError):  # the parent has ended
                self.connection.send(str(answer).encode())

    def answer(self, message: bytes, descriptors: list[int]) -> int:
        asked, _, rest = message.partition(b" ")
        if asked == b"fork":
            return self.fork(descriptors)
        if asked == b"wait":
            return self.wait(int(rest))
        if asked == b"load":
            _load(rest.decode().split())
        elif asked == b"remove":
            self.folders.add(os.fsdecode(rest))
        return 0

    def fork(self, descriptors: list[int]) -> int:
        # A rank's garbage collector writes into each object that it visits. Frozen objects are not
        # visited: their pages stay shared by all ranks, 40 MB of torch's own objects.
        gc.freeze()
        pid = os.fork()
        if pid == 0:
            self.connection.close()
            _become_rank(self.rank_main, descriptors)
        self.children.add(pid)
        for each in descriptors:
            os.close(each)
        return pid

    def wait(self, pid: int) -> int:
        self.children.discard(pid)
        try:
            _, status = os.waitpid(pid, 0)
        except ChildProcessError:  # a rank of an earlier server, which was killed with it
            return -signal.SIGKILL
        return os.waitstatus_to_exitcode(status)

    def clear_up(self) -> None:
        """Kill the remaining ranks and remove the folders, after any death of the parent."""
        for pid in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)


def _become_rank(rank_main: Callable[[int, int], None], descriptors: list[int]) -> NoReturn:
    """Run the rank in the forked child, and exit.

    The exit skips the interpreter's teardown, in which gloo may abort.
    """
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with contextlib.suppress(OSError, AttributeError):  # only on Linux
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
