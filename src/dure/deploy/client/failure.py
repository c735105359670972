"""Report to the server of an error in a site's own code.

The error's type, file and line show where to look and contain no data. The error's message may
quote an example ("no patient called …"), so the client sends it only if the site shares messages.
"""

from __future__ import annotations

import linecache
import traceback
from pathlib import Path

from dure.errors import WorkerFailedError, text_of
from dure.wire.requests import TrainingFailure

MOST_MESSAGE = 2000
"""Maximum characters of a message that travel."""


def failure_report(
    ticket: int, error: BaseException, share: bool, folder: Path | None = None
) -> TrainingFailure:
    """Return the report of an error.

    `folder` is the folder of the task. The reported position is the last frame of the traceback
    inside the folder, and the file's path is relative to the folder; without such a frame, the
    position is the last frame of all, and the file has its bare name. `share` adds the message and
    the line of source code.
    """
    error = _own(error)
    path, line = _place(error, folder)
    message = _message(error, path, line) if share else ""
    return TrainingFailure(ticket, type(error).__name__, _name(path, folder), line, message)


def _own(error: BaseException) -> BaseException:
    """Return the error of the site's own code, without dure's wrappers."""
    while isinstance(error, WorkerFailedError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _place(error: BaseException, folder: Path | None) -> tuple[str, int]:
    """Return (file, line) of the raising frame; ("", 0) for an error without a traceback."""
    places = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    in_folder = [place for place in places if _relative(place[0], folder) is not None]
    return (in_folder or places or [("", 0)])[-1]


def _relative(path: str, folder: Path | None) -> str | None:
    """Return the path relative to the folder; None if it is outside."""
    if folder is None:
        return None
    try:
        return str(Path(path).resolve().relative_to(folder.resolve()))
    except (ValueError, OSError):
        return None


def _name(path: str, folder: Path | None) -> str:
    return _relative(path, folder) or Path(path).name


def _message(error: BaseException, path: str, line: int) -> str:
    text = text_of(error)
    source = linecache.getline(path, line).strip()
    return "\n".join(part[:MOST_MESSAGE] for part in (text, source) if part)
