"""Idle clients by long poll; see benchmarks/deployment.py.

The server's memory is told in its two kinds: anonymous memory, and pages of files, which are
libraries (most of them torch's) that other processes share and that the system takes back first.
All of them wait for `--idle-seconds`: in 60 s each is answered twice, by the patience of 30 s.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
from pathlib import Path
from typing import Any

from processes import Talking, ended, memory

JSON = dict[str, Any]
DRIVERS = 2
RATE = 25.0
"""Check-ins a second and driver, while they arrive."""

PATIENCE = 600.0


def spread(samples: list[float]) -> JSON:
    cuts = statistics.quantiles(samples, n=100, method="inclusive")
    return {"p50": cuts[49], "p99": cuts[98], "largest": max(samples), "count": len(samples)}


def measure(asked: argparse.Namespace, folder: Path, tls: Path) -> JSON:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < asked.idle + 500:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, asked.idle + 500), hard))
    with ended() as started:
        # One more than come: nobody is asked to train.
        about = ["--folder", folder / "idle", "--floats", 1000, "--clients", asked.idle + 1]
        server = Talking("server.py", [*about, "--rounds", 1, "--tls", tls])
        started.append(server)
        url = server.hears("serving", PATIENCE)["serving"]
        base = memory(server.process.pid)
        drivers = []
        for number in range(DRIVERS):
            first, last = (asked.idle * each // DRIVERS for each in (number, number + 1))
            about = ["--url", url, "--tls", tls, "--first", first, "--count", last - first]
            about += ["--rate", RATE, "--seconds", asked.idle_seconds]
            drivers.append(Talking("idle.py", about))
        started.extend(drivers)
        arrived = [one for each in drivers for one in each.hears("arrived", PATIENCE)["arrived"]]
        print(f"arrived: {spread(arrived)}", file=sys.stderr, flush=True)
        said = [driver.hears("again", PATIENCE) for driver in drivers]
        after = memory(server.process.pid)
    return {
        "clients": asked.idle,
        "arriving_per_second": DRIVERS * RATE,
        "check_in_while_arriving": spread(arrived),
        "check_in_among_the_waiting": spread([one for each in said for one in each["again"]]),
        "broken": [one for each in said for one in each["broken"]],
        "server_bytes_before": base,
        "server_bytes": after,
        "anonymous_bytes_of_a_client": (after["anonymous"] - base["anonymous"]) / asked.idle,
    }
