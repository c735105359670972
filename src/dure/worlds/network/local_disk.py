"""Whether a folder lies on a disk of this machine, and how much room there is."""

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
"""Types of file systems on which another machine says when something is on the disk.

Of those in user space, all but the ones that are known to be local.
"""


def warn_if_remote(folder: Path) -> None:
    """Warns if the folder is on a network: locks and syncing may not hold what they promise."""
    kind = file_system(folder)
    if _REMOTE.fullmatch(kind):
        warn(
            f"{folder} lies on a network file system ({kind}), which may lose what it has said is "
            f"on the disk: choose a folder on a local disk with --out"
        )


def file_system(folder: Path, mounts: Path = _MOUNTS) -> str:
    """The type of its file system, as Linux names it; "" where that is not known."""
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
        # The longest that leads there, and of two on one point the later, which hides the other.
        if place.is_relative_to(point) and len(point.parts) >= found:
            found = len(point.parts)
            kind = after.split(" ")[0]
    return kind


def _unescaped(point: str) -> str:
    """Spaces and the like are written there as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), point)


def free_bytes(folder: Path) -> int:
    """How much may still be written there by this user. Raises OSError."""
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize
