"""A power failure: what was written to a folder and not synced is gone. `kill -9` keeps it."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from types import TracebackType
from unittest import mock


class ForgetfulDisk:
    """Watches the syncs of this process in one folder; files are synced by `os.fsync` alone.

    A context manager. `fail` then makes the folder what a disk may hold after a power failure: of
    every file the content that was synced last. A name that was given or taken since its folder was
    synced may be as it was then, or as it is now.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._contents: dict[int, bytes] = {}
        self._open: list[int] = []
        """An inode whose file is removed stays another file's as long as it is open."""
        self._fsync = os.fsync
        self._names: dict[str, int] = {}
        for path in folder.iterdir():
            with open(path, "rb") as file:
                self._sync_content(file.fileno())
        self._sync_names()

    def __enter__(self) -> ForgetfulDisk:
        self._patch = mock.patch("os.fsync", self._synced)
        self._patch.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._patch.stop()

    def fail(self, random: Random) -> None:
        now = self._names_now()
        left = {}
        for name in sorted({*now, *self._names}):
            inode = random.choice([now, self._names]).get(name)
            if inode is not None:
                left[name] = self._contents.get(inode, b"")
        for path in self.folder.iterdir():
            path.unlink()
        for name, content in left.items():
            (self.folder / name).write_bytes(content)
        while self._open:
            os.close(self._open.pop())

    def _synced(self, descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            if os.path.samefile(f"/proc/self/fd/{descriptor}", self.folder):
                self._sync_names()
        else:
            self._sync_content(descriptor)
        self._fsync(descriptor)

    def _sync_content(self, descriptor: int) -> None:
        inode = os.fstat(descriptor).st_ino
        if inode not in self._contents:
            self._open.append(os.dup(descriptor))
        self._contents[inode] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def _sync_names(self) -> None:
        self._names = self._names_now()

    def _names_now(self) -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in self.folder.iterdir()}
