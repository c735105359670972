"""What a server is told of an error in a site's own code.

Type, file and line say where to look, and nothing of the data. A message may quote an example
("no patient called …"), so it travels only where the site shares it.
"""

from __future__ import annotations

import linecache
import traceback
from pathlib import Path

from dure.errors import WorkerFailedError, text_of
from dure.wire.requests import Failed

MOST_MESSAGE = 2000
"""Letters of a message that travel."""


def what_is_told(
    ticket: int, error: BaseException, share: bool, folder: Path | None = None
) -> Failed:
    """What travels of an error.

    folder: of the task. The place is the last one in it that the error came from, and the file is
    named from there on; else it is the very place, and the file has its bare name. share: the
    message travels too, with the line of the program.
    """
    error = _own(error)
    path, line = _place(error, folder)
    message = _message(error, path, line) if share else ""
    return Failed(ticket, type(error).__name__, _name(path, folder), line, message)


def _own(error: BaseException) -> BaseException:
    """What the site's own code raised, without what dure has put around it."""
    while isinstance(error, WorkerFailedError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _place(error: BaseException, folder: Path | None) -> tuple[str, int]:
    """(file, line) where it was raised; ("", 0) for one that never was."""
    places = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    in_folder = [place for place in places if _relative(place[0], folder) is not None]
    return (in_folder or places or [("", 0)])[-1]


def _relative(path: str, folder: Path | None) -> str | None:
    """The path from the folder on; None where it does not lie there."""
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
