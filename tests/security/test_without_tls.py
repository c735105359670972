"""Without TLS nothing is sent to another machine, unless the user says so; servers and clients have
the same rule."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import dure
from dure.cli.main import main
from dure.cli.network import JoinInstructions
from dure.deploy.client import session
from dure.deploy.client.site import ConnectionOptions, opened
from dure.deploy.world import Network
from dure.wire.loopback import is_loopback
from small import small_task

HERE = ["localhost", "127.0.0.1", "127.8.9.10", "::1"]
ELSEWHERE = [
    "fed.example.org",
    "192.0.2.1",
    "0.0.0.0",
    "2001:db8::1",
    "127.0.0.1.example.org",
    "localhost.example.org",
    "127.1",
    "2130706433",
]


def url_of(host: str) -> str:
    return f"http://[{host}]:8765" if ":" in host else f"http://{host}:8765"


@pytest.fixture
def dials_nobody(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The URLs of sessions that were begun, which ends a client."""
    begun: list[str] = []

    def begins(self: object, url: str, **how: object) -> None:
        begun.append(url)
        raise InterruptedError

    monkeypatch.setattr(session.Session, "__init__", begins)
    return begun


@pytest.mark.parametrize("host", ELSEWHERE)
def test_a_client_sends_nothing_without_tls(
    host: str, dials_nobody: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = url_of(host)
    with pytest.raises(ValueError, match=r"does not use TLS: .*--insecure"):
        dure.join(url, small_task(), token="secret")
    with pytest.raises(ValueError, match=r"does not use TLS: .*--insecure"):
        dure.Client(url, examples=3, token="secret")
    state = tmp_path / "state"
    for flags in ([], ["--check"], ["--token", "secret"]):
        assert main(["join", url, "digits", "--state", str(state), *flags]) == 2
        assert "does not use TLS" in capsys.readouterr().err
    assert not state.exists()
    assert dials_nobody == []
    # Where the user says so, it does.
    with pytest.raises(InterruptedError):
        dure.join(url, small_task(), insecure=True)
    with pytest.raises(InterruptedError):
        dure.Client(url, examples=3, insecure=True)
    assert dials_nobody == [url] * 2


@pytest.mark.parametrize("host", HERE)
def test_this_machine_needs_no_tls(host: str, dials_nobody: list[str]) -> None:
    stop = threading.Event()
    with pytest.raises(InterruptedError), opened(url_of(host), ConnectionOptions(), stop):
        pass
    assert dials_nobody == [url_of(host)]


def test_with_tls_every_machine_will_do(dials_nobody: list[str]) -> None:
    with pytest.raises(InterruptedError):
        dure.join("https://fed.example.org:8765", small_task())


@pytest.mark.parametrize("host", [*HERE, *ELSEWHERE])
def test_a_server_has_the_same_rule(host: str) -> None:
    here = host in HERE
    assert is_loopback(host) == here
    if here:
        assert Network(host=host).context()[0] is None
        return
    with pytest.raises(ValueError, match="can be reached by other machines"):
        Network(host=host).context()
    with pytest.raises(ValueError, match="can be reached by other machines"):
        Network(status_port=0, status_host=host)
    assert Network(host=host, insecure=True).context()[0] is None


def test_a_server_without_tls_says_how_a_client_joins(capsys: pytest.CaptureFixture[str]) -> None:
    says = JoinInstructions("digits", True, Path("run"), False)
    for url, there in (
        ("http://127.0.0.1:1", False),
        ("http://192.0.2.1:1", True),
        ("https://192.0.2.1:1", False),
    ):
        says({"serving": url})
        said = capsys.readouterr().err
        assert ("--insecure" in said) == there
        assert "--token-file" in said
