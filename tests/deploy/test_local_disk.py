"""Which file system a folder is on."""

from __future__ import annotations

from pathlib import Path

import pytest

from dure.deploy import local_disk
from dure.deploy.local_disk import file_system, free_bytes, warn_if_remote

LINE = "36 35 98:0 / {point} rw,noatime master:1 - {kind} source rw\n"


def mounts(place: Path, *lines: tuple[str, str]) -> Path:
    path = place / "mountinfo"
    path.write_text("".join(LINE.format(point=point, kind=kind) for point, kind in lines))
    return path


def test_it_is_that_of_the_nearest_mount_above(tmp_path: Path) -> None:
    inner = tmp_path / "a place"
    inner.mkdir()
    shown = str(inner).replace(" ", "\\040")
    listed = mounts(
        tmp_path, ("/", "ext4"), (shown, "xfs"), (shown, "nfs4"), (f"{tmp_path}/a", "cifs")
    )
    assert file_system(inner / "run", listed) == "nfs4"
    assert file_system(tmp_path / "another", listed) == "ext4"
    assert file_system(inner, tmp_path / "missing") == ""


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "ceph"])
def test_a_network_is_warned_of_by_name(tmp_path: Path, kind: str, monkeypatch) -> None:
    monkeypatch.setattr(local_disk, "file_system", lambda folder: kind)
    with pytest.warns(UserWarning, match=f"network file system .{kind}"):
        warn_if_remote(tmp_path)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "fuseblk", ""])
def test_a_local_disk_is_not(tmp_path: Path, kind: str, monkeypatch, recwarn) -> None:
    monkeypatch.setattr(local_disk, "file_system", lambda folder: kind)
    warn_if_remote(tmp_path)
    assert not recwarn.list


def test_there_is_room(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) > 0
