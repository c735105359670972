"""Files on disks that are full, and lines that stay whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dure.errors import RunFolderError, RunFolderWriteError
from dure.record import disk
from dure.record.disk import LineFile, retry_write, sync_folder, write_atomically
from dure.record.seal import checksum

LINES = [f"line {number}\n".encode() for number in range(9)]


class Full:
    """A disk that takes `room` more bytes, of each write at most `most`."""

    def __init__(self, room: int, most: int = 1 << 20) -> None:
        self.room, self.most = room, most

    def write(self, descriptor: int, content: bytes) -> int:
        taken = min(len(content), self.most, self.room)
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= taken
        return write(descriptor, content[:taken])


write = os.write


def test_writes_that_take_a_part_are_gone_on_with(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(disk.os, "write", Full(1 << 20, most=5).write)
    lines = LineFile(tmp_path / "file")
    lines.add(b"".join(LINES))
    lines.close()
    assert (tmp_path / "file").read_bytes() == b"".join(LINES)


def test_what_a_full_disk_does_not_take_comes_before_what_follows(
    tmp_path: Path, monkeypatch
) -> None:
    full = Full(room=10)
    monkeypatch.setattr(disk.os, "write", full.write)
    lines = LineFile(tmp_path / "file")
    with pytest.raises(RunFolderWriteError, match=r"cannot write .*file: No space left on device"):
        lines.add(LINES[0] + LINES[1])
    with pytest.raises(RunFolderWriteError):
        lines.add(LINES[2])
    full.room = 1 << 20
    lines.add(LINES[3])
    expected = b"".join(LINES[:4])
    assert (tmp_path / "file").read_bytes() == expected
    assert (lines.length, lines.checksum) == (len(expected), checksum(expected))
    lines.close()


def test_a_disk_that_stays_full_leaves_whole_lines(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(disk.os, "write", Full(room=20).write)
    lines = LineFile(tmp_path / "file")
    lines.add(LINES[0])
    with pytest.raises(RunFolderWriteError):
        lines.add(LINES[1] + LINES[2])
    lines.close()
    assert (tmp_path / "file").read_bytes() == LINES[0]


def test_half_a_line_that_a_kill_left_is_not_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(LINES[0] + b"line")
    lines = LineFile(tmp_path / "file")
    lines.add(LINES[1])
    lines.close()
    assert (tmp_path / "file").read_bytes() == LINES[0] + LINES[1]


def test_a_file_that_cannot_be_written_stays_as_it_was_and_is_named(
    tmp_path: Path, monkeypatch
) -> None:
    file = tmp_path / "config.json"
    write_atomically(file, b"old")

    def full(path: Path, content: bytes) -> None:
        path.write_bytes(content[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "write_synced", full)
    with pytest.raises(RunFolderError, match=r"cannot write .*config\.json: No space left"):
        write_atomically(file, b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [
        ("config.json", b"old")
    ]


def test_content_is_on_the_disk_before_its_name(tmp_path: Path, monkeypatch) -> None:
    done: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(
            disk.os, name, lambda *given, real=real, name=name: (done.append(name), real(*given))
        )
    write_atomically(tmp_path / "file", b"content")
    assert done == ["fsync", "replace", "fsync"]


def test_what_fails_for_a_moment_is_done_again(monkeypatch) -> None:
    monkeypatch.setattr(disk, "MOMENT", 0.1)
    left = 3

    def write_it() -> None:
        nonlocal left
        left -= 1
        if left:
            raise RunFolderWriteError("full")

    retry_write(write_it)
    assert left == 0
    with pytest.raises(RunFolderWriteError):
        retry_write(write_it)


def failing(code: int):
    def fsync(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    return fsync


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EBADF])
def test_a_file_system_that_syncs_no_folders_will_do(
    tmp_path: Path, monkeypatch, code: int
) -> None:
    monkeypatch.setattr(disk.os, "fsync", failing(code))
    sync_folder(tmp_path)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fails_as_a_folder_is_synced_is_told(
    tmp_path: Path, monkeypatch, code: int
) -> None:
    monkeypatch.setattr(disk.os, "fsync", failing(code))
    with pytest.raises(RunFolderWriteError, match=f"{tmp_path}: {os.strerror(code)}"):
        sync_folder(tmp_path)


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunFolderWriteError, match="No such file"):
        sync_folder(tmp_path / "gone")
