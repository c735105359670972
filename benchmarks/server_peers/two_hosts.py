"""Two hosts on one machine: network namespaces with a pair of virtual devices between them.

The link is as fast as the kernel. (`deployed/hosts.py` has slow ones.)
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "deployed"))

from hosts import _wait_for_its_own_network, inside, possible

ADDRESSES = ("10.79.0.1", "10.79.0.2")


class NoHostsError(RuntimeError):
    """Why there are none here."""


@contextmanager
def two_hosts() -> Iterator[list[list[str]]]:
    """What a command begins with that is to run on each of the hosts.

    Raises NoHostsError where they cannot be made.
    """
    if not possible():
        raise NoHostsError("network namespaces take root, and ip, nsenter, setpriv and unshare")
    holders: list[subprocess.Popen[bytes]] = []
    try:
        for _ in ADDRESSES:
            command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"]
            holders.append(subprocess.Popen(command))
        for holder in holders:
            _wait_for_its_own_network(holder)
        begins = [inside(holder.pid) for holder in holders]
        _run([*begins[0], *["ip", "link", "add", "near", "type", "veth", "peer", "name", "far"]])
        _run([*begins[0], *f"ip link set far netns {holders[1].pid}".split()])
        for begin, device, address in zip(begins, ("near", "far"), ADDRESSES, strict=True):
            _run([*begin, *f"ip address add {address}/24 dev {device}".split()])
            _run([*begin, *f"ip link set {device} up".split()])
            _run([*begin, *["ip", "link", "set", "lo", "up"]])
        yield begins
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NoHostsError(f"this kernel has no pair of devices: {done.stderr.strip()}")
