"""An update over a link that breaks; see benchmarks/deployment.py.

Two network namespaces, joined by 100 Mbit/s and 25 ms each way. Before the server stands a relay
that breaks all connections, five times while the update is on its way, at random moments. Counted
are the bytes of parts that the server accepted, and all that the client's host put on the link from
the first byte of the update on, with the headers of TLS, TCP and IP and whatever was sent again.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import hosts
from processes import Talking, ended

JSON = dict[str, Any]
UPDATE = 40_000_000
BREAKS = 5
RATE = 100e6
DELAY = 0.025
PATIENCE = 300.0
PORT, BEHIND = 8443, 8444


def once(breaks: int, seed: int, folder: Path, tls: Path) -> JSON:
    draws = random.Random(seed)
    with hosts.slow_link(RATE, DELAY) as (there, here), ended() as started:
        about = ["--folder", folder / f"link{breaks}", "--floats", UPDATE // 4, "--clients", 1]
        about += ["--rounds", 1, "--port", BEHIND, "--tls", tls]
        server = Talking("server.py", about, before=hosts.inside(there))
        started.append(server)
        relay = Talking("relay.py", [hosts.ADDRESSES[0], PORT, BEHIND], before=hosts.inside(there))
        started.append(relay)
        relay.hears("ready", PATIENCE)
        server.hears("serving", PATIENCE)
        url = f"https://{hosts.ADDRESSES[0]}:{PORT}"
        about = ["--url", url, "--tls", tls, "--name", "far", "--echo", "--events"]
        site = Talking("site.py", about, before=hosts.inside(here))
        started.append(site)
        began = site.hears("sending", PATIENCE)["at"]
        before = hosts.sent(here)
        # All of it takes 3.2 s: each break has its share of them.
        share = 8 * UPDATE / RATE / (breaks + 1)
        for _ in range(breaks):
            _until_on_the_way(here, share * (0.7 + 0.6 * draws.random()) * RATE / 8)
            relay.process.send_signal(signal.SIGUSR1)
        seconds = site.hears("sent", PATIENCE)["at"] - began
        wire = hosts.sent(here) - before
        said = server.hears("rounds", PATIENCE)
    return {
        "breaks": breaks,
        "seconds": seconds,
        "accepted_over_size": said["taken"] / UPDATE,
        "wire_over_size": wire / UPDATE,
    }


def _until_on_the_way(host: int, count: float) -> None:
    """Until the host has sent so many bytes more, or does not go on."""
    goal = hosts.sent(host) + count
    until = time.monotonic() + 60
    while hosts.sent(host) < goal and time.monotonic() < until:
        time.sleep(0.01)


def measure(asked: argparse.Namespace, folder: Path, tls: Path) -> JSON:
    if not hosts.possible():
        return {"skipped": "it takes root, /dev/net/tun, ip, nsenter, setpriv and unshare"}
    found: JSON = {"update_bytes": UPDATE, "bits_per_second": RATE, "delay_each_way": DELAY}
    for name, breaks in (("unbroken", 0), ("broken", BREAKS)):
        found[name] = once(breaks, asked.seed, folder, tls)
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    return found
