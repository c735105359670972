"""Seconds of a round whose clients answer at once; see benchmarks/deployment.py."""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import families
import flower
from processes import Talking, ended, free_port

JSON = dict[str, Any]


class Size(NamedTuple):
    """clients, and bytes of the model; rounds: of a turn."""

    clients: int
    bytes: int
    rounds: int

    def __str__(self) -> str:
        return f"{self.clients} x {self.bytes / 1e6:g} MB"


SIZES = [Size(2, 800_000, 30), Size(10, 800_000, 15), Size(2, 40_000_000, 8)]
LARGE = Size(2, 400_000_000, 4)
PATIENCE = 300.0
FLOWER_ROUNDS = 4
"""Of a turn: its rounds take seconds, whatever the model's size."""


def dure(size: Size, folder: Path, tls: Path, light: bool) -> JSON:
    """A turn of dure: all processes begin at the same moment. light: clients without torch."""
    run = Path(tempfile.mkdtemp(prefix="run-", dir=folder))
    port = free_port()
    about = ["--url", f"https://127.0.0.1:{port}", "--tls", tls]
    with ended() as started:
        server = Talking(
            "server.py",
            [
                *["--folder", run / "run", "--floats", size.bytes // 4, "--clients", size.clients],
                *["--rounds", size.rounds, "--port", port, "--tls", tls],
            ],
        )
        started.append(server)
        for k in range(size.clients):
            own = [*about, "--name", f"c{k}", *([] if light else ["--echo"])]
            started.append(Talking("light.py" if light else "site.py", own))
        weighed = _weighed(started)
        serving = server.hears("serving", PATIENCE)
        said = server.hears("rounds", PATIENCE, started)
        shutil.rmtree(run)
        return {
            "seconds": statistics.median(said["rounds"]),
            "processor_of_server": statistics.median(said["processor"]),
            "first_round_from_cold": said["first_round"] - server.began,
            "serving_from_cold": serving["at"] - server.began,
            "processor_of_server_until_serving": serving["processor"],
            **weighed.peaks(),
        }


def _weighed(started: list[Talking]) -> families.Memory:
    """The first is the server."""
    pids = [one.process.pid for one in started]
    return families.Memory(pids[0], pids[1:])


def peer(program: str, python: str, size: Size, tls: Path) -> JSON:
    """A turn of raw.py or grpc_aio.py."""
    about = ["--bytes", size.bytes, "--clients", size.clients, "--rounds", size.rounds]
    about += ["--port", free_port(), "--tls", tls]
    with ended() as started:
        server = Talking(program, ["server", *about], python)
        started.append(server)
        for _ in range(size.clients):
            started.append(Talking(program, ["client", *about], python))
        weighed = _weighed(started)
        said = server.hears("rounds", PATIENCE, started)
        return {
            "seconds": statistics.median(said["rounds"]),
            "first_round_from_cold": said["first_round"] - server.began,
            **weighed.peaks(),
        }


def flowers(python: str, size: Size, folder: Path, tls: Path) -> JSON:
    """A turn of Flower."""
    run = Path(tempfile.mkdtemp(prefix="flower-", dir=folder))
    rounds = min(size.rounds, FLOWER_ROUNDS)
    found = flower.turn(size.bytes, size.clients, rounds, python, run, tls, PATIENCE)
    shutil.rmtree(run)
    return found


def version(python: str, package: str) -> str | None:
    """None where that Python has it not."""
    ask = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([python, "-c", ask], capture_output=True, text=True)
    return done.stdout.strip() or None


def measure(asked: argparse.Namespace, folder: Path, tls: Path) -> JSON:
    peers = asked.peers or sys.executable
    memory = Path(tempfile.mkdtemp(prefix="dure-", dir="/dev/shm"))
    contenders: dict[str, Callable[[Size], JSON]] = {
        "dure, disk": lambda size: dure(size, folder, tls, size.clients > 2),
        "dure, memory": lambda size: dure(size, memory, tls, size.clients > 2),
        "dure, memory, light clients": lambda size: dure(size, memory, tls, True),
        "sockets with TLS": lambda size: peer("raw.py", sys.executable, size, tls),
        "grpc.aio with TLS": lambda size: peer("grpc_aio.py", peers, size, tls),
        "Flower with TLS": lambda size: flowers(peers, size, folder, tls),
    }
    versions = {package: version(peers, package) for package in ("grpcio", "flwr")}
    skipped = {}
    for name, package in (("grpc.aio with TLS", "grpcio"), ("Flower with TLS", "flwr")):
        if versions[package] is None:
            skipped[name] = f"{peers} has no {package}"
            del contenders[name]
    if asked.contenders:
        contenders = {name: one for name, one in contenders.items() if name in asked.contenders}
    sizes = [*SIZES, *([LARGE] if asked.large else [])]
    if asked.sizes:
        sizes = [size for size in [*SIZES, LARGE] if str(size) in asked.sizes]
    rows: JSON = {}
    try:
        for size in sizes:
            rows[str(size)] = _turns(size, contenders, asked.turns)
    finally:
        shutil.rmtree(memory, ignore_errors=True)
    return {"rows": rows, "versions": versions, "skipped": skipped}


def _turns(size: Size, contenders: dict[str, Callable[[Size], JSON]], turns: int) -> JSON:
    samples: dict[str, list[JSON]] = {name: [] for name in contenders}
    order = list(contenders)
    for number in range(turns):
        for name in order[number % len(order) :] + order[: number % len(order)]:
            try:
                samples[name].append(contenders[name](size))
            except RuntimeError as error:
                print(f"{size}: {name}: {error}", file=sys.stderr, flush=True)
                continue
            print(f"{size}: {name}: {samples[name][-1]}", file=sys.stderr, flush=True)
    return {
        name: {
            what: {
                "median": statistics.median(one[what] for one in own),
                "samples": [one[what] for one in own],
            }
            for what in own[0]
        }
        for name, own in samples.items()
        if own
    }
