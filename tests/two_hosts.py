"""Two hosts on one machine: network namespaces joined by a cable whose rate is that of a network.

The namespaces have no names: each belongs to a process that sleeps, and goes when it goes. The
kernel ends that process when the test's does, by whatever death. Ranks of a world of processes move
into them.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

ADDRESSES = ("10.77.0.1", "10.77.0.2")
CABLE = "cable"
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class TwoHosts:
    """The processes that the two namespaces belong to."""

    holders: tuple[int, int]

    def enter(self, host: int) -> None:
        """Moves the calling thread, and those it starts from now on, to a host."""
        descriptor = os.open(f"/proc/{self.holders[host]}/ns/net", os.O_RDONLY)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(descriptor, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(descriptor)


def bytes_over_the_cable() -> tuple[int, int]:
    """Bytes received and sent by the host of the calling process."""
    with open("/proc/self/net/dev") as file:
        line = next(line for line in file if line.strip().startswith(CABLE))
    numbers = line.partition(":")[2].split()
    return int(numbers[0]), int(numbers[8])


@contextmanager
def two_hosts(rate: str = "1gbit") -> Iterator[TwoHosts]:
    """Raises RuntimeError where that is not possible: it takes root, and the commands ip and
    unshare."""
    holders: list[subprocess.Popen[bytes]] = []
    try:
        if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "nsenter", "setpriv", "unshare"))):
            raise RuntimeError("two hosts on one machine take root and iproute2")
        for _ in range(2):
            command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"]
            holders.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
        for holder in holders:
            _wait_for_its_own_network(holder)
        first, second = (holder.pid for holder in holders)
        _inside(
            first,
            f"ip link add {CABLE} mtu 9000 type veth peer name {CABLE} mtu 9000 netns {second}",
        )
        for pid, address in zip((first, second), ADDRESSES, strict=True):
            _inside(pid, f"ip address add {address}/24 dev {CABLE}")
            _inside(pid, f"ip link set {CABLE} up")
            _inside(pid, "ip link set lo up")
            if shutil.which("tc") is not None:
                _inside(
                    pid,
                    f"tc qdisc add dev {CABLE} root tbf rate {rate} burst 256kb latency 50ms",
                    optional=True,
                )
        yield TwoHosts((first, second))
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def _wait_for_its_own_network(holder: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 10
    while os.readlink(f"/proc/{holder.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        if holder.poll() is not None or time.monotonic() > until:
            raise RuntimeError("no network namespace can be made here")
        time.sleep(0.005)


def _inside(pid: int, command: str, optional: bool = False) -> None:
    done = subprocess.run(
        ["nsenter", "--target", str(pid), "--net", *command.split()], capture_output=True, text=True
    )
    if done.returncode != 0 and not optional:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
