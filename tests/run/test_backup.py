"""A copy of a run folder: what may be read in it, and what is left of one that failed."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

import dure
from dure.deploy.server.register import FILE, Register
from dure.errors import RunFolderError, RunFolderWriteError
from dure.run import backup as module
from small import small_task


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run, with a register of clients as a server has it."""
    folder = tmp_path / "run"
    dure.train(small_task(), dure.FedAvg(clients=2), stop=dure.Stop(rounds=1), out=folder)
    with Register(folder / FILE, clients=2) as register:
        register.invite("ward 3")
    return folder


def test_who_may_not_read_a_file_may_not_read_its_copy(run: Path, tmp_path: Path) -> None:
    copy = dure.backup(run, tmp_path / "copy")
    for file in copy.rglob("*"):
        if file.is_file():
            own = (run / file.relative_to(copy)).stat().st_mode
            assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(own), file
    assert stat.S_IMODE((copy / FILE).stat().st_mode) == 0o600
    with Register(copy / FILE) as register:
        assert register.withdraw() == 1


def test_nothing_is_left_of_a_copy_for_which_there_is_no_room(
    run: Path, tmp_path: Path, monkeypatch
) -> None:
    copied = shutil.copyfileobj
    room = 2

    def full(*arguments: Any) -> None:
        nonlocal room
        room -= 1
        if room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        copied(*arguments)

    monkeypatch.setattr(module.shutil, "copyfileobj", full)
    with pytest.raises(RunFolderWriteError, match=r"cannot write .*copy: No space left"):
        dure.backup(run, tmp_path / "copy")
    assert not any((tmp_path / "copy").iterdir())
    monkeypatch.undo()
    dure.backup(run, tmp_path / "copy")


@pytest.mark.parametrize(
    "place",
    [
        "model.safetensors",
        "notes.txt",
        "journal.db",
        FILE,
        "checkpoint",
        "checkpoint/00000001/state.json",
        "updates",
        "once/folder",
    ],
)
def test_a_link_out_of_the_folder_is_not_followed(run: Path, tmp_path: Path, place: str) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "inner").write_text("nobody else's business")
    link = run / place
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.symlink_to(secret if "." not in place else secret / "inner")
    with pytest.raises(RunFolderError, match=f"{link.name} is a link"):
        dure.backup(run, tmp_path / "copy")
    assert not list((tmp_path / "copy").glob("*"))


def test_a_pipe_in_the_folder_is_not_waited_for(run: Path, tmp_path: Path) -> None:
    os.mkfifo(run / "pipe.json")
    with pytest.raises(RunFolderError, match=r"pipe\.json is neither a file nor a folder"):
        dure.backup(run, tmp_path / "copy")


@pytest.mark.parametrize("place", ["copy", "checkpoint/copy", "new/copy", "."])
def test_a_folder_is_not_copied_into_itself(run: Path, place: str) -> None:
    there = sorted(run.rglob("*"))
    with pytest.raises(RunFolderError, match=r"is inside .*, the folder to copy|is not empty"):
        dure.backup(run, run / place)
    assert sorted(run.rglob("*")) == there


def test_a_folder_that_is_named_by_a_link_is_copied(run: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(run)
    copy = dure.backup(tmp_path / "latest", tmp_path / "copy")
    assert (copy / "config.json").read_bytes() == (run / "config.json").read_bytes()
    with pytest.raises(RunFolderError, match="is inside"):
        dure.backup(tmp_path / "latest", run / "copy")
