"""Hosts: sets of ranks between which bytes do not cross a network.

Two processes share a host if the same kernel runs them (its boot id), in the same network and
process namespaces. Two containers of a machine are two hosts, because their traffic passes through
a network stack.

A partition of the ranks 0 … N-1 is a sequence of hosts, each a sequence of ranks. Its determination
takes an all-gather of a number a rank, which is bookkeeping and not counted; `Group.hosts` caches
the partition.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path

Hosts = tuple[tuple[int, ...], ...]
"""Partition of the ranks, ordered within each host and by first rank."""


def name_of_this_host() -> str:
    """Return a name that is equal in two processes only if they share a host."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def number_of(name: str) -> float:
    """Return 48 bits of a name's hash, which float64 represents exactly.

    A million names almost never collide.
    """
    return float(int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big"))


def partition_by(numbers: Sequence[float]) -> Hosts:
    """Return the ranks, grouped by the number of their host."""
    hosts: dict[float, list[int]] = {}
    for rank, number in enumerate(numbers):
        hosts.setdefault(number, []).append(rank)
    return tuple(tuple(ranks) for ranks in hosts.values())


def checked(hosts: Sequence[Sequence[int]], size: int) -> Hosts:
    """Return the partition in its normal order.

    Raises ValueError unless every rank is on exactly one host.
    """
    if sorted(rank for ranks in hosts for rank in ranks) != list(range(size)):
        raise ValueError(
            f"hosts are {[list(ranks) for ranks in hosts]}, but each of the ranks 0 to {size - 1} "
            "needs exactly one"
        )
    return tuple(sorted(tuple(sorted(ranks)) for ranks in hosts if ranks))
