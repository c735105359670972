"""Who is enrolled: tokens count once, numbers are given once, and other processes see it."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.deploy.server.register import FILE, EnrolError, Register
from dure.errors import RunFolderError, RunFolderWriteError


class Wall:
    now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def register(tmp_path, wall):
    with Register(tmp_path / FILE, clients=4, wall=wall) as made:
        yield made


def key(number: int) -> str:
    return f"{number:064x}"


def refused(register: Register, *asked, **more) -> str:
    before = register.clients(), register.invitations()
    with pytest.raises(EnrolError) as error:
        register.enrol(*asked, **more)
    assert (register.clients(), register.invitations()) == before
    return error.value.kind


def test_numbers_are_given_in_order_or_as_wished(register) -> None:
    numbers = [
        register.enrol(key(7)).number,
        register.enrol(key(8), wants=2).number,
        register.enrol(key(9)).number,
        register.enrol(key(10)).number,
    ]
    assert numbers == [0, 2, 1, 3]
    assert refused(register, key(11)) == "full"


def test_a_token_is_good_for_one_client(register) -> None:
    token = register.invite()
    assert register.enrol(key(1), "ward 3", token=token).number == 0
    assert refused(register, key(2), token=token) == "used token"


def test_the_same_key_is_the_same_client_whatever_it_brings(register) -> None:
    token = register.invite()
    client = register.enrol(key(1), "ward 3", token=token)
    # The answer was lost on its way, say.
    assert register.enrol(key(1), "ward 3", token=token) == client
    assert register.enrol(key(1), token=register.invite()) == client
    assert len(register.clients()) == 1
    assert len(register.invitations()) == 1


def test_a_known_key_cannot_be_another_client_too(register) -> None:
    register.enrol(key(1), "ward 3")
    assert refused(register, key(1), wants=3) == "number taken"
    assert refused(register, key(1), "ward 4") == "name taken"


def test_a_token_expires(register, wall) -> None:
    token = register.invite(lasts=60)
    wall.now += 60
    assert register.invitations() == []
    assert refused(register, key(1), token=token) == "expired token"


def test_a_token_of_nobody_is_wrong(register) -> None:
    token = register.invite()
    assert refused(register, key(1), token="") == "wrong token"
    assert refused(register, key(1), token=token[:-1]) == "wrong token"
    assert refused(register, key(1), token="\ud7ff" * 10**5) == "wrong token"


def test_a_withdrawn_token_is_wrong(register) -> None:
    token = register.invite()
    assert register.withdraw() == 1
    assert refused(register, key(1), token=token) == "wrong token"


def test_an_invitation_says_which_name_and_number(register) -> None:
    token = register.invite("ward 3", 2)
    assert refused(register, key(1), "ward 4", token=token) == "wrong name"
    assert refused(register, key(1), wants=0, token=token) == "wrong number"
    client = register.enrol(key(1), token=token)
    assert (client.number, client.name) == (2, "ward 3")


def test_a_refused_enrolment_leaves_its_token_good(register) -> None:
    register.enrol(key(1), "ward 3")
    token = register.invite()
    assert refused(register, key(2), "ward 3", token=token) == "name taken"
    assert register.enrol(key(2), "ward 4", token=token).number == 1


@pytest.mark.parametrize(("name", "same"), [("ward 3", "ward 3"), ("caf\u00e9", "cafe\u0301")])
def test_two_clients_have_two_names(register, name, same) -> None:
    register.enrol(key(1), name)
    assert refused(register, key(2), same) == "name taken"
    with pytest.raises(EnrolError, match="is called"):
        register.invite(same)


def test_a_number_that_is_taken_or_is_none_is_refused(register) -> None:
    register.enrol(key(1), wants=3)
    assert refused(register, key(2), wants=3) == "number taken"
    assert refused(register, key(2), wants=4) == "wrong number"
    assert refused(register, key(2), wants=-1) == "wrong number"
    for number in (3, 4):
        with pytest.raises(EnrolError):
            register.invite(number=number)


@pytest.mark.parametrize("name", [" x", "x\n", "\x1b[31m", "12", "x" * 65, "\u200b"])
def test_a_name_can_be_read_and_is_no_number(register, name) -> None:
    assert refused(register, key(1), name) == "wrong name"


def test_who_says_no_name_gets_one(register) -> None:
    assert register.enrol(key(1)).name == "client 0"


@pytest.mark.parametrize("who", ["0", "ward 3"])
def test_who_was_revoked_stays_out_and_its_number_taken(register, who) -> None:
    register.enrol(key(1), "ward 3")
    register.revoke(who)
    assert [client.state for client in register.clients()] == ["revoked"]
    assert refused(register, key(1), token=register.invite()) == "revoked"
    assert refused(register, key(2), wants=0) == "number taken"
    # A new machine of the same name.
    assert register.enrol(key(2), "ward 3").number == 1


def test_of_who_was_forgotten_the_number_is_left(register, tmp_path) -> None:
    token = register.invite("ward 3")
    register.enrol("5ec2e7" * 10 + "abcd", "ward 3", token=token)
    register.enrol(key(1))
    register.forget("ward 3")
    assert register.clients()[0] == (0, None, None, None, "forgotten")
    content = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"ward 3" not in content
    assert b"5ec2e75ec2e7" not in content
    assert refused(register, key(2), wants=0) == "number taken"
    assert register.enrol(key(2), "ward 3").number == 2


@pytest.mark.parametrize("who", ["9", "9" * 30, "nobody", ""])
def test_who_is_not_there_cannot_be_revoked_or_forgotten(register, who) -> None:
    register.enrol(key(1), "ward 3")
    for change in (register.revoke, register.forget):
        with pytest.raises(ValueError, match="no client has the name"):
            change(who)


def test_who_was_forgotten_is_not_there(register) -> None:
    register.enrol(key(1))
    register.forget("0")
    for change in (register.revoke, register.forget):
        with pytest.raises(ValueError, match="forgotten already"):
            change("0")


def test_no_token_is_kept_and_no_other_user_reads_the_file(register, tmp_path) -> None:
    token = register.invite()
    files = list(tmp_path.iterdir())
    assert token.encode() not in b"".join(file.read_bytes() for file in files)
    assert {stat.S_IMODE(file.stat().st_mode) & 0o077 for file in files} == {0}


def test_another_process_invites_and_revokes_while_the_first_has_it_open(
    register, tmp_path
) -> None:
    register.enrol(key(1), "ward 3")
    before = register.version()
    program = """
        import sys
        from pathlib import Path
        from dure.deploy.server.register import Register
        with Register(Path(sys.argv[1])) as register:
            register.revoke("ward 3")
            print(register.invite("ward 4"))
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / FILE)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert register.version() != before
    assert [client.state for client in register.clients()] == ["revoked"]
    assert register.enrol(key(2), token=ran.stdout.strip()).name == "ward 4"


