"""`dure certificates` and `dure clients`: what they make, and what they say to mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dure.cli.main import main
from dure.deploy.server.register import FILE, Register
from dure.wire.certificates import client_context, server_context


@pytest.fixture
def said(capsys, tmp_path, monkeypatch):
    """Runs a command line in an empty folder; gives (exit status, standard output, error)."""
    monkeypatch.chdir(tmp_path)

    def run(line: str) -> tuple[int, str, str]:
        status = main(line.split())
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def served(said, tmp_path) -> Register:
    with Register(tmp_path / "run" / FILE, clients=3) as register:
        yield register


def test_the_certificates_that_are_made_do_for_a_server_and_its_clients(said) -> None:
    for line in ("init", "server fed.example.org", "client ward-3"):
        status, out, _ = said(f"certificates {line}")
        assert status == 0
        assert "PRIVATE" not in out
    folder = Path("certificates")
    server_context(folder / "server.pem", folder / "server.key", folder / "authority.pem")
    client_context(folder / "authority.pem", (folder / "ward-3.pem", folder / "ward-3.key"))


def test_a_folder_and_days_can_be_said(said) -> None:
    assert said("certificates init --folder here --days 3")[0] == 0
    assert said("certificates server --folder here --days 2")[0] == 0
    assert Path("here/server.pem").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("certificates srver", "did you mean 'server'"),
        ("certificates server", "create one with dure certificates init"),
        ("certificates init here", "takes no names"),
        ("certificates client", "name one client"),
        ("certificates init --day 3", "did you mean --days"),
        ("clients list", "give RUN and nothing"),
        ("clients revoke run", "give RUN CLIENT and nothing"),
        (
            "clients list nowhere",
            "no run was served from this folder: nowhere/clients.db is missing",
        ),
        ("clients invte run", "did you mean 'invite'"),
        ("clients revoke run nobody", "no client has the name 'nobody'"),
        ("clients invite run --number 3", "there is no client 3: client numbers are 0 to 2"),
        ("clients invite run --count 2 --name x", "leave --count out"),
        ("clients invite run --count 0", "1 or more"),
        ("clients invite run --days nan", "has to be more than 0 s"),
    ],
)
def test_mistakes_are_told_in_one_line(said, served, line, message) -> None:
    status, out, error = said(line)
    assert (status, out) == (2, "")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("line", ["certificates", "clients --help", "certificates server --help"])
def test_help_is_given_without_a_folder(said, line) -> None:
    status, out, error = said(line)
    assert (status, error) == (0, "")
    assert "RUN" in out or "certificates" in out


def test_a_token_that_is_printed_lets_one_client_in(said, served) -> None:
    status, out, _ = said("clients invite run --name ward-3 --number 2 --days 1")
    assert status == 0
    client = served.enrol("a" * 64, token=out.strip())
    assert (client.number, client.name) == (2, "ward-3")


def test_so_many_tokens_are_printed_as_are_asked_for(said, served) -> None:
    tokens = said("clients invite run --count 3")[1].split()
    assert len(set(tokens)) == 3
    # None that a command line would take for a flag.
    assert all(re.fullmatch("[0-9a-f]{32}", token) for token in tokens)
    assert "3 invitations are open" in said("clients list run")[1]
    assert said("clients withdraw run")[0] == 0
    assert "0 invitations are open" in said("clients list run")[1]


def test_the_list_says_who_is_there(said, served) -> None:
    served.enrol("a" * 64, "ward 3")
    served.enrol("b" * 64)
    assert said("clients revoke run 1")[:2] == (0, "client 1 (client 1) is revoked\n")
    out = said("clients list run")[1]
    assert re.search(r"^0 +ward 3 +enrolled .* a{16}$", out, re.MULTILINE)
    assert re.search(r"^1 +client 1 +revoked ", out, re.MULTILINE)
    assert "1 of 3 client ids are free" in out
    listed = json.loads(said("clients list run --json")[1])
    assert [client["state"] for client in listed["clients"]] == ["enrolled", "revoked"]


def test_of_who_was_forgotten_the_list_has_the_number(said, served) -> None:
    served.enrol("a" * 64, "ward-3")
    assert said("clients forget run ward-3")[:2] == (0, "client 0 is forgotten\n")
    out = said("clients list run")[1]
    assert re.search(r"^0 +forgotten$", out, re.MULTILINE)
    assert "aaaa" not in out
