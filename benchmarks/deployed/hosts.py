"""Two hosts on one machine with a slow link between them: 100 Mbit/s, and a delay.

Each host is a network namespace of a process that sleeps. Their ends of the link are TUN devices,
between which a process carries packets: it lets them through at the rate, and delivers each after
the delay. (Not tc's netem, which not every kernel has.) It takes root, and the commands ip,
nsenter, setpriv and unshare.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import select
import shutil
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ADDRESSES = ("10.78.0.1", "10.78.0.2")
DEVICE = "link0"
MTU = 1500
QUEUE = 1 << 20
"""Bytes that wait before the link, at most; what comes then is lost, as at a router."""

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000


def possible() -> bool:
    commands = ("ip", "nsenter", "setpriv", "unshare")
    return os.geteuid() == 0 and all(map(shutil.which, commands)) and Path("/dev/net/tun").exists()


def enter(pid: int) -> None:
    """Moves this thread to the network of a process."""
    descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(descriptor)


def inside(pid: int) -> list[str]:
    """What a command begins with that is to run on the host."""
    return ["nsenter", "--target", str(pid), "--net"]


def sent(pid: int) -> int:
    """Bytes that the host has put on the link, with all headers."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == DEVICE:
            return int(numbers.split()[8])
    raise RuntimeError(f"there is no {DEVICE}")


@contextmanager
def slow_link(bits_per_second: float, delay: float) -> Iterator[tuple[int, int]]:
    """The processes that the hosts belong to. delay: seconds of each way."""
    started: list[subprocess.Popen[bytes]] = []
    dies_with_us = ["setpriv", "--pdeathsig", "KILL"]
    try:
        for _ in ADDRESSES:
            command = [*dies_with_us, "unshare", "--net", "sleep", "infinity"]
            started.append(subprocess.Popen(command))
        for holder in started:
            _wait_for_its_own_network(holder)
        pids = [holder.pid for holder in started]
        carry = [sys.executable, __file__, *map(str, pids), str(bits_per_second), str(delay)]
        started.append(subprocess.Popen([*dies_with_us, *carry], stdout=subprocess.PIPE))
        assert started[-1].stdout is not None
        started[-1].stdout.readline()
        for pid, address, other in zip(pids, ADDRESSES, ADDRESSES[::-1], strict=True):
            for command in (
                f"ip address add {address} peer {other} dev {DEVICE}",
                f"ip link set {DEVICE} mtu {MTU} up",
                "ip link set lo up",
            ):
                subprocess.run([*inside(pid), *command.split()], check=True)
        yield pids[0], pids[1]
    finally:
        for one in started:
            one.kill()
            one.wait()
            if one.stdout is not None:
                one.stdout.close()


def _wait_for_its_own_network(holder: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 10
    while os.readlink(f"/proc/{holder.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        if holder.poll() is not None or time.monotonic() > until:
            raise RuntimeError("no network namespace can be made here")
        time.sleep(0.005)


def _end_in(pid: int) -> int:
    """The end of the link that lies on a host."""
    enter(pid)
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI)
    fcntl.ioctl(descriptor, _TUNSETIFF, request)
    return descriptor


class Way:
    """Packets in one direction."""

    def __init__(self, to: int, bits_per_second: float, delay: float) -> None:
        self.to = to
        self.seconds_per_byte = 8 / bits_per_second
        self.delay = delay
        self.free = 0.0
        """When the link has sent all that waits."""
        self.under_way: deque[tuple[float, bytes]] = deque()

    def take(self, packet: bytes, now: float) -> None:
        self.free = max(self.free, now)
        if (self.free - now) / self.seconds_per_byte > QUEUE:
            return
        self.free += len(packet) * self.seconds_per_byte
        self.under_way.append((self.free + self.delay, packet))

    def deliver(self, now: float) -> None:
        while self.under_way and self.under_way[0][0] <= now:
            # Its host may have gone, or take no more.
            with suppress(OSError):
                os.write(self.to, self.under_way.popleft()[1])


def carry(pids: tuple[int, int], bits_per_second: float, delay: float) -> None:
    """For ever."""
    ends = [_end_in(pid) for pid in pids]
    ways = {
        end: Way(other, bits_per_second, delay) for end, other in zip(ends, ends[::-1], strict=True)
    }
    print("ready", flush=True)
    while True:
        nexts = [way.under_way[0][0] for way in ways.values() if way.under_way]
        left = max(0.0, min(nexts) - time.monotonic()) if nexts else 1.0
        for end in select.select(ends, (), (), left)[0]:
            try:
                for _ in range(64):
                    ways[end].take(os.read(end, MTU + 100), time.monotonic())
            except BlockingIOError:
                pass
        for way in ways.values():
            way.deliver(time.monotonic())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("pids", type=int, nargs=2)
    parser.add_argument("rate", type=float)
    parser.add_argument("delay", type=float)
    said = parser.parse_args()
    carry((said.pids[0], said.pids[1]), said.rate, said.delay)
