"""File system of a folder: local or remote, and its free space."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dure.errors import warn

_MOUNTS = Path("/proc/self/mountinfo")

_REMOTE = re.compile(
    r"nfs\d?|cifs|smb\w*|9p|afs|ncpfs|ceph|lustre|gpfs|beegfs|glusterfs|orangefs|ocfs2|gfs2"
    r"|fuse\.(?!(ntfs|exfat|ext|mergerfs|fuse-overlayfs))\S+"
)
"""Types of file systems whose syncs another machine acknowledges.

Of the file systems in user space, all except those known to be local.
"""


def warn_if_remote(folder: Path) -> None:
    """Warn if the folder is on a network file system, whose locks and syncs may be unreliable."""
    kind = file_system(folder)
    if _REMOTE.fullmatch(kind):
        warn(
            f"{folder} is on a network file system ({kind}), which may lose data that were "
            "reported as written: choose a folder on a local disk with --out"
        )


def file_system(folder: Path, mounts: Path = _MOUNTS) -> str:
    """Return the type of the folder's file system in Linux; "" if unknown."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
        place = folder.resolve()
    except OSError:
        return ""
    found = -1
    kind = ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = Path(_unescaped(before.split(" ")[4]))
        # The longest matching mount point; of two mounts on a point, the later hides the earlier.
        if place.is_relative_to(point) and len(point.parts) >= found:
            found = len(point.parts)
            kind = after.split(" ")[0]
    return kind


def _unescaped(point: str) -> str:
    """Decode octal escapes of spaces and other characters in a mount point."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), point)


def free_bytes(folder: Path) -> int:
    """Return the bytes that this user may still write in the folder. Raises OSError."""
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize
