"""Flower's rounds: its SuperLink, its SuperNodes and an app of ours (flower_app/), with TLS.

The processes are those that Flower's command line starts, with its defaults: a SuperExec for each
SuperLink and SuperNode, a ServerApp of the run, and a ClientApp for each message. Only the
installation of the app's dependencies is off, since there are none, and what it says to its makers.
Its home is the folder of the turn.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import families
from processes import HERE, free_port

JSON = dict[str, Any]
HOST = "127.0.0.1"
LISTENS = 60.0
"""Seconds until a SuperLink has to listen."""


class Federation:
    """python: the interpreter beside which Flower's commands lie. run: an empty folder."""

    def __init__(self, python: str, run: Path, tls: Path) -> None:
        self.run = run
        self.tls = tls
        self.commands = Path(python).parent
        self.port = free_port()
        self.environment = {
            **os.environ,
            "HOME": str(run),
            "FLWR_HOME": str(run / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            # SuperLink and SuperNode find the commands that they start there.
            "PATH": f"{self.commands}{os.pathsep}{os.environ['PATH']}",
        }
        (run / "home").mkdir()
        # What `flwr run` knows of the SuperLink.
        (run / "home" / "config.toml").write_text(
            f'[superlink.here]\naddress = "{HOST}:{self.port}"\n'
            f'root-certificates = "{tls / "authority.pem"}"\n'
        )
        shutil.copytree(HERE / "flower_app", run / "app")

    def start(self, name: str, *arguments: object) -> subprocess.Popen[bytes]:
        """A command of Flower's, whose words go to a file."""
        with (self.run / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [str(self.commands / name), *map(str, arguments)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self.environment,
                cwd=self.run,
            )

    def _certificate(self) -> list[object]:
        return [
            *["--ssl-certfile", self.tls / "server.pem"],
            *["--ssl-keyfile", self.tls / "server.key"],
            *["--ssl-ca-certfile", self.tls / "authority.pem"],
        ]

    def superlink(self) -> subprocess.Popen[bytes]:
        return self.start(
            "flower-superlink",
            *["--host", HOST, "--port", self.port, *self._certificate()],
            "--disable-runtime-dependency-installation",
        )

    def supernode(self) -> subprocess.Popen[bytes]:
        return self.start(
            "flower-supernode",
            *["--superlink", f"{HOST}:{self.port}"],
            *["--root-certificates", self.tls / "authority.pem"],
            *["--host", HOST, "--port", free_port(), *self._certificate()],
        )

    def flwr_run(self, **config: object) -> subprocess.Popen[bytes]:
        said = " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())
        return self.start("flwr", "run", self.run / "app", "here", "--run-config", said)

    def listens(self) -> None:
        """Returns once the SuperLink does. Raises RuntimeError."""
        until = time.monotonic() + LISTENS
        while True:
            try:
                socket.create_connection((HOST, self.port), timeout=1).close()
                return
            except OSError:
                if time.monotonic() > until:
                    raise RuntimeError(f"no SuperLink within {LISTENS} s") from None
                time.sleep(0.05)


def turn(
    size: int, clients: int, rounds: int, python: str, folder: Path, tls: Path, seconds: float
) -> JSON:
    """size: bytes. folder: a fresh one for this turn. seconds: until a round has to be over."""
    federation = Federation(python, folder, tls)
    notes = folder / "notes"
    notes.touch()
    with families.ended() as started:
        began = time.time()
        started.append(federation.superlink())
        started += [federation.supernode() for _ in range(clients)]
        pids = [one.pid for one in started]
        weighed = families.Memory(pids[0], pids[1:])
        federation.listens()
        started.append(
            federation.flwr_run(bytes=size, clients=clients, rounds=rounds, notes=str(notes))
        )
        for number in range(rounds):
            _until(notes, number + 1, started[:1], seconds)
        peaks = weighed.peaks()
    said = [json.loads(line) for line in notes.read_text().splitlines()]
    if any(line["failed"] or line["answered"] != clients for line in said):
        raise RuntimeError(f"clients have failed: {said}")
    at = [line["at"] for line in said]
    return {
        "seconds": statistics.median(b - a for a, b in itertools.pairwise(at)),
        "first_round_from_cold": at[0] - began,
        **peaks,
    }


def _until(notes: Path, rounds: int, live: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Until so many rounds are over. Raises RuntimeError."""
    until = time.monotonic() + seconds
    while notes.read_bytes().count(b"\n") < rounds:
        if any(one.poll() is not None for one in live):
            raise RuntimeError("the SuperLink has ended")
        if time.monotonic() > until:
            raise RuntimeError(f"round {rounds} was not over within {seconds} s")
        time.sleep(0.1)
