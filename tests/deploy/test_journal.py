"""The journal: order, restarts, kills, full and broken disks, damage."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.deploy import journal as module
from dure.deploy.clock import FederationClock
from dure.deploy.journal import Event, Journal, backup
from dure.errors import RunFolderError, RunFolderWriteError


@contextmanager
def opened(
    folder: Path, run: str = "run", clock: FederationClock | None = None
) -> Iterator[Journal]:
    with closing(Journal(folder, clock or FederationClock(), run)) as journal:
        yield journal


def delivered(journal: Journal) -> list[Event]:
    """All that there is by now."""
    found = []
    while (event := journal.next(0)) is not None:
        found.append(event)
    return found


def changed(folder: Path, change: str) -> None:
    """The journal after a line of SQL that is not dure's."""
    with closing(sqlite3.connect(folder / "journal.db")) as connection, connection:
        connection.execute(change)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(0, 3)),
            st.tuples(st.just("deliver"), st.integers(0, 5)),
            st.tuples(st.just("forget"), st.integers(0, 3)),
            st.tuples(st.just("restart"), st.integers(0, 3)),
        ),
        max_size=12,
    )
)
@settings(max_examples=25)
def test_every_life_of_a_server_gets_the_same_rows(steps: list[tuple[str, int]]) -> None:
    """Whatever it had applied, and whatever was forgotten of that."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written: list[Event] = []
        journal = Journal(folder, FederationClock(), "run")
        position = forgotten = 0
        for what, number in steps:
            if what == "append":
                futures = [
                    journal.append("tick", each, 7, bytes([each]) * each) for each in range(number)
                ]
                written += [each.result() for each in futures]
            elif what == "deliver":
                for _ in range(number):
                    event = journal.next(0)
                    assert event == (written[position] if position < len(written) else None)
                    position += event is not None
            elif what == "forget":
                forgotten = max(forgotten, position - number)
                journal.forget_before(forgotten + 1).result()
            else:
                journal.close()
                journal = Journal(folder, FederationClock(), "run")
                assert (journal.last, journal.resumed) == (len(written), bool(written))
                position = max(forgotten, position - number)
                journal.read_from(position)
                assert journal.behind == (position < len(written))
        assert delivered(journal) == written[position:]
        assert not journal.behind
        assert [event.seq for event in written] == list(range(1, len(written) + 1))
        assert [event.at for event in written] == sorted(event.at for event in written)
        journal.close()


def test_rows_of_many_threads_have_an_order_without_gaps(tmp_path: Path) -> None:
    acknowledged: list[Event] = []
    clock = FederationClock()
    with opened(tmp_path, clock=clock) as journal:
        clock.run()

        def append(client: int) -> None:
            for ticket in range(40):
                acknowledged.append(journal.write("update", client, ticket))

        threads = [threading.Thread(target=append, args=(client,)) for client in range(8)]
        for thread in threads:
            thread.start()
        # While they write: what is delivered was committed, and nothing is left out.
        found = [journal.next(30) for _ in range(8 * 40)]
        for thread in threads:
            thread.join()
        assert journal.next(0) is None
    assert found == sorted(acknowledged)
    assert [event.seq for event in found if event] == list(range(1, 8 * 40 + 1))
    times = [event.at for event in found if event]
    assert times == sorted(times)
    assert times[-1] > 0
    for client in range(8):
        mine = [event.ticket for event in found if event and event.client == client]
        assert mine == list(range(40))


def test_rows_that_come_meanwhile_follow_those_of_the_earlier_life(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(module, "_MOST_AT_ONCE", 4)
    with opened(tmp_path) as journal:
        before = [journal.append("before", number) for number in range(10)]
    with opened(tmp_path) as journal:
        journal.read_from(3)
        expected = [each.result() for each in before][3:]
        found = [journal.next(0)]
        for number in range(6):
            expected.append(journal.write("live", number))
            assert journal.behind
            found.append(journal.next(0))
        assert not journal.behind
        assert found + delivered(journal) == expected


def test_who_waits_gets_the_row_when_it_comes(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        threading.Timer(0.05, journal.append, ["late"]).start()
        event = journal.next(30)
        assert event is not None
        assert event.kind == "late"


def test_the_clock_goes_on_from_the_last_row(tmp_path: Path) -> None:
    seconds = iter(range(100, 1000, 10))
    clock = FederationClock(0.0, lambda: float(next(seconds)))
    with opened(tmp_path, clock=clock) as journal:
        clock.run()
        last = journal.write("tick")
        assert last.at > 0
        journal.next(0)
        journal.forget_before(2).result()
    clock = FederationClock()
    with opened(tmp_path, clock=clock) as journal:
        assert clock.now() == last.at
        assert journal.write("tick").at == last.at


def test_whoever_gave_up_before_it_began_is_not_written_and_harms_nobody(tmp_path: Path) -> None:
    writing, go_on = threading.Event(), threading.Event()

    def waits() -> float:
        writing.set()
        go_on.wait(30)
        return 0.0

    clock = FederationClock(0.0, waits)
    go_on.set()
    with opened(tmp_path, clock=clock) as journal:
        go_on.clear()
        writing.clear()
        first = journal.append("first")
        writing.wait(30)
        given_up, last = journal.append("given up"), journal.append("last")
        assert given_up.cancel()
        assert not first.cancel()
        go_on.set()
        assert (first.result().seq, last.result().seq) == (1, 2)
        assert [event.kind for event in delivered(journal)] == ["first", "last"]


@pytest.mark.parametrize("wrong", [{"client": 1 << 63}, {"ticket": -(1 << 64)}, {"kind": "é"}])
def test_what_no_row_can_hold_is_refused_before_it_harms_others(
    tmp_path: Path, wrong: dict[str, object]
) -> None:
    with opened(tmp_path) as journal:
        with pytest.raises(ValueError, match="no event"):
            journal.append(**{"kind": "tick", **wrong})  # type: ignore[arg-type]
        assert journal.write("tick").seq == 1


def test_rows_that_were_not_delivered_are_not_forgotten(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        for _ in range(3):
            journal.write("tick")
        journal.next(0)
        journal.forget_before(2).result()
        with pytest.raises(ValueError, match="not all of them were delivered"):
            journal.forget_before(3)
        assert [event.seq for event in delivered(journal)] == [2, 3]
    with opened(tmp_path) as journal, pytest.raises(RunFolderError, match="row 1 is missing"):
        journal.read_from(0)


def test_a_full_disk_fails_what_it_does_not_take_and_later_ones_go_on(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        first = journal.write("tick")
        journal._writer.execute("PRAGMA max_page_count=8")
        with pytest.raises(RunFolderWriteError, match=r"cannot write .*journal.db: .* full"):
            journal.write("tick", body=b"x" * 100_000)
        journal._writer.execute("PRAGMA max_page_count=1000")
        second = journal.write("tick")
        assert second.seq == 2
        assert delivered(journal) == [first, second]


class Broken:
    """The connection of a journal to a disk that fails once; another row comes meanwhile."""

    def __init__(self, journal: Journal, reason: str) -> None:
        self._journal, self._reason = journal, reason
        self._connection = journal._writer
        self.meanwhile: Future[Event] | None = None

    def execute(self, sql: str) -> None:
        if sql == "COMMIT":
            self.meanwhile = self._journal.append("meanwhile")
            self._journal._writer = self._connection
            raise sqlite3.OperationalError(self._reason)
        self._connection.execute(sql)

    def __getattr__(self, name: str) -> object:
        return getattr(self._connection, name)


def result_of(future: Future[Event] | None) -> Event:
    assert future is not None
    return future.result(30)


def test_a_broken_disk_ends_it_once_what_is_there_was_delivered(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        first = journal.write("tick")
        broken = Broken(journal, "disk I/O error")
        journal._writer = broken  # type: ignore[assignment]
        for write in (lambda: journal.write("tick"), lambda: result_of(broken.meanwhile)) * 2:
            with pytest.raises(RunFolderWriteError, match=r"journal.db: disk I/O error"):
                write()
        assert journal.next() == first
        with pytest.raises(RunFolderWriteError, match=r"journal.db: disk I/O error"):
            journal.next()
    with opened(tmp_path) as journal:
        assert delivered(journal) == [first]


def test_a_lock_of_somebody_else_s_fails_one_row_and_not_the_next(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        locked = Broken(journal, "database is locked")
        journal._writer = locked  # type: ignore[assignment]
        with pytest.raises(RunFolderWriteError, match=r"journal.db: database is locked"):
            journal.write("tick")
        assert locked.meanwhile is not None
        assert locked.meanwhile.result(30).seq == 1
        assert [event.kind for event in delivered(journal)] == ["meanwhile"]


def test_after_the_end_nothing_is_written_and_nobody_waits(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        pass
    journal.close()
    with pytest.raises(RunFolderWriteError, match="is closed"):
        journal.write("tick")
    assert journal.next() is None


def test_all_that_was_acknowledged_is_there_after_a_kill(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("dure.record.lock.MOMENT", 0.0)
    place = Path(__file__).with_name("appends.py")
    with subprocess.Popen(
        [sys.executable, str(place), str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(50)]
        with pytest.raises(RunFolderError, match="another process serves the run"):
            Journal(tmp_path, FederationClock(), "run")
        backup(tmp_path, tmp_path / "copy.db")
        child.kill()
        # The last one may have been cut off.
        lines += [line for line in child.stdout if line.endswith("\n")]
    with opened(tmp_path) as journal:
        found = {f"{event.seq} {event.kind} {event.client}\n" for event in delivered(journal)}
        assert set(lines) <= found
    copy = tmp_path / "copy"
    copy.mkdir()
    (tmp_path / "copy.db").rename(copy / "journal.db")
    with opened(copy) as journal:
        copied = [f"{event.seq} {event.kind} {event.client}\n" for event in delivered(journal)]
        assert len(copied) >= 50
        assert set(copied) <= found


def test_a_copy_is_made_of_a_journal_that_runs(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    with opened(tmp_path) as journal:
        first = journal.write("tick")
        journal.backup(copy / "journal.db")
        journal.write("tock")
    with opened(copy) as journal:
        assert delivered(journal) == [first]
    with pytest.raises(RunFolderError, match="there is no"):
        backup(tmp_path / "nowhere", tmp_path / "other.db")
    with pytest.raises(RunFolderWriteError, match="cannot write"):
        backup(tmp_path, tmp_path / "nowhere" / "other.db")


def test_another_run_and_another_version_are_refused_by_name(tmp_path: Path) -> None:
    with opened(tmp_path, "mine"):
        pass
    with pytest.raises(RunFolderError, match=r"another run \(mine\) than this folder \(its\)"):
        Journal(tmp_path, FederationClock(), "its")
    changed(tmp_path, "UPDATE about SET value = '99' WHERE name = 'version'")
    with pytest.raises(
        RunFolderError, match="has version 99 of the format, but this dure reads version 1"
    ):
        Journal(tmp_path, FederationClock(), "mine")
    changed(tmp_path, "UPDATE about SET value = '1' WHERE name = 'version'")
    with opened(tmp_path, "mine"):
        pass


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE events SET body = 'other' WHERE seq = 5",
        "UPDATE events SET at = at + 1 WHERE seq = 5",
        "UPDATE events SET kind = 'tock' WHERE seq = 5",
        "UPDATE events SET kind = X'FF' WHERE seq = 5",
        "UPDATE events SET client = 'nobody' WHERE seq = 5",
        "DELETE FROM events WHERE seq = 5",
    ],
)
def test_rows_that_are_not_as_written_are_refused_before_the_first_is_applied(
    tmp_path: Path, change: str, monkeypatch
) -> None:
    monkeypatch.setattr(module, "_MOST_AT_ONCE", 2)
    with opened(tmp_path) as journal:
        for _ in range(7):
            journal.write("tick", body=b"{}")
    changed(tmp_path, change)
    with opened(tmp_path) as journal:
        with pytest.raises(RunFolderError, match=r"journal.db is damaged: row 5 "):
            journal.read_from(2)
        # What a checkpoint holds is not needed any more.
        journal.read_from(5)
        assert [event.seq for event in delivered(journal)] == [6, 7]


def test_a_journal_that_ends_before_its_checkpoint_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        journal.write("tick")
    with opened(tmp_path) as journal, pytest.raises(RunFolderError, match="ends with row 1, but"):
        journal.read_from(2)


@pytest.mark.parametrize("content", [b"", b"no database", b"SQLite format 3\0" + b"\7" * 9000])
def test_a_file_that_is_no_journal_is_refused_and_left(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "journal.db").write_bytes(content)
    with pytest.raises(RunFolderError, match=r"journal.db"):
        Journal(tmp_path, FederationClock(), "run")
    assert (tmp_path / "journal.db").read_bytes() == content
    (tmp_path / "journal.db").unlink()
    with closing(sqlite3.connect(tmp_path / "journal.db")) as connection:
        connection.execute("CREATE TABLE events (name)")
    with pytest.raises(RunFolderError, match=r"journal.db is not a journal of dure"):
        Journal(tmp_path, FederationClock(), "run")
    (tmp_path / "journal.db").unlink()
    with opened(tmp_path):
        pass


def left_by_a_kill(folder: Path, rows: int, last: bytes = b"", reused_after: int = 1000) -> Path:
    """The log of a server that was killed after so many rows, each of one frame.

    last: the body of the last row. reused_after: frames after which the log begins anew.
    """
    place = folder / "killed"
    place.mkdir()
    with opened(folder) as journal:
        journal._writer.execute(f"PRAGMA wal_autocheckpoint={reused_after}")
        for number in range(rows):
            journal.write("tick", number, body=last if number == rows - 1 else b"")
        for name in ("journal.db", "journal.db-wal"):
            (place / name).write_bytes((folder / name).read_bytes())
    return place / "journal.db-wal"


FRAME = 24 + 4096


def test_a_log_that_is_damaged_before_its_end_is_refused(tmp_path: Path) -> None:
    log = left_by_a_kill(tmp_path, 20)
    content = bytearray(log.read_bytes())
    for at in (len(content) - 3 * FRAME + 100, len(content) // 2, 32 + 100, 9):
        log.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(RunFolderError, match=r"journal.db-wal is damaged"):
            Journal(log.parent, FederationClock(), "run")
        # And the next time too: nothing was changed.
        with pytest.raises(RunFolderError, match=r"journal.db-wal is damaged"):
            Journal(log.parent, FederationClock(), "run")
    log.write_bytes(content)
    with opened(log.parent) as journal:
        assert len(delivered(journal)) == 20


def test_a_log_whose_last_row_was_cut_off_is_not_damaged(tmp_path: Path) -> None:
    log = left_by_a_kill(tmp_path, 20)
    content = log.read_bytes()
    log.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with opened(log.parent) as journal:
        assert len(delivered(journal)) == 19


def test_a_row_of_many_frames_that_was_cut_off_is_not_damaged(tmp_path: Path) -> None:
    log = left_by_a_kill(tmp_path, 20, last=bytes(50_000))
    content = bytearray(log.read_bytes())
    content[len(content) - 10 * FRAME + 100] ^= 1
    log.write_bytes(content)
    with opened(log.parent) as journal:
        assert len(delivered(journal)) == 19


def test_what_an_earlier_use_of_the_log_has_left_is_not_damaged(tmp_path: Path) -> None:
    log = left_by_a_kill(tmp_path, 20, reused_after=8)
    assert log.stat().st_size < 20 * FRAME
    with opened(log.parent) as journal:
        assert len(delivered(journal)) == 20


def test_a_log_without_its_journal_and_a_link_are_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.db-wal").write_bytes(b"log")
    with pytest.raises(RunFolderError, match=r"journal.db is missing, but its log"):
        Journal(tmp_path, FederationClock(), "run")
    (tmp_path / "journal.db-wal").unlink()
    (tmp_path / "journal.db").symlink_to(tmp_path / "elsewhere.db")
    with pytest.raises(RunFolderError, match="is a link"):
        Journal(tmp_path, FederationClock(), "run")
