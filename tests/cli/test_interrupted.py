"""Ctrl-C before a run has begun: one line, status 130, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dure.cli import interrupts
from dure.cli.main import main
from dure.cli.running import run_folder
from dure.references import from_file
from process_tree import descendants, end_family

SLOW = "import time\nopen({ready!r}, 'w').close()\ntime.sleep(60)\n"


@pytest.fixture
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with interrupts.interrupts_end_imports():
        yield
    signal.signal(signal.SIGINT, before)


def test_a_command_that_starts_ends_at_once(tmp_path: Path) -> None:
    ready, work, temporary = tmp_path / "ready", tmp_path / "work", tmp_path / "temporary"
    work.mkdir()
    temporary.mkdir()
    # Both the command and its fork server import it first of what takes long.
    (tmp_path / "torch.py").write_text(SLOW.format(ready=str(ready)))
    path = os.pathsep.join([str(tmp_path), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-m", "dure", "train", "digits", "data-parallel", "--workers", "2"],
        cwd=work,
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + 60
        while not (ready.exists() and descendants(process.pid)) and time.monotonic() < until:
            time.sleep(0.02)
        family = descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=30)
    finally:
        end_family(process)
    assert (process.returncode, error) == (130, "dure: interrupted\n")
    assert list(work.iterdir()) == list(temporary.iterdir()) == []
    assert len(family) == 1
    # A process that was killed is gone a moment later; by itself it would go on for a minute.
    until = time.monotonic() + 20
    while any(map(is_alive, family)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(is_alive, family)), "the fork server has ended with it"


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_file_of_the_users_own_may_clear_up(handler: None, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    with pytest.raises(KeyboardInterrupt):
        from_file(file)


def test_elsewhere_than_in_an_import_it_raises(handler: None) -> None:
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    with interrupts.interrupts_raise():
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler


def test_a_handler_of_somebody_else_stays() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert main(["--version"]) == 0
        with interrupts.interrupts_raise():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("written", [[], ["config.json"], ["config.json", "history.jsonl"]])
@pytest.mark.parametrize("asked", [None, "mine", "there"])
def test_a_folder_in_which_nothing_was_learned_is_removed(
    written: list[str], asked: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    folders: list[Path] = []

    def work() -> None:
        with run_folder(asked and Path(asked), "run") as folder:
            folders.append(folder)
            folder.mkdir(exist_ok=True)
            for name in written:
                (folder / name).write_text("{}")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    (folder,) = folders
    if "history.jsonl" in written:
        assert len(list(folder.iterdir())) == 2, "what was learned stays"
    else:
        assert folder.exists() == (asked == "there"), "what was there before stays"
        assert not folder.exists() or list(folder.iterdir()) == []
