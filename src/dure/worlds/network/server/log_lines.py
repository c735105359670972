"""The server's log: a JSON object a line, as programs that collect logs read it.

    {"time": "2026-11-25T23:00:00.123+00:00", "level": "info", "event": "client in", "client": 3}

A mistake of the server's own has its `traceback`. There is nothing in it of clients' data, and no
secret. Whoever rotates logs moves the file: the next line begins a new one, at a SIGHUP or without.
"""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dure.errors import RunFolderWriteError
from dure.peer_text import printable

SERVER = logging.getLogger("dure.server")
"""All that is said of a server is said to it, or to a logger below."""

STANDARD_ERROR = Path("-")
"""In place of a file."""


class JsonLines(logging.Formatter):
    """A record as a JSON object. `about`: its fields, where it has some."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "about", {}),
        }
        if record.exc_info:
            line["event"] = "mistake"
            line["request"] = record.getMessage()
            line["traceback"] = self.formatException(record.exc_info)
        return as_json(line)


def as_json(value: Any) -> str:
    """The value as JSON; what JSON has no word for as text, and no number for as null.

    A line with characters that a terminal would obey, or that nobody sees, has escapes for all
    beyond ASCII.
    """
    text = json.dumps(_finite(value), ensure_ascii=False, default=str)
    if printable(text) == text:
        return text
    return json.dumps(_finite(value), default=str).replace("\x7f", "\\u007f")


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(one) for one in value]
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def logged_to(path: Path | None) -> Iterator[None]:
    """Inside, what happens at a server is written to this file; to none where it is None.

    Raises RunFolderWriteError where it cannot be written.
    """
    if path is None:
        yield
        return
    handler = _handler(path)
    handler.setFormatter(JsonLines())
    level = SERVER.level
    SERVER.addHandler(handler)
    SERVER.setLevel(logging.INFO)
    try:
        with _hang_up_ignored():
            yield
    finally:
        SERVER.removeHandler(handler)
        SERVER.setLevel(level)
        handler.close()


class _File(logging.handlers.WatchedFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, it is logging's
        """A disk that is full takes no line; the server goes on, and says nothing for each."""


def _handler(path: Path) -> logging.Handler:
    if path == STANDARD_ERROR:
        return logging.StreamHandler(sys.stderr)
    try:
        # It names clients: where it is made here, it is for its owner.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        # It looks before each line whether the file is still the one that it has opened.
        return _File(path, encoding="utf-8")
    except OSError as error:
        raise RunFolderWriteError(f"cannot write the log {path}: {error.strerror}") from error


@contextlib.contextmanager
def _hang_up_ignored() -> Iterator[None]:
    """A SIGHUP says that the log was moved, which is seen anyway; it must not end the server."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGHUP) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
