"""No other user of the machine reads what a served run or a client keeps, whatever the umask is."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import dure
from dure.run.join import join
from small import small_task

sys.path.insert(0, str(Path(__file__).parents[1] / "worlds" / "network"))
from federation import Federation


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def open_to_others(folder: Path) -> list[str]:
    """What somebody else may read, write or enter in a folder, itself among it."""
    return [
        f"{stat.S_IMODE(path.lstat().st_mode):o} {path.relative_to(folder)}"
        for path in (folder, *folder.rglob("*"))
        if stat.S_IMODE(path.lstat().st_mode) & 0o077
    ]


class Kept(Federation):
    """A federation whose clients have folders of their own."""

    def __init__(self, states: Path) -> None:
        seen: list[str] = []

        def looks(one: Federation, event: object) -> None:
            seen.extend(open_to_others(one.out))  # type: ignore[attr-defined]

        super().__init__(2, looks)
        self.states = states
        self.seen = seen
        """What others could read while the run went on."""

    def run(self, out: Path, rounds: int = 3, **world: object) -> dure.Run:
        self.out = out
        return super().run(out, rounds, **world)

    def _client(self, number: int) -> None:
        self._serves.wait(20)
        join(self.where["serving"], small_task(), state=self.states / str(number), part=number)


@pytest.mark.parametrize("mask", [0o000, 0o022])
@pytest.mark.parametrize("exists", [False, True])
def test_a_served_run_its_clients_and_its_copy_are_for_their_owner_alone(
    mask: int, exists: bool, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with umask(mask):
        if exists:
            out.mkdir(mode=0o777)
        federation = Kept(tmp_path / "states")
        federation.run(out, rounds=2, record=True, status_port=0, log=str(tmp_path / "log"))
        copy = dure.backup(out, tmp_path / "copy")
    for folder in (out, tmp_path / "states" / "0", copy):
        assert not open_to_others(folder)
    assert not [line for line in federation.seen if "config.json" not in line]
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600


def test_a_run_of_a_version_before_is_closed_when_it_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with umask(0o022):
        Federation().run(out, rounds=1)
        for path in (out, *out.rglob("*")):
            if path.suffix not in (".key", ".token"):
                path.chmod(0o755 if path.is_dir() else 0o644)
        assert open_to_others(out)
        dure.resume(out, task=small_task(), stop=dure.Stop(rounds=1))
        assert not open_to_others(out)


def test_a_report_elsewhere_is_for_whom_its_folder_is(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    from dure.report.page import write_report

    out = tmp_path / "run"
    with umask(0o022):
        Federation().run(out, rounds=1)
        (tmp_path / "shared").mkdir()
        write_report([out], tmp_path / "shared" / "report.html")
        write_report([out], out / "report.html")
    assert stat.S_IMODE((tmp_path / "shared" / "report.html").stat().st_mode) == 0o644
    assert stat.S_IMODE((out / "report.html").stat().st_mode) == 0o600
