"""Ctrl-C on the command line: a line, exit status 130, and no leftovers, at any moment.

Python raises KeyboardInterrupt at any instruction. Inside an import, which takes most of a
command's first seconds, this is unsafe: C libraries take it for a failure of their own, or ignore
it. There the process exits at once instead, as long as it has made nothing that it would have to
remove.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STATUS = 130
"""Exit status of a command ended by Ctrl-C: 128 and the number of SIGINT."""

_IMPORTS = "<frozen importlib._bootstrap>"
_OWN_FILE = "dure_file_"
"""Prefix of the names of modules that are a user's own files (`dure.references`)."""


@contextmanager
def interrupts_end_imports() -> Iterator[None]:
    """Context manager: Ctrl-C inside an import exits the process; elsewhere it raises as usual.

    Has no effect if SIGINT has another handler, as under nohup or in a shell's background.
    """
    if not _handled_by(signal.default_int_handler):
        yield
        return
    signal.signal(signal.SIGINT, _end_or_raise)
    try:
        yield
    finally:
        if _handled_by(_end_or_raise):
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def interrupts_raise() -> Iterator[None]:
    """Context manager: Ctrl-C raises in imports too, because there is something to remove."""
    if not _handled_by(_end_or_raise):
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if _handled_by(signal.default_int_handler):
            signal.signal(signal.SIGINT, _end_or_raise)


def leave_at_once(status: int) -> int:
    """Return the status, for a process that ends now; after Ctrl-C, ignore further signals."""
    if status == STATUS:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        _end_fork_server()
    return status


def _handled_by(handler: object) -> bool:
    in_main = threading.current_thread() is threading.main_thread()
    return in_main and signal.getsignal(signal.SIGINT) is handler


def _end_or_raise(number: int, frame: FrameType | None) -> None:
    if not _imports(frame):
        raise KeyboardInterrupt
    _end_fork_server()
    os.write(2, b"dure: interrupted\n")
    os._exit(STATUS)


def _imports(frame: FrameType | None) -> bool:
    """Return whether the stack is inside an import, but not inside a user's own file.

    A user's file may have started something that has to be cleaned up.
    """
    found = False
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_OWN_FILE):
            return False
        found = found or frame.f_code.co_filename == _IMPORTS
        frame = frame.f_back
    return found


def _end_fork_server() -> None:
    """Kill the fork server, which would otherwise end only after importing torch."""
    module = sys.modules.get("dure.worlds.processes.fork_server")
    pid = module.server.pid if hasattr(module, "server") else None  # type: ignore[union-attr]
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
