"""What dure remembers of this machine's user, across runs: files in a private folder.

`DURE_STATE_HOME`, else `dure` in `XDG_STATE_HOME`, else `~/.local/state/dure`, as the XDG Base
Directory Specification has it. What is not the user's own, or can be written by others, is not
believed.
"""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """Where it is, whether or not it exists. Raises OSError for a user who has no home."""
    own = os.environ.get("DURE_STATE_HOME")
    if own:
        return Path(own)
    state = os.environ.get("XDG_STATE_HOME")
    try:
        return Path(state or Path.home() / ".local" / "state") / "dure"
    except RuntimeError as error:
        raise OSError(str(error)) from error


def remember(name: str, content: bytes) -> None:
    """Writes a file of this name, which others cannot read. Raises OSError."""
    folder = state_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not _is_private(folder):
        raise PermissionError(f"{folder} can be written by others")
    beside = folder / f".{name}.{os.getpid()}"
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    os.replace(beside, folder / name)


def remembered(name: str) -> bytes | None:
    """What was written under this name; None if nothing was, or others could have done so."""
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
