"""The log of what left: no line is changed, removed or swapped unnoticed, and none is half."""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import re
import signal
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.cli.audit import main
from dure.deploy.client.audit_log import FIRST, LATER, AuditLog, verify
from dure.errors import AuditError, RunFolderWriteError
from forgetful import ForgetfulDisk


def write(path: Path, lines: int) -> list[bytes]:
    with AuditLog(path) as audit:
        for line in range(lines):
            audit.record("update", b"%d" % line, ticket=line, round=line // 2)
    return path.read_bytes().splitlines(keepends=True)


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_a_line_says_what_left_and_follows_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    before = datetime.now(timezone.utc)
    with AuditLog(path) as audit:
        audit.record("check-in", b"hello")
    with AuditLog(path) as audit:
        audit.record_digest("update", 10**9, "d" * 64, ticket=17, round=0)
    first, second = path.read_bytes().splitlines()
    said = json.loads(first)
    assert before <= datetime.fromisoformat(said.pop("time").replace("Z", "+00:00"))
    assert said == {
        "kind": "check-in",
        "number": 1,
        "bytes": 5,
        "digest": sha(b"hello"),
        "previous": FIRST,
    }
    said = json.loads(second)
    assert said["previous"] == sha(first)
    assert (said["ticket"], said["round"], said["bytes"]) == (17, 0, 10**9)
    assert said["number"] == 2
    assert verify(path) == (2, sha(second))


def test_a_log_without_lines_is_one(tmp_path: Path) -> None:
    AuditLog(tmp_path / "audit.log").close()
    assert verify(tmp_path / "audit.log") == (0, FIRST)
    with pytest.raises(AuditError, match="cannot read"):
        verify(tmp_path / "other.log")


LINES = 4


@given(st.integers(0, LINES - 1), st.data())
def test_a_changed_line_is_found(number: int, data) -> None:
    with TemporaryDirectory() as place:
        path = Path(place) / "audit.log"
        lines = write(path, LINES)
        line = bytearray(lines[number])
        at = data.draw(st.integers(0, len(line) - 1))
        line[at] = data.draw(st.integers(0, 255).filter(lambda byte: byte != line[at]))
        lines[number] = bytes(line)
        path.write_bytes(b"".join(lines))
        with pytest.raises(AuditError, match=re.escape(str(path))) as raised:
            verify(path)
        # The line itself, or the next one, which does not follow it.
        named = int(re.findall(r": line (\d+)", str(raised.value))[0])
        assert number + 1 <= named <= number + 2
        # What goes on from there would hide it.
        if path.read_bytes().endswith(b"\n"):
            with pytest.raises(AuditError):
                AuditLog(path)


@given(st.integers(0, LINES - 1), st.integers(1, LINES))
def test_removed_lines_are_found(first: int, many: int) -> None:
    with TemporaryDirectory() as place:
        path = Path(place) / "audit.log"
        lines = write(path, LINES)
        path.write_bytes(b"".join(lines[:first] + lines[first + many :]))
        for look in (verify, AuditLog):
            with pytest.raises(AuditError, match=f": line {first + 1} "):
                look(path)


@given(st.permutations(range(LINES)))
def test_swapped_lines_are_found(order: list[int]) -> None:
    with TemporaryDirectory() as place:
        path = Path(place) / "audit.log"
        lines = write(path, LINES)
        path.write_bytes(b"".join(lines[number] for number in order))
        if order == sorted(order):
            assert verify(path).lines == LINES
            return
        first = next(place for place, number in enumerate(order) if place != number)
        with pytest.raises(AuditError, match=f": line {first + 1} "):
            verify(path)


@given(st.integers(0, LINES), st.integers(0, LINES - 1))
def test_a_line_put_in_is_found(place: int, copied: int) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "audit.log"
        lines = write(path, LINES)
        path.write_bytes(b"".join([*lines[:place], lines[copied], *lines[place:]]))
        with pytest.raises(AuditError):
            verify(path)


@pytest.mark.parametrize("end", [b"\r\n", b"\n\n", b" \n"])
def test_other_ends_of_lines_are_changes(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "audit.log"
    lines = write(path, LINES)
    path.write_bytes(b"".join([*lines[:-1], lines[-1][:-1] + end]))
    with pytest.raises(AuditError):
        verify(path)


def test_a_log_that_was_written_anew_is_another(tmp_path: Path) -> None:
    path, other = tmp_path / "audit.log", tmp_path / "other.log"
    write(path, LINES)
    write(other, LINES)
    path.write_bytes(other.read_bytes())
    with pytest.raises(AuditError, match=f": line {LINES} has changed"):
        verify(path)


@pytest.mark.parametrize("left", [1, 50, -1])
def test_what_a_kill_cut_off_is_cut_and_written_down(tmp_path: Path, left: int) -> None:
    path = tmp_path / "audit.log"
    *whole, last = write(path, LINES)
    (tmp_path / "audit.log.head").unlink()
    torn = last[:left]
    path.write_bytes(b"".join(whole) + torn)
    with pytest.raises(AuditError, match=f": line {LINES} is incomplete"):
        verify(path)
    with AuditLog(path) as audit:
        audit.record("metrics", b"next")
    said = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [each["kind"] for each in said[-2:]] == ["cut", "metrics"]
    assert (said[-2]["bytes"], said[-2]["digest"]) == (len(torn), sha(torn))
    assert verify(path).lines == LINES + 1


def test_a_full_disk_lets_nothing_leave_and_the_log_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    pwrite = os.pwrite

    def most(file: int, content: bytes, at: int) -> int:
        if len(content) < 10:
            raise OSError(28, "No space left on device")
        return pwrite(file, content[:-9], at)

    with AuditLog(path) as audit:
        audit.record("check-in", b"hello")
        for _ in range(2):
            with (
                mock.patch("os.pwrite", most),
                pytest.raises(RunFolderWriteError, match=r"audit\.log: No space left on device"),
            ):
                audit.record("update", b"much")
        assert verify(path).lines == 1
        # Nor where what was written cannot be taken back.
        with (
            mock.patch("os.pwrite", most),
            mock.patch("os.ftruncate", side_effect=OSError(5, "Input/output error")),
            pytest.raises(RunFolderWriteError),
        ):
            audit.record("update", b"much", ticket=10**15, round=10**15)
        audit.record("failure", b"")
    assert verify(path).lines == 2


@given(st.integers(0, LINES), st.randoms(use_true_random=False))
def test_nothing_that_left_is_forgotten_in_a_power_failure(lines: int, random) -> None:
    with TemporaryDirectory() as place:
        path = Path(place) / "audit.log"
        with ForgetfulDisk(Path(place)) as disk:
            write(path, lines)
        disk.fail(random)
        with AuditLog(path) as audit:
            audit.record("check-in", b"again")
        assert verify(path).lines == lines + 1


@given(st.lists(st.booleans(), max_size=8), st.randoms(use_true_random=False))
def test_a_line_that_may_wait_is_on_the_disk_with_the_next_that_may_not(
    at_once: list[bool], random
) -> None:
    with TemporaryDirectory() as place:
        path = Path(place) / "audit.log"
        with ForgetfulDisk(Path(place)) as disk:
            audit = AuditLog(path)
            for number, now in enumerate(at_once):
                audit.record("smashed", b"%d" % number, at_once=now)
            os.close(audit._file)
        disk.fail(random)
        durable = max((place for place, now in enumerate(at_once, 1) if now), default=0)
        AuditLog(path).close()
        assert verify(path).lines >= durable


def test_a_line_that_may_wait_does_so_for_a_second_at_the_most(tmp_path: Path) -> None:
    with AuditLog(tmp_path / "audit.log") as audit, mock.patch("os.fsync") as synced:
        clock = time.monotonic()
        with mock.patch("time.monotonic", return_value=clock):
            audit.record("smashed", b"1", at_once=False)
            assert synced.call_count == 0
        with mock.patch("time.monotonic", return_value=clock + LATER + 0.1):
            audit.record("smashed", b"2", at_once=False)
            assert synced.call_count == 1
            audit.record("smashed", b"3", at_once=False)
            assert synced.call_count == 1
    assert verify(tmp_path / "audit.log").lines == 3


def live(path: Path, left: Path) -> None:
    with AuditLog(path) as audit, open(left, "ab", buffering=0) as out:
        for number in itertools.count():
            audit.record("update", b"x" * 100, at_once=number % 3 == 0)
            out.write(b".")


def test_nothing_left_a_client_that_was_killed_but_what_stands_there(tmp_path: Path) -> None:
    path, left = tmp_path / "audit.log", tmp_path / "left"
    left.touch()
    for _ in range(3):
        before = left.stat().st_size
        child = multiprocessing.get_context("fork").Process(target=live, args=(path, left))
        child.start()
        assert child.pid is not None
        while left.stat().st_size < before + 3:
            time.sleep(0.001)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        AuditLog(path).close()
    lines = verify(path).lines
    cuts = path.read_bytes().count(b'"cut"')
    # Of each life one line at most stands there of which nothing left.
    assert left.stat().st_size <= lines - cuts <= left.stat().st_size + 3


def test_threads_may_record(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    with AuditLog(path) as audit:
        threads = [
            threading.Thread(target=lambda: [audit.record("metrics", b"x") for _ in range(20)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert verify(path).lines == 80


def test_a_log_has_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    with AuditLog(path), pytest.raises(AuditError, match=rf"{path} is in use by another process"):
        AuditLog(path)
    AuditLog(path).close()
    with pytest.raises(RunFolderWriteError, match="cannot write"):
        AuditLog(tmp_path / "no" / "audit.log")


def test_the_command_says_how_long_the_log_is(tmp_path: Path, capsys) -> None:
    path = tmp_path / "audit.log"
    lines = write(path, LINES)
    assert main([str(path)]) == 0
    said = capsys.readouterr().out
    assert f"{LINES} lines" in said
    assert sha(lines[-1][:-1]) in said
    path.write_bytes(b"".join(lines[1:]))
    with pytest.raises(AuditError):
        main([str(path)])
    for wrong in ([], ["--all"], ["a", "b"]):
        with pytest.raises(ValueError, match="dure audit FILE"):
            main(wrong)
