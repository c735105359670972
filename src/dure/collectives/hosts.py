"""Who shares a host: ranks between which bytes do not cross a network.

Two processes share one if the same kernel runs them (its boot id), in the same network and process
namespaces: two containers of one machine are two hosts, because what they send each other goes
through a network stack of its own.

A partition of the ranks 0 … N-1 is a sequence of hosts, each a sequence of ranks. Finding it takes
one all-gather of a number a rank, which is bookkeeping and not counted; `Group.hosts` remembers it.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path

Hosts = tuple[tuple[int, ...], ...]
"""A partition of the ranks, ordered within and by first rank."""


def name_of_this_host() -> str:
    """Equal in two processes only if they share a host."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def number_of(name: str) -> float:
    """48 bits of a name's hash: float64 holds them exactly.

    A million names hardly ever collide.
    """
    return float(int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big"))


def partition_by(numbers: Sequence[float]) -> Hosts:
    """The ranks, grouped by the number of their host."""
    hosts: dict[float, list[int]] = {}
    for rank, number in enumerate(numbers):
        hosts.setdefault(number, []).append(rank)
    return tuple(tuple(ranks) for ranks in hosts.values())


def checked(hosts: Sequence[Sequence[int]], size: int) -> Hosts:
    """The partition in its one order.

    Raises ValueError unless every rank is on exactly one host.
    """
    if sorted(rank for ranks in hosts for rank in ranks) != list(range(size)):
        raise ValueError(
            f"hosts are {[list(ranks) for ranks in hosts]}, but each of the ranks 0 to {size - 1} "
            f"has one"
        )
    return tuple(sorted(tuple(sorted(ranks)) for ranks in hosts if ranks))
