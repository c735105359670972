"""`dure serve --local` and `dure join`, as a person types them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dure.cli.main import main
from dure.wire.certificates import issue_server, make_authority

SECONDS = 120


def serve(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dure", "serve", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    assert process.stderr is not None
    lines: list[str] = []
    for line in process.stderr:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"{text!r} was not said: {lines}")


def clients_of(folder: Path) -> list[str]:
    """The processes that have it in their command lines."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = process.read_bytes().decode(errors="replace").split("\0")
            if "join" in command and any(str(folder) in word for word in command):
                found.append(process.parent.name)
    return found


def test_server_and_clients_of_one_command_end_with_ctrl_c_and_go_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    federation = ["digits", "fed-avg", "--clients", "2", "--lr", "0.2", "--model", "logistic"]
    process = serve(*federation, "--local", "--rounds", "100000", "--out", str(run))
    try:
        assert "serving at http://127.0.0.1:" in read_until(process, "serving at")[-1]
        read_until(process, "2 of 2 clients are connected")
        read_until(process, "training: round")
        assert len(clients_of(run)) == 2
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
        assert process.returncode == 130
        assert said.splitlines()[-1] == (
            f"interrupted; resume with: dure serve --local --resume {run}"
        )
        assert clients_of(run) == []
        rounds = json.loads((run / "summary.json").read_text())["steps"] + 2
        process = serve("--local", "--resume", str(run), "--rounds", str(rounds))
        process.communicate(timeout=SECONDS)
        assert process.returncode == 0
        assert json.loads((run / "summary.json").read_text())["steps"] == rounds
        output = (run / "clients" / "1" / "output.txt").read_text()
        assert output.splitlines()[-1] == "dure: the run is over"
        assert clients_of(run) == []
    finally:
        process.kill()
        process.communicate()


def joins(
    url: str, *flags: str, stop_after: float | None = None, capsys: pytest.CaptureFixture[str]
) -> tuple[int, list[str]]:
    """Exit status, and the lines of standard error. stop_after: seconds until it is told to end."""
    with ended_after(stop_after or SECONDS):
        status = main(["join", url, "digits", *flags])
    return status, capsys.readouterr().err.splitlines()


@contextlib.contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Tells the command of the block to end, so many seconds after it has begun to listen to that:
    before, this process would end."""
    before = signal.getsignal(signal.SIGTERM)
    over = threading.Event()

    def tell() -> None:
        while signal.getsignal(signal.SIGTERM) == before:
            if over.wait(0.01):
                return
        if not over.wait(seconds):
            os.kill(os.getpid(), signal.SIGTERM)

    teller = threading.Thread(target=tell)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


@contextlib.contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """The port of something that is no server of dure."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection, contextlib.suppress(OSError):
                        answer(connection)

        thread = threading.Thread(target=accept)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_a_server_that_is_not_there_is_told_once_and_tried_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    status, said = joins(f"http://127.0.0.1:{port}", stop_after=3, capsys=capsys)
    assert status == 130
    refused, stopped = said
    assert refused.startswith(f"dure: 127.0.0.1:{port} refuses connections: is the server running?")
    assert stopped == "dure: stopped"


def test_a_server_that_stays_away_is_given_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dure.run.join.CHECK_SECONDS", 0.36)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    for flags in (["--give-up", "0.0001"], ["--check"]):
        status, said = joins(url, *flags, capsys=capsys)
        assert status == 1
        assert said[-1].startswith(f"dure: {url} was not reached for 0.36 s: ")
        assert said[-1].endswith("no state is saved without --state")
    status, said = joins(url, "--give-up", "0", capsys=capsys)
    assert status == 2
    assert "more than 0 hours" in said[0]


def test_http_to_a_server_of_https_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    # As uvicorn does where what it has read is no TLS.
    with answering(lambda connection: connection.recv(1 << 16) and None) as port:
        status, said = joins(f"http://127.0.0.1:{port}", stop_after=2, capsys=capsys)
    assert status == 130
    assert "is it an https:// server?" in said[0]
    assert len(said) == 2


def test_a_web_server_is_no_server_of_dure(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")

    with answering(answer) as port:
        status, said = joins(f"http://127.0.0.1:{port}", capsys=capsys)
    what = f"dure: 127.0.0.1:{port} is not a server of dure: it answers 404 Not Found"
    assert (status, said) == (1, [what])


def test_a_certificate_of_somebody_unknown_ends_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_authority(tmp_path)
    certificate = issue_server(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.certificate, certificate.key)
    with answering(lambda peer: context.wrap_socket(peer, server_side=True).close()) as port:
        status, said = joins(f"https://localhost:{port}", capsys=capsys)
    assert status == 2
    assert len(said) == 1
    assert "is not trusted" in said[0]
    assert "--authority" in said[0]


def test_an_address_without_a_scheme_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    status, said = joins("localhost:8765", capsys=capsys)
    assert (status, said) == (
        2,
        ["dure: localhost:8765 is not the address of a server: write https://HOST:PORT"],
    )


def test_what_cannot_be_served_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    command = ["serve", "digits", "fed-avg", "--clients", "2", "--out", str(run)]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused = {
            "cannot listen at 127.0.0.1": ["--port", port],
            "there is no certificate": ["--host", "0.0.0.0", "--port", "0"],
            "nowhere.pem": ["--certificate", str(tmp_path / "nowhere.pem"), "--port", "0"],
        }
        for reason, flags in refused.items():
            assert main([*command, *flags]) == 2
            (said,) = capsys.readouterr().err.splitlines()
            assert reason in said
            assert not run.exists()


def test_who_interrupts_a_server_that_waits_hears_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with ended_after(3):
        command = ["serve", "digits", "fed-avg", "--clients", "2", "--port", "0", "--out", str(run)]
        assert main(command) == 130
    said = capsys.readouterr().err.splitlines()
    assert f"  invite a client: dure clients invite {run}" in said
    assert said[-2:] == [
        f"nothing is trained yet; resume with: dure serve --resume {run}",
        "dure: interrupted",
    ]
