"""`dure roster`: a site's key, an owner's, and the list that the one signs of the others."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from dure.cli.main import main
from dure.deploy.client.state import ClientState
from dure.wire.members import fingerprint
from dure.wire.owners_roster import OwnersRoster
from dure.wire.signatures import Key


@pytest.fixture
def said(capsys, tmp_path, monkeypatch):
    """Runs a command line in an empty folder; gives (exit status, standard output, error)."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        status = main([one for word in words for one in word.split(" ")])
        return status, *capsys.readouterr()

    return run


def test_from_keys_to_a_roster_that_is_checked(said) -> None:
    sites = [said(f"roster key --state ward-{number}")[1].strip() for number in range(2)]
    owner = said("roster owner owner.pem")[1].strip()
    Path("clients.txt").write_text(f"0 ward 1 {sites[0]}\n1 ward 2 {sites[1]}\n")
    status, out, _ = said("roster sign clients.txt --key owner.pem --federation hearts --days 9")
    assert (status, out) == (0, "roster.json\n")
    roster = OwnersRoster.read(Path("roster.json"))
    assert roster.identities == dict(enumerate(sites))
    assert roster.owner == owner
    status, out, _ = said(f"roster show roster.json --owner {owner}")
    assert status == 0
    assert "'hearts', 2 clients" in out
    assert f"0  {fingerprint(sites[0])}  ward 1\n" in out
    status, out, error = said(f"roster show roster.json --owner {sites[0]}")
    assert (status, out, error.count("\n")) == (2, "", 1)
    assert "is signed by the owner" in error


def test_a_sites_key_is_the_one_with_which_it_joins(said) -> None:
    status, first, told = said("roster key --state ward")
    assert (status, first.count("\n")) == (0, 1)
    assert fingerprint(first.strip()) in told
    # Also while the client is at work.
    with ClientState(Path("ward")) as state:
        assert Key.load_or_create(state.key).public == first.strip()
        assert said("roster key --state ward")[1] == first
    assert stat.S_IMODE(Path("ward").stat().st_mode) == 0o700


def test_an_owners_key_is_secret_and_is_made_once(said) -> None:
    first = said("roster owner owner.pem")
    assert "do not store it on the server" in first[2]
    assert stat.S_IMODE(Path("owner.pem").stat().st_mode) == 0o600
    assert "PRIVATE" not in first[1] + first[2]
    again = said("roster owner owner.pem")
    assert again[:2] == first[:2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("roster sgn", "did you mean 'sign'"),
        ("roster key", "--state"),
        ("roster key here --state there", "give nothing else"),
        ("roster owner", "give KEY"),
        ("roster sign clients.txt --federation x --key nowhere", "dure roster owner makes one"),
        ("roster sign nowhere --federation x --key owner.pem", "cannot read the list of clients"),
        ("roster sign gap.txt --federation x --key owner.pem", "the roster has no client 0"),
        ("roster sign twice.txt --federation x --key owner.pem", "have the same identity"),
        ("roster show nowhere", "cannot read the roster nowhere"),
        ("roster show clients.txt", "the received data are not a roster"),
    ],
)
def test_mistakes_are_told_in_one_line(said, line, message) -> None:
    Key.load_or_create(Path("owner.pem"))
    Path("clients.txt").write_text(f"0 ward {'2' * 64}\n")
    Path("gap.txt").write_text(f"1 ward {'2' * 64}\n")
    Path("twice.txt").write_text(f"0 ward {'2' * 64}\n1 other {'2' * 64}\n")
    status, out, error = said(line)
    assert (status, out) == (2, "")
    assert message in error
    assert error.count("\n") == 1
    assert not Path("roster.json").exists()


@pytest.mark.parametrize("line", ["roster", "roster --help", "roster sign --help"])
def test_help_is_given_without_a_folder(said, line) -> None:
    status, out, error = said(line)
    assert (status, error) == (0, "")
    assert "dure roster sign" in out


def test_clients_that_are_started_anew_are_on_no_roster(said) -> None:
    status, _, error = said("serve digits fed-avg --clients 2 --local --roster roster.json")
    assert status == 2
    assert "--local starts clients with new keys" in error
