"""A token comes from a file or from standard input, where no other user of the machine reads it."""

from __future__ import annotations

import io
import os
import sys
import threading
from pathlib import Path

import pytest

from dure.cli.main import main
from dure.cli.network import token_of
from dure.deploy.client.site import ConnectionOptions
from dure.run import join as joining

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch):
    """Sets what is on standard input."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_without_a_token_there_is_none() -> None:
    assert token_of("", None) == ""
    assert token_of(TOKEN, None) == TOKEN


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n"])
def test_a_file_has_the_token_and_the_end_of_a_line(tmp_path: Path, end: str) -> None:
    file = tmp_path / "token"
    file.write_bytes(f"{TOKEN}{end}".encode())
    assert token_of("", file) == TOKEN


def test_a_pipe_is_a_file_too(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text(f"{TOKEN}\n"))
    writer.start()
    assert token_of("", pipe) == TOKEN
    writer.join(10)


@pytest.mark.parametrize(("token", "file"), [("-", None), ("", Path("-"))])
def test_a_token_is_read_on_standard_input(typed, token: str, file: Path | None) -> None:
    typed(f"{TOKEN}\nmore\n")
    assert token_of(token, file) == TOKEN


def test_a_person_who_types_a_token_sees_no_echo(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("seen"))
    monkeypatch.setattr("getpass.getpass", lambda prompt: TOKEN)
    assert token_of("-", None) == TOKEN


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"two words\n", b"a\nb\n", b"x" * 5000, b"\xff\xfe"]
)
def test_what_is_no_token_is_not_sent(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="contains no token") as error:
        token_of("", file)
    assert str(file) in str(error.value)
    assert "words" not in str(error.value)


def test_what_is_missing_or_given_twice_is_said(tmp_path: Path, typed) -> None:
    with pytest.raises(ValueError, match=r"cannot read the token in .*nowhere: No such file"):
        token_of("", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="given twice"):
        token_of(TOKEN, tmp_path / "token")
    typed("")
    with pytest.raises(ValueError, match="standard input contains no token"):
        token_of("-", None)


@pytest.mark.parametrize("flags", [["--token-file", "FILE"], ["--token", "-"], ["--token", TOKEN]])
@pytest.mark.parametrize("check", [[], ["--check"]])
def test_join_and_its_check_take_a_token_in_each_way(
    flags: list[str], check: list[str], tmp_path: Path, typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    typed(f"{TOKEN}\n")
    tokens: list[str] = []

    def joined(url: str, task: object, **how: object) -> str:
        tokens.append(str(how["token"]))
        return "the run is over"

    def checked(url: str, task: object, reach: ConnectionOptions) -> list[str]:
        tokens.append(reach.token)
        return []

    monkeypatch.setattr(joining, "join", joined)
    monkeypatch.setattr(joining, "check", checked)
    given = [str(tmp_path / "token") if flag == "FILE" else flag for flag in flags]
    assert main(["join", "http://127.0.0.1:1", "digits", *given, *check]) == 0
    assert tokens == [TOKEN]
