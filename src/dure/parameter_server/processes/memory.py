"""Shared memory between the processes of a host, for the tensors of their messages.

Each process has a pool (`dure.collectives.shared_memory.pool`), which other processes of the host
map. A gradient in its worker's pool is not sent: the server reads it there. A server writes pulled
weights into the worker's pool.

    push    the worker's copy into its pool, and the server's reading       d bytes, once each
    pull    the server's copy into the worker's pool                        d bytes, once

The module `buffers` tracks the free buffers of a worker's pool.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import msgspec
import torch
from torch import Tensor

from dure.collectives.hosts import name_of_this_host
from dure.collectives.shared_memory.pool import SharedMapping, open_of, pool
from dure.parameter_server.processes.frames import BufferRange

_MOST_VIEWS = 256


class RankInfo(msgspec.Struct, frozen=True):
    """Address of a process: host, shared memory, and listening socket.

    Args:
        name: name of the node.
        host: name of the host and user.
        process: process id.
        pool: file descriptor of the pool in that process.
        nbytes: bytes of the pool.
        address: host and port of the listener.
        key: fingerprint of the process's `DURE_KEY`; empty without a key.
    """

    name: str
    host: str
    process: int
    pool: int
    nbytes: int
    address: tuple[str, int]
    key: str = ""


def own_card(name: str, address: tuple[str, int], key: str = "") -> RankInfo:
    """Return this process's card."""
    own = pool()
    # Processes of different users may not open each other's files in /proc.
    host = f"{name_of_this_host()} {os.getuid()}"
    return RankInfo(name, host, os.getpid(), own.descriptor, own.nbytes, address, key)


class RankMemory:
    """Shared memory of the processes with these cards, if they are on this host."""

    def __init__(self, name: str, cards: dict[str, RankInfo]) -> None:
        self.name = name
        self.cards = cards
        self._maps: dict[str, SharedMapping] = {name: pool().mapping}
        self._views: dict[tuple[BufferRange, torch.dtype, int], Tensor] = {}
        """Cached views."""

    def see(self, others: Iterable[str]) -> None:
        """Map the memory of these processes of this host now.

        A later mapping is impossible after a process's end: only earlier mappings can read a
        gradient of a lost worker.
        """
        for other in others:
            self._map(other)

    def shares(self, other: str) -> bool:
        """Return whether another process is on this host, so that both share memory."""
        return self.cards[other].host == self.cards[self.name].host

    def place_of(self, tensor: Tensor) -> BufferRange | None:
        """Return the place of a tensor in shared memory; None for other memory."""
        if not tensor.is_cpu or not tensor.is_contiguous():
            return None
        address = tensor.data_ptr()
        nbytes = tensor.nbytes
        for owner, there in self._maps.items():
            offset = address - there.address
            if offset >= 0 and offset + nbytes <= there.nbytes:
                return BufferRange(owner, offset)
        return None

    def look(self, place: BufferRange, dtype: torch.dtype, count: int) -> Tensor | None:
        """Return `count` elements at a place as a vector; None if there are none."""
        # Buffers are reused, and a cached view is faster than a new view.
        found = self._views.get((place, dtype, count))
        if found is None:
            found = self._view(place, dtype, count)
            if found is not None:
                if len(self._views) >= _MOST_VIEWS:
                    self._views.clear()
                self._views[place, dtype, count] = found
        return found

    def _view(self, place: BufferRange, dtype: torch.dtype, count: int) -> Tensor | None:
        there = self._map(place.owner)
        size = count * dtype.itemsize
        if there is None or place.offset < 0 or place.offset + size > there.nbytes:
            return None
        if place.offset % dtype.itemsize:
            return None
        return there.tensor()[place.offset : place.offset + size].view(dtype)

    def _map(self, owner: str) -> SharedMapping | None:
        if owner not in self._maps:
            card = self.cards.get(owner)
            if card is None or not self.shares(owner):
                return None
            try:
                descriptor = open_of(card.process, card.pool)
            except OSError:
                return None
            try:
                self._maps[owner] = SharedMapping(descriptor, card.nbytes)
            finally:
                os.close(descriptor)
        return self._maps[owner]
