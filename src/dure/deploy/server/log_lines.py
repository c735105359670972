"""Log of the server: a JSON object per line, in the form that log collectors read.

    {"time": "2026-11-25T23:00:00.123+00:00", "level": "info", "event": "client in", "client": 3}

An error of the server has a `traceback`. The log has no data of clients, and no secrets. To rotate
the log, move the file: the next line creates a new file, with or without a SIGHUP.
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
"""Logger of the server; other loggers of the server are below it."""

STANDARD_ERROR = Path("-")
"""Path that stands for standard error."""


class JsonLines(logging.Formatter):
    """Formatter of a record as a JSON object; the attribute `about` has additional fields."""

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
    """Encode a value as JSON; other types become text, and numbers that are not finite null.

    A line with terminal control or invisible characters escapes all characters beyond ASCII.
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
    """Context manager: write the server's log to this file; to none if the path is None.

    Raises RunFolderWriteError if the file cannot be written.
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
        """Ignore an error of the disk: the server continues without the line."""


def _handler(path: Path) -> logging.Handler:
    if path == STANDARD_ERROR:
        return logging.StreamHandler(sys.stderr)
    try:
        # The log names clients: a new file is readable by its owner only.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        # The handler checks before each line whether the file was replaced.
        return _File(path, encoding="utf-8")
    except OSError as error:
        raise RunFolderWriteError(f"cannot write the log {path}: {error.strerror}") from error


@contextlib.contextmanager
def _hang_up_ignored() -> Iterator[None]:
    """Ignore SIGHUP, which announces that the log was moved, instead of ending the server."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGHUP) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
