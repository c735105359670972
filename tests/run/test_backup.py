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
from dure.errors import RunFolderWriteError
from dure.run import backup as module
from dure.worlds.network.server.register import FILE, Register
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
