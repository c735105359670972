"""Servers and clients that are killed; see benchmarks/deployment.py.

The server is killed 50 times in one run, each time a random moment after a client was served again.
Its clients train a small network and keep their state; the model's bits have to be those of a run
that nobody has interrupted. In `--places` other runs a client is killed in mid-work, and another
one has to be asked in its place.
"""

from __future__ import annotations

import argparse
import queue
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from processes import Talking, ended, free_port

JSON = dict[str, Any]
CLIENTS = 3
PATIENCE = 60.0


def killed(kills: int, seed: int, folder: Path, tls: Path) -> JSON:
    """One run whose server is killed so many times. Ends by itself once it may live."""
    draws = random.Random(seed)
    run = folder / "killed"
    port = free_port()
    url = f"https://127.0.0.1:{port}"
    model = folder / "killed.pt"
    # More than it comes to: the last server is told how many rounds there are by being stopped.
    about = ["--folder", run, "--floats", 0, "--clients", CLIENTS, "--rounds", 40 * kills]
    about += ["--port", port, "--tls", tls, "--model", model, "--checkpoint-every", 20]
    back: list[float] = []
    with ended() as started:
        sites = [
            Talking("site.py", [*_site(url, tls, k), "--part", k, "--state", folder / f"site{k}"])
            for k in range(CLIENTS)
        ]
        started.extend(sites)
        for kill in range(kills + 1):
            _forget(sites)
            server = Talking("server.py", about)
            started.append(server)
            server.hears("serving", PATIENCE)
            served = min(site.hears("sent", PATIENCE)["at"] for site in sites)
            back.append(served - server.began)
            if kill == kills:
                break
            time.sleep(draws.random() * 2.0)
            if server.process.poll() is not None:
                break
            server.kill()
            print(f"kill {kill + 1}: {back[-1]:.1f} s until served", file=sys.stderr, flush=True)
        server.process.wait(600)
    whole = folder / "whole.pt"
    _uninterrupted(about, folder, tls, whole)
    one, other = torch.load(model), torch.load(whole)
    return {
        "kills": len(back) - 1,
        "same_bits": all(torch.equal(one[name], other[name]) for name in one),
        "served_again": {
            "median": statistics.median(back[1:]),
            "largest": max(back[1:]),
            "samples": back[1:],
        },
    }


def _site(url: str, tls: Path, number: int) -> list[Any]:
    """The arguments that all sites have."""
    return ["--url", url, "--tls", tls, "--name", f"c{number}"]


def _forget(sites: list[Talking]) -> None:
    """What they have said until now."""
    for site in sites:
        try:
            while True:
                site.lines.get_nowait()
        except queue.Empty:
            pass


def _uninterrupted(about: list[Any], folder: Path, tls: Path, model: Path) -> None:
    """The same run with nobody killed."""
    port = free_port()
    changed = dict(zip(about[::2], about[1::2], strict=True))
    changed |= {"--folder": folder / "whole", "--port": port, "--model": model}
    with ended() as started:
        server = Talking("server.py", [one for pair in changed.items() for one in pair])
        started.append(server)
        for k in range(CLIENTS):
            site = _site(f"https://127.0.0.1:{port}", tls, k)
            started.append(Talking("site.py", [*site, "--part", k]))
        server.hears("rounds", 600)
        server.process.wait()


def place_filled(folder: Path, tls: Path, number: int) -> float:
    """Seconds from a client's death in mid-work until another is at work in its place."""
    port = free_port()
    with ended() as started:
        about = ["--folder", folder / f"place{number}", "--floats", 1000, "--rounds", 1]
        about += ["--clients", 3, "--cohort", 2, "--port", port, "--tls", tls]
        server = Talking("server.py", about)
        started.append(server)
        url = f"https://127.0.0.1:{port}"
        sites = [
            Talking("site.py", [*_site(url, tls, k), "--echo", "--work", 8, "--events"])
            for k in range(3)
        ]
        started.extend(sites)
        at_work: list[Talking] = []
        until = time.monotonic() + PATIENCE
        while len(at_work) < 2:
            if time.monotonic() > until:
                raise RuntimeError("two clients were to be at work by now")
            at_work += [one for one in sites if one not in at_work and _trains(one)]
        (idle,) = [one for one in sites if one not in at_work]
        time.sleep(1.5)
        at_work[0].kill()
        died = time.time()
        filled: float = idle.hears("training", PATIENCE)["at"] - died
        server.hears("rounds", PATIENCE)
        return filled


def _trains(site: Talking) -> bool:
    try:
        line = site.lines.get(timeout=0.05)
    except queue.Empty:
        return False
    return line is not None and line.get("event") == "training"


def measure(asked: argparse.Namespace, folder: Path, tls: Path) -> JSON:
    places = [place_filled(folder, tls, number) for number in range(asked.places)]
    print(f"places filled after {places}", file=sys.stderr, flush=True)
    found = killed(asked.kills, asked.seed, folder, tls)
    found["place_filled"] = {"median": statistics.median(places), "samples": places}
    found["seed"] = asked.seed
    return found
