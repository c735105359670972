"""Rendezvous of a group's ranks: discovery of hosts, and setup of shared memory.

Every rank writes a card to the group's store: its host, its process, its pool. The first rank of
each host creates the segment, a file without a name (memfd), which its peers open by
/proc/<pid>/fd/<n>. The file is closed when all have mapped it, so that the segment disappears with
the last process of the group.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal
from weakref import WeakValueDictionary

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]

from dure.collectives.hosts import name_of_this_host
from dure.collectives.shared_memory import native, portable
from dure.collectives.shared_memory.host import Host, HostMembers
from dure.collectives.shared_memory.native import NativeHost
from dure.collectives.shared_memory.pool import SharedMapping, SharedMemoryPool, open_of, pool
from dure.collectives.shared_memory.portable import PortableHost, RankPipes
from dure.collectives.shared_memory.torch_error_texts import not_in_time
from dure.errors import PeerLostError
from dure.machine.cores import available_cores

Core = Literal["auto", "c", "torch"]

_SPIN = 1e-6
_YIELD = 60e-6
# Seconds that a waiting rank spins, and then yields its core, before it sleeps in the kernel.
_mappings: WeakValueDictionary[tuple[int, int, int], SharedMapping] = WeakValueDictionary()
# Pools of peers: a process maps each pool once, for all groups.


class GroupMemberInfo(msgspec.Struct):
    """Facts about a rank."""

    host: str
    process: int
    pool: int
    pool_bytes: int
    core: str


def choose_core(wanted: Core) -> str:
    """Return the core that this rank can use.

    Raises ValueError for "c" if the C core is missing.
    """
    if wanted not in ("auto", "c", "torch"):
        raise ValueError(f"there is no core {wanted!r}; choose auto, c or torch")
    built = native.library() is not None
    if wanted == "c" and not built:
        raise ValueError(
            "the C core was not built: install dure again where there is a C compiler, or use "
            "core='auto'"
        )
    return "torch" if wanted == "torch" or not built else "c"


class GroupRendezvous:
    """Ranks of a group at its store. names: names of the ranks in errors."""

    def __init__(self, store: Store, rank: int, names: Sequence[int], timeout: float) -> None:
        self.store = store
        self.rank = rank
        self.names = names
        self.timeout = timeout
        self._until = time.monotonic() + timeout

    def read(self, key: str, whose: int) -> bytes:
        """Return the value that rank `whose` has written.

        Raises PeerLostError after the timeout.
        """
        # A common deadline for all reads, so that delays of many ranks do not add up.
        left = max(0.001, self._until - time.monotonic())
        try:
            self.store.wait([key], timedelta(seconds=left))
            return bytes(self.store.get(key))
        except RuntimeError as error:
            raise PeerLostError(
                (self.names[whose],),
                "the meeting of a new group",
                "its start",
                not_in_time(self.timeout),
            ) from error

    def cards(self, own: GroupMemberInfo) -> list[GroupMemberInfo]:
        """Return the cards of all ranks, in order of rank. Raises PeerLostError as `read` does."""
        self.store.set(f"card {self.rank}", msgspec.json.encode(own).decode())
        return [
            msgspec.json.decode(self.read(f"card {rank}", rank), type=GroupMemberInfo)
            for rank in range(len(self.names))
        ]


def hosts_of(cards: Sequence[GroupMemberInfo]) -> list[list[int]]:
    """Return the ranks of each host, in order; hosts in the order of their first ranks."""
    hosts: dict[str, list[int]] = {}
    for rank, card in enumerate(cards):
        hosts.setdefault(card.host, []).append(rank)
    return list(hosts.values())


def find_hosts(
    store: Store, rank: int, names: Sequence[int], timeout: float, wanted: Core = "auto"
) -> tuple[list[list[int]], Host]:
    """Return the hosts of a group, and this rank's host, ready for collectives.

    names: names of the ranks in errors. Raises PeerLostError if a rank does not arrive within
    `timeout` seconds. wanted: the core to use.
    """
    meeting = GroupRendezvous(store, rank, names, timeout)
    shared = pool()
    # Processes of different users may not open each other's /proc/<pid>/fd: for dure they are on
    # different hosts.
    host = f"{name_of_this_host()} {os.getuid()}"
    cards = meeting.cards(
        GroupMemberInfo(
            host=host,
            process=os.getpid(),
            pool=shared.descriptor,
            pool_bytes=shared.nbytes,
            core=choose_core(wanted),
        )
    )
    hosts = hosts_of(cards)
    # From here on ranks are positions on this host; `names` and `processes` have the same order.
    here = next(host for host in hosts if rank in host)
    members = HostMembers(
        here.index(rank), tuple(names[r] for r in here), tuple(cards[r].process for r in here)
    )
    # All ranks read the same cards, and so choose the same core.
    if any(cards[r].core == "torch" for r in here):
        segment, descriptor = _segment(meeting, here, cards, portable.segment_bytes(len(here)))
        # Pipes have no names either: peers open them by descriptor numbers from the store.
        doors = RankPipes.made(len(here))
        meeting.store.set(f"doors {rank}", msgspec.json.encode(doors.addresses).decode())
        addresses = [
            msgspec.json.decode(meeting.read(f"doors {r}", r), type=list[int]) for r in here
        ]
        return hosts, PortableHost(members, timeout, segment, descriptor, doors, addresses)
    segment, descriptor = _segment(meeting, here, cards, native.segment_bytes(len(here)))
    os.close(descriptor)  # the mapping stays
    # With more ranks than cores, spinning takes the core from the rank for which it waits.
    crowded = len(here) > available_cores()
    peers = [_pool_of(cards[r], shared) for r in here]
    return hosts, NativeHost(
        members=members,
        timeout=timeout,
        segment=segment,
        pool=shared,
        peers=peers,
        patience=(0.0 if crowded else _SPIN, _YIELD),
    )


def _segment(
    meeting: GroupRendezvous, here: list[int], cards: list[GroupMemberInfo], nbytes: int
) -> tuple[SharedMapping, int]:
    """Return the shared memory of this host's ranks, and its file descriptor."""
    first = here[0]
    key = f"segment {first}"
    if meeting.rank == first:
        descriptor = os.memfd_create("dure-group")
        os.ftruncate(descriptor, nbytes)
        mapping = SharedMapping(descriptor, nbytes)
        meeting.store.set(key, str(descriptor))
        # Peers reach the file by this process's descriptor, which has to stay open until then.
        for rank in here[1:]:
            meeting.read(f"mapped {rank}", rank)
        return mapping, descriptor
    descriptor = open_of(cards[first].process, int(meeting.read(key, first)))
    meeting.store.set(f"mapped {meeting.rank}", "yes")
    return SharedMapping(descriptor, nbytes), descriptor


def _pool_of(card: GroupMemberInfo, own: SharedMemoryPool) -> SharedMapping:
    """Return a peer's pool, mapped into this process."""
    if card.process == os.getpid():
        return own.mapping
    descriptor = open_of(card.process, card.pool)
    try:
        # The inode is included, because process ids and descriptor numbers are reused.
        key = (card.process, card.pool, os.fstat(descriptor).st_ino)
        mapping = _mappings.get(key)
        if mapping is None:
            mapping = _mappings[key] = SharedMapping(descriptor, card.pool_bytes)
        return mapping
    finally:
        os.close(descriptor)
