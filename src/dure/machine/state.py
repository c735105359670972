"""State of dure for this machine's user, across runs: files in a private folder.

The folder is `DURE_STATE_HOME`, else `dure` in `XDG_STATE_HOME`, else `~/.local/state/dure`,
according to the XDG Base Directory Specification. A file that is not the user's own, or is writable
by others, is ignored.
"""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """Return the path of the folder, which may not exist.

    Raises OSError for a user without a home directory.
    """
    own = os.environ.get("DURE_STATE_HOME")
    if own:
        return Path(own)
    state = os.environ.get("XDG_STATE_HOME")
    try:
        return Path(state or Path.home() / ".local" / "state") / "dure"
    except RuntimeError as error:
        raise OSError(str(error)) from error


def write_state_file(name: str, content: bytes) -> None:
    """Write a file of this name, which others cannot read. Raises OSError."""
    folder = state_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not _is_private(folder):
        raise PermissionError(f"{folder} can be written by others")
    beside = folder / f".{name}.{os.getpid()}"
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    os.replace(beside, folder / name)


def read_state_file(name: str) -> bytes | None:
    """Return the content stored under this name; None if absent or writable by others."""
    try:
        folder = state_folder()
        if _is_private(folder) and _is_private(folder / name):
            return (folder / name).read_bytes()
    except OSError:
        pass
    return None


def _is_private(path: Path) -> bool:
    status = path.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022
