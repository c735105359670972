"""What runs in the fork server's process: a loop that answers one message after another.

The messages are those of `dure.worlds.processes.fork_server`, which starts this process and is its
parent. Everything here happens in one thread: a process that forks must not have others.
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
"""What a terminal, a supervisor or a batch system sends to a whole group of processes."""

_PR_SET_PDEATHSIG = 1
_LONGEST_MESSAGE = 8_192
_DESCRIPTORS = 4
"""That come with `fork`: the control socket, the parcel, stdout, stderr."""


def serve(descriptor: int, first: Sequence[str]) -> None:
    """Imports the modules `first`, and answers messages until the parent closes its end."""
    open_streams()  # what the parent has opened in their place ends with its exec
    # They are the parent's to handle; this process has to live on, to clear up after it. Ranks
    # ignore them too, but for SIGTERM: where the parent goes on, so do they.
    for end in ENDS:
        signal.signal(end, signal.SIG_IGN)
    # The parent blocked them before it started this process, which had not ignored them yet.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
    # This brings torch in, which takes seconds: once for all ranks, and with the signals ignored.
    from dure.worlds.processes.rank import rank_main

    _ask_for_huge_pages()
    _load(first)
    serving = _Serving(socket.socket(fileno=descriptor), rank_main)
    serving.loop()
    serving.clear_up()


def _ask_for_huge_pages() -> None:
    """For all ranks: torch reads what this process was started with when it makes the first large
    tensor, and a rank has the variables of the parent by then."""
    import torch

    torch.empty(1 << 20)


def _load(modules: Sequence[str]) -> None:
    for name in modules:
        with contextlib.suppress(Exception):  # a rank that needs it says better what is wrong
            importlib.import_module(name)


class _Serving:
    """The ranks that were forked and not waited for, and the folders to remove at the end."""

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
            with contextlib.suppress(OSError):  # the parent is gone: the next message says so
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
        # A rank's collector writes into each object that it looks at. What is here already it must
        # leave alone: the pages stay one copy for all ranks, 40 MB of torch's own objects.
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
        except ChildProcessError:  # a rank of a server that was killed, and died with it
            return -signal.SIGKILL
        return os.waitstatus_to_exitcode(status)

    def clear_up(self) -> None:
        """After the parent: whatever its death was, it leaves nothing."""
        for pid in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)


def _become_rank(rank_main: Callable[[int, int], None], descriptors: list[int]) -> NoReturn:
    """In the child: runs the rank, and leaves.

    Without the interpreter's teardown, where gloo may abort.
    """
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with contextlib.suppress(OSError, AttributeError):  # only Linux has it
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