def test_what_changed_is_read_and_nothing_else(register) -> None:
    register.enrol(key(1))
    register.enrol(key(2))
    last, changed = register.changes(0)
    assert [client.number for client in changed] == [0, 1]
    register.revoke("0")
    last, changed = register.changes(last)
    assert [(client.number, client.state) for client in changed] == [(0, "revoked")]
    assert register.changes(last) == (last, [])


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 3)), max_size=12))
def test_no_number_is_given_twice_and_no_key_has_two(tmp_path_factory, asked) -> None:
    with Register(tmp_path_factory.mktemp("run") / FILE, clients=4) as register:
        for who, wants in asked:
            try:
                client = register.enrol(key(who), wants=wants)
            except EnrolError:
                continue
            assert wants in (None, client.number)
        clients = register.clients()
    assert len({client.number for client in clients}) == len(clients) <= 4
    assert len({client.key for client in clients}) == len(clients)


def test_of_many_that_come_at_once_with_one_token_one_gets_in(register) -> None:
    token = register.invite()
    got: list[int | str] = []

    def come(who: int) -> None:
        try:
            got.append(register.enrol(key(who), token=token).number)
        except EnrolError as error:
            got.append(error.kind)

    threads = [threading.Thread(target=come, args=(who,)) for who in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got, key=str) == [0, *["used token"] * 7]


