"""Ctrl-C on the command line: a line, exit status 130, and nothing left, whenever it comes.

Python raises KeyboardInterrupt wherever it is. Inside an import, which is most of a command's first
seconds, that does not end well: libraries in C take it for a failure of their own, or for nothing
at all. There the process ends at once instead, as long as it has made nothing that it would have to
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
"""Exit status of a command that Ctrl-C has ended: 128 and the number of SIGINT."""

_IMPORTS = "<frozen importlib._bootstrap>"
_OWN_FILE = "dure_file_"
"""How the names of modules begin that are a user's own files (`dure.references`)."""


@contextmanager
def interrupts_end_imports() -> Iterator[None]:
    """Within the block Ctrl-C inside an import ends the process; elsewhere it raises as usual.

    Not where somebody else handles it, as nohup and a shell's background do.
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
    """Within the block Ctrl-C raises in imports too: there is something to remove."""
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
    """The status again, for a process that ends now: further signals no longer disturb it."""
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
    """Whether something is imported there, and no file of the user's own is run, which may have
    begun something."""
    found = False
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_OWN_FILE):
            return False
        found = found or frame.f_code.co_filename == _IMPORTS
        frame = frame.f_back
    return found


def _end_fork_server() -> None:
    """It ends by itself, but only when it has imported torch."""
    module = sys.modules.get("dure.worlds.processes.fork_server")
    pid = module.server.pid if hasattr(module, "server") else None  # type: ignore[union-attr]
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