def test_who_opens_it_once_more_here_takes_no_lock_away(register, tmp_path) -> None:
    # A process that closes any descriptor of a file loses its POSIX locks on it: another process
    # then takes itself for the last one, and removes the log that this one still writes.
    log = tmp_path / f"{FILE}-wal"
    before = log.stat().st_ino
    with Register(tmp_path / FILE):
        pass
    ran = "import sys; from pathlib import Path\nfrom dure.deploy.server import register\n"
    ran += "with register.Register(Path(sys.argv[1])) as other: other.invite('ward 3')"
    subprocess.run([sys.executable, "-c", ran, str(tmp_path / FILE)], check=True)
    assert log.exists()
    assert log.stat().st_ino == before
    assert [one.name for one in register.invitations()] == ["ward 3"]


def test_processes_that_change_it_at_the_same_time_wait_for_each_other(register, tmp_path) -> None:
    for _ in range(10):
        register.invite()

    def change(own: Register, who: int) -> None:
        for _ in range(20):
            # Reads before it writes.
            own.invite("ward 3")
            own.enrol(key(who), wants=who)

    with Register(tmp_path / FILE) as other, ThreadPoolExecutor() as pool:
        changes = [pool.submit(change, own, who) for who, own in enumerate((register, other))]
        for one in changes:
            one.result()
    assert [client.number for client in register.clients()] == [0, 1]
    assert len(register.invitations()) == 50


def test_it_is_as_it_was_when_it_is_opened_again(tmp_path) -> None:
    with Register(tmp_path / FILE, clients=4) as register:
        client = register.enrol(key(1), "ward 3")
        token = register.invite()
    with Register(tmp_path / FILE, clients=4) as register:
        assert register.clients() == [client]
        assert register.enrol(key(2), token=token).number == 1


def test_a_register_of_other_clients_is_refused(register, tmp_path) -> None:
    with pytest.raises(RunFolderError, match="a run with 4 clients, not 5"):
        Register(tmp_path / FILE, clients=5)


def test_where_no_server_has_begun_there_is_none(tmp_path) -> None:
    with pytest.raises(RunFolderError, match="no run was served"):
        Register(tmp_path / FILE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"no database at all, but long enough to look at" * 9])
def test_a_file_that_is_no_register_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(RunFolderError):
        Register(tmp_path / FILE, clients=4)


def test_a_disk_that_is_full_changes_nothing(register) -> None:
    pages = register._db.execute("PRAGMA page_count").fetchone()[0]
    register._db.execute(f"PRAGMA max_page_count = {pages}").fetchone()
    invited = 0

    def fill() -> None:
        nonlocal invited
        while True:
            register.invite(name="x" * 64)
            invited += 1

    with pytest.raises(RunFolderWriteError, match="full"):
        fill()
    assert len(register.invitations()) == invited
    assert not register._db.in_transaction


def test_what_a_killed_process_has_begun_is_in_nobody_s_way(tmp_path) -> None:
    (tmp_path / f".{FILE}.{os.getpid()}").write_bytes(b"begun")
    with Register(tmp_path / FILE, clients=4) as register:
        assert register.clients() == []


def changed_row(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(statement)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE clients SET number = 3 WHERE number = 1",
        f"UPDATE clients SET key = '{key(9)}' WHERE number = 1",
        "UPDATE clients SET name = 'ward 4' WHERE number = 1",
        "UPDATE clients SET state = 'enrolled' WHERE number = 0",
        "DELETE FROM clients WHERE number = 1",
        "DELETE FROM seals WHERE number = 1",
    ],
)
def test_a_client_s_row_that_has_changed_is_named(tmp_path: Path, statement: str) -> None:
    with Register(tmp_path / FILE, clients=4) as register:
        for number in range(2):
            register.enrol(key(number), f"ward {number}")
        register.revoke("0")
    with Register(tmp_path / FILE) as again:
        assert [one.state for one in again.clients()] == ["revoked", "enrolled"]
    changed_row(tmp_path / FILE, statement)
    with pytest.raises(
        RunFolderError, match=r"clients\.db is damaged: client [013] has changed since"
    ):
        Register(tmp_path / FILE)


def test_a_register_of_an_older_dure_gets_its_checksums(tmp_path: Path) -> None:
    with Register(tmp_path / FILE, clients=4) as register:
        register.enrol(key(0), "ward 0")
    changed_row(tmp_path / FILE, "DROP TABLE seals")
    with Register(tmp_path / FILE) as register:
        register.enrol(key(1), "ward 1")
        register.forget("0")
    with Register(tmp_path / FILE) as register:
        assert [one.number for one in register.clients()] == [0, 1]
